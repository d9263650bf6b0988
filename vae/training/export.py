"""The end of a run: OUTPUT_DIR/vae, which diffusers.AutoencoderKL.from_pretrained loads, and the result."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch

from vae import console
from vae.interop.diffusers_folder import diffusers_config, save_diffusers_folder
from vae.interop.latent_statistics import LatentSums, add_patches, is_unmeasured, set_latent_norm
from vae.interop.safetensors_file import stored_weights
from vae.interop.vae_files import START_KEY
from vae.model.autoencoder import AutoencoderKL
from vae.pixels import to_float
from vae.step import Networks, network_input
from vae.training.between_steps import save_samples
from vae.training.context import RunContext
from vae.training.output.logbook import Logbook
from vae.training.stages import Stage
from vae.training.state import TrainingState
from vae.training.summary import next_command, progress_line, result_lines
from vae.training.validation.measure import Metrics
from vae.training.watchdog import Watchdog

_Item = TypeVar("_Item")

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


def export_final(
    folder: Path,
    model: AutoencoderKL,
    networks: Networks,
    batches: Iterable[torch.Tensor],
    image_size: int,
    fixed_scaling: tuple[float, float] | None = None,
    start: str = "",
) -> tuple[float, float]:
    """Write the diffusers folder; returns scaling and shift: `fixed_scaling`, or measured on `batches`.

    `start` is the hash of the weights with which the run began; averages of VAEs compare it.
    """
    scaling, shift = fixed_scaling or (1.0, 0.0)
    latent_norm = model.bn if model.bn is not None and is_unmeasured(model.bn) else None
    if fixed_scaling is None or latent_norm is not None:
        latents, patches = latent_sums(model, networks, batches)
        if latent_norm is not None and patches.count:
            set_latent_norm(model, patches.statistics())
        if fixed_scaling is None and latents.count:
            measured = latents.statistics()
            scaling, shift = measured.scaling, measured.shift
    config = diffusers_config(model.config, image_size, scaling, shift)
    save_diffusers_folder(folder, stored_weights(model, "fp32"), config, {START_KEY: start} if start else {})
    return scaling, shift


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
    if not run.dist.is_main:
        watchdog.end()  # it waits while the main process exports
    else:
        dataset = run.training_set.crops(run.config, stage.image_size, run.steps_of(stage).images).scattered()
        stride = max(1, len(dataset) // LATENT_IMAGES)  # a sample over all folders, not only the first
        first_epoch = 0
        crops = (dataset[first_epoch, index].image for index in range(0, len(dataset), stride))
        batches = (crop[None].to(run.dist.device) for crop in _beating(crops, watchdog) if crop is not None)
        model, folder = state.eval_model, run.output_dir / "vae"
        size, fixed = stage.image_size, state.latent_scaling
        start = state.lineage.start
        constants = export_final(folder, model, run.networks, batches, size, fixed, start)
        lines = [
            progress_line(state, run.steps_of(stage)),
            *result_lines(run.output_dir, run.config, state, baselines, constants),
            f"next    {next_command(run.output_dir, run.resumed_from, state)}",
        ]
        console.info("\n".join(lines))
    run.dist.barrier()


def _beating(items: Iterator[_Item], watchdog: Watchdog) -> Iterator[_Item]:
    for item in items:
        watchdog.beat()
        yield item
