"""The end of a run: OUTPUT_DIR/vae, which diffusers.AutoencoderKL.from_pretrained loads, and the result.

If the weights of a stage validate worse than its start, the folder that they replace is kept beside it, once
per stage: later pieces of the stage replace what the first wrote.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from vae.config.options import Config
from vae.images.pixels import to_float
from vae.interop.diffusers_folder import WEIGHTS_NAME, diffusers_config, save_diffusers_folder
from vae.interop.latent_statistics import LatentSums, add_patches, is_unmeasured, set_latent_norm
from vae.interop.safetensors_file import stored_weights
from vae.interop.vae_files import START_KEY
from vae.model.autoencoder import AutoencoderKL
from vae.step import Networks, network_input
from vae.system import console
from vae.system.errors import NonFiniteError, UserError
from vae.training.checkpoints.store import position_name
from vae.training.output.run_folder import epoch_name, resume_command
from vae.training.state import TrainingState

EXPORT_NAME = "vae"  # folder in OUTPUT_DIR
WORSE_KEY = "below_start_of_epoch"  # metadata key of an export below its start: the stage's first epoch
LATENT_IMAGES = 256  # crops from which the latent statistics are measured


@torch.no_grad()
def latent_constants(
    model: AutoencoderKL,
    networks: Networks,
    batches: Iterable[torch.Tensor],
    fixed_scaling: tuple[float, float] | None = None,
) -> tuple[float, float]:
    """Scaling and shift of the latents: `fixed_scaling`, or measured on uint8 (B, 3, H, W) batches.

    A latent norm that is not measured yet is measured, too.
    """
    latent_norm = model.bn if model.bn is not None and is_unmeasured(model.bn) else None
    if fixed_scaling is not None and latent_norm is None:
        return fixed_scaling
    latents, patches = LatentSums(), LatentSums()
    for images in batches:
        posterior = model.encode(network_input(to_float(images), networks, networks.eval_dtype))
        latents.add(posterior.mean, posterior.logvar)
        if latent_norm is not None:
            add_patches(patches, posterior)
    if latent_norm is not None and patches.count:
        set_latent_norm(model, patches.statistics())
    if fixed_scaling is not None or not latents.count:
        return fixed_scaling or (1.0, 0.0)
    measured = latents.statistics()
    return measured.scaling, measured.shift


class Export:
    """Writes OUTPUT_DIR/vae. `peak` is the learning rate of the last stage, for the texts."""

    def __init__(self, config: Config, state: TrainingState, peak: float) -> None:
        self.folder = Path(config.run.output_dir) / EXPORT_NAME
        self._config, self._state, self._peak = config, state, peak

    def write(self, constants: tuple[float, float], overflows_fp16: bool = False) -> None:
        """Write the folder with scaling and shift; nothing if a value is not finite: NonFiniteError.

        The hash of the weights with which the run began is in the file; averages of VAEs compare it.
        """
        state = self._state
        values = torch.tensor(constants), *state.eval_model.state_dict().values()
        if not all(bool(torch.isfinite(value.cpu()).all()) for value in values):  # as the file will have them
            raise NonFiniteError(
                f"{self.folder} is not written, because weights or statistics of the latents are not finite: "
                f"{self._remedy()}"
            )
        weights, start = stored_weights(state.eval_model, "fp32"), state.lineage.start
        metadata = {START_KEY: start} if start else {}
        if state.history.is_below_start:
            self._keep_replaced()
            metadata[WORSE_KEY] = str(state.stage.first_epoch)
        config = diffusers_config(
            state.eval_model.config, state.stage.image_size, *constants, force_upcast=overflows_fp16
        )
        save_diffusers_folder(self.folder, weights, config, metadata)

    def _keep_replaced(self) -> None:
        """Rename the folder that the weights of a worse validation would replace, and report it."""
        folder, history = self.folder, self._state.history
        if not (folder / "config.json").is_file() or self._is_kept():  # config.json is written last
            return
        kept, number = folder.with_name("vae_before"), 2
        while os.path.lexists(kept):
            kept, number = folder.with_name(f"vae_before_{number}"), number + 1
        try:
            folder.rename(kept)
        except OSError as error:  # Windows: a program has opened one of its files
            raise UserError(
                f"{folder} cannot be renamed to {kept.name}: {error.strerror}: close the programs that use "
                f"it, then export with: {resume_command(folder.parent)}"
            ) from error
        line = (
            f"PSNR is {history.last_psnr:.2f} dB, and {history.start_psnr:.2f} dB at the start of this "
            f"stage, so the VAE of before is kept in {kept}"
        )
        if self._config.loss.adversarial_weight > 0:
            console.info(f"{line}: the adversarial loss may lower PSNR, so compare the pictures of both")
        else:
            console.warning(f"{line}: {self._remedy()}")

    def _is_kept(self) -> bool:
        """Whether the folder is of this stage and below its start: then that of its start is kept already."""
        try:
            with safe_open(self.folder / WEIGHTS_NAME, framework="pt") as file:
                return (file.metadata() or {}).get(WORSE_KEY) == str(self._state.stage.first_epoch)
        except (OSError, SafetensorError):
            return False

    def _remedy(self) -> str:
        """The command that trains on from the best checkpoint."""
        name, stage, folder = self._state.history.best_checkpoint, self._state.stage, self.folder.parent
        text = f"lower --learning_rate (now {self._peak:.3g}), or train for more epochs"
        if not name or name == position_name(self._state.position) or not (folder / name).is_file():
            return text
        flags = ["--image_size", str(stage.image_size), "--num_epochs", str(stage.num_epochs)]
        if name in {epoch_name(n) for n in range(stage.first_epoch + 1, stage.end_epoch + 1)}:
            flags = []  # the stage continues
        command = console.command_line("python", "train_vae.py", "--resume_from", folder / name, *flags)
        return f"{text}, from the better checkpoint: {command}"
