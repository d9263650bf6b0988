"""The end of a run: OUTPUT_DIR/vae, which diffusers.AutoencoderKL.from_pretrained loads, and the result.

If the weights of a stage validate worse than its start, the folder that they replace is kept beside it, once
per stage: later pieces of the stage replace what the first wrote.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open

from vae.images.pixels import to_float
from vae.interop.diffusers_folder import WEIGHTS_NAME, diffusers_config, save_diffusers_folder
from vae.interop.latent_statistics import LatentSums, add_patches, is_unmeasured, set_latent_norm
from vae.interop.safetensors_file import stored_weights
from vae.interop.vae_files import START_KEY
from vae.model.autoencoder import AutoencoderKL
from vae.step import Networks, network_input
from vae.system import console
from vae.system.errors import NonFiniteError, UserError
from vae.training.between_steps import save_samples
from vae.training.checkpoints.saving import raise_if_diverged
from vae.training.checkpoints.store import position_name
from vae.training.context import RunContext
from vae.training.output.logbook import Logbook
from vae.training.output.run_folder import epoch_name
from vae.training.records.summary import next_command, progress_line, result_lines
from vae.training.recovery.watchdog import Watchdog
from vae.training.stages import Stage
from vae.training.state import TrainingState
from vae.training.validation.measure import Metrics

_Item = TypeVar("_Item")

EXPORT_NAME = "vae"  # folder in OUTPUT_DIR
WORSE_KEY = "below_start_of_epoch"  # metadata key of an export below its start: the stage's first epoch
LATENT_IMAGES = 256  # crops from which the latent statistics are measured


@torch.no_grad()
def latent_sums(
    model: AutoencoderKL, networks: Networks, batches: Iterable[torch.Tensor]
) -> tuple[LatentSums, LatentSums]:
    """Sums over the latents of uint8 (B, 3, H, W) batches, and over the 2x2 patches of the latents."""
    latents, patches = LatentSums(), LatentSums()
    for images in batches:
        posterior = model.encode(network_input(to_float(images), networks))
        latents.add(posterior.mean, posterior.logvar)
        if model.bn is not None:
            add_patches(patches, posterior)
    return latents, patches


def latent_constants(
    model: AutoencoderKL,
    networks: Networks,
    batches: Iterable[torch.Tensor],
    fixed_scaling: tuple[float, float] | None = None,
) -> tuple[float, float]:
    """Scaling and shift of the latents: `fixed_scaling`, or measured on `batches`, as the latent norm is."""
    scaling, shift = fixed_scaling or (1.0, 0.0)
    latent_norm = model.bn if model.bn is not None and is_unmeasured(model.bn) else None
    if fixed_scaling is None or latent_norm is not None:
        latents, patches = latent_sums(model, networks, batches)
        if latent_norm is not None and patches.count:
            set_latent_norm(model, patches.statistics())
        if fixed_scaling is None and latents.count:
            measured = latents.statistics()
            scaling, shift = measured.scaling, measured.shift
    return scaling, shift


def export_final(run: RunContext, state: TrainingState, stage: Stage, constants: tuple[float, float]) -> None:
    """Write OUTPUT_DIR/vae with scaling and shift; nothing if a value is not finite: NonFiniteError.

    The hash of the weights with which the run began is in the file; averages of VAEs compare it.
    """
    model, start = state.eval_model, state.lineage.start
    weights, folder = stored_weights(model, "fp32"), run.output_dir / EXPORT_NAME
    finite = [torch.isfinite(values).all() for values in (torch.tensor(constants), *weights.values())]
    if not all(map(bool, finite)):
        raise NonFiniteError(
            f"{folder} is not written, because weights or statistics of the latents are not finite: "
            f"{_remedy(run, state, stage)}"
        )
    metadata = {START_KEY: start} if start else {}
    if state.history.is_below_start:
        _keep_replaced(run, state, stage)
        metadata[WORSE_KEY] = str(stage.first_epoch)
    config = diffusers_config(model.config, stage.image_size, *constants)
    save_diffusers_folder(folder, weights, config, metadata)


def _keep_replaced(run: RunContext, state: TrainingState, stage: Stage) -> None:
    """Rename the export of before, which the weights of a worse validation would replace, and report it."""
    folder, history = run.output_dir / EXPORT_NAME, state.history
    if not (folder / "config.json").is_file() or _is_worse_of(folder, stage):  # config.json is written last
        return
    kept, number = folder.with_name("vae_before"), 2
    while os.path.lexists(kept):
        kept, number = folder.with_name(f"vae_before_{number}"), number + 1
    try:
        folder.rename(kept)
    except OSError as error:  # Windows: a program has opened one of its files
        raise UserError(
            f"{folder} cannot be renamed to {kept.name}: {error.strerror}: close the programs that use it, "
            f"then export with: {run.resume_command}"
        ) from error
    line = (
        f"PSNR is {history.last_psnr:.2f} dB, and {history.start_psnr:.2f} dB at the start of this stage, so "
        f"the VAE of before is kept in {kept}"
    )
    if run.config.loss.adversarial_weight > 0:
        console.info(f"{line}: the adversarial loss may lower PSNR, so compare the pictures of both")
    else:
        console.warning(f"{line}: {_remedy(run, state, stage)}")


def _is_worse_of(folder: Path, stage: Stage) -> bool:
    """Whether the export in `folder` is of this stage and below its start, which is then kept already."""
    try:
        with safe_open(folder / WEIGHTS_NAME, framework="pt") as file:
            return (file.metadata() or {}).get(WORSE_KEY) == str(stage.first_epoch)
    except (OSError, SafetensorError):
        return False


def _remedy(run: RunContext, state: TrainingState, stage: Stage) -> str:
    """The command that trains on from the best checkpoint."""
    name, rate = state.history.best_checkpoint, run.peak_of(stage)
    text = f"lower --learning_rate (now {rate:.3g}), or train for more epochs"
    if not name or name == position_name(state.position) or not (run.output_dir / name).is_file():
        return text
    flags = ["--image_size", str(stage.image_size), "--num_epochs", str(stage.num_epochs)]
    if name in {epoch_name(n) for n in range(stage.first_epoch + 1, stage.end_epoch + 1)}:
        flags = []  # the stage continues
    path = run.output_dir / name
    command = console.command_line("python", "train_vae.py", "--resume_from", path, *flags)
    return f"{text}, from the better checkpoint: {command}"


def finish(
    run: RunContext,
    state: TrainingState,
    stage: Stage,
    logbook: Logbook,
    baselines: dict[str, Metrics],
    watchdog: Watchdog,
) -> None:
    """Export the weights and print the result beside the `baselines` of `stage`, the last one."""
    save_samples(run, state, logbook, stage.image_size)
    logbook.draw_results()
    watchdog.beat()
    failure = None
    if not run.dist.is_main:
        watchdog.end()  # it waits while the main process exports
    else:
        dataset = run.training_set.crops(run.config, stage.image_size, run.steps_of(stage).images).scattered()
        stride = max(1, len(dataset) // LATENT_IMAGES)  # a sample over all folders, not only the first
        first_epoch = 0
        crops = (dataset[first_epoch, index].image for index in range(0, len(dataset), stride))
        batches = (crop[None].to(run.dist.device) for crop in _beating(crops, watchdog) if crop is not None)
        constants = latent_constants(state.eval_model, run.networks, batches, state.latent_scaling)
        try:
            export_final(run, state, stage, constants)
        except NonFiniteError as error:
            failure = str(error)
    raise_if_diverged(run, failure)
    if run.dist.is_main:
        lines = [
            progress_line(state, run.steps_of(stage)),
            *result_lines(run.output_dir, run.config, state, baselines, constants),
            f"next    {next_command(run.output_dir, run.resumed_from, state)}",
        ]
        console.info("\n".join(lines))


def _beating(items: Iterator[_Item], watchdog: Watchdog) -> Iterator[_Item]:
    for item in items:
        watchdog.beat()
        yield item
