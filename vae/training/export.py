"""The end of a run: OUTPUT_DIR/vae, which diffusers.AutoencoderKL.from_pretrained loads, and the result.

A folder that this run has not written is kept beside it. So is what the weights of a stage would replace that
validate worse than its start, once per stage: later pieces of the stage replace what the first wrote.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import torch

from vae.config.options import Config
from vae.images.pixels import to_float
from vae.interop.checkpoint_file import checkpoint_digest
from vae.interop.latent_statistics import LatentConstants, is_unmeasured, set_latent_norm, sums_of
from vae.interop.model_card import modelspec
from vae.interop.vae_files import CHECKPOINT_KEY, RUN_KEY, START_KEY
from vae.interop.writing import WEIGHTS_NAME, describe, save_diffusers_folder, stored_metadata, stored_weights
from vae.model.autoencoder import AutoencoderKL
from vae.step import Networks, network_input, unwrapped
from vae.system import console
from vae.system.errors import NonFiniteError, UserError
from vae.system.files import read_marker
from vae.training.checkpoints import position_name
from vae.training.provenance import note_exported
from vae.training.run_folder import epoch_name, resume_command
from vae.training.state import TrainingState

EXPORT_NAME = "vae"  # folder in OUTPUT_DIR
LATENT_IMAGES = 256  # crops from which the latent statistics are measured


@torch.no_grad()
def latent_constants(
    model: AutoencoderKL,
    networks: Networks,
    batches: Iterable[torch.Tensor],
    fixed: LatentConstants | None = None,
) -> LatentConstants:
    """Constants of the latents: measured on uint8 (B, 3, H, W) batches, and scaling and shift from `fixed`.

    A latent norm that is not measured for these latents is measured, too. A frozen encoder keeps `fixed` ones
    or none, and its latent norm: diffusion models were trained with them.
    """
    if unwrapped(networks.autoencoder).encoder_frozen:
        return fixed or LatentConstants()
    latent_norm = model.bn if model.bn is not None and is_unmeasured(model.bn, encoder_trained=True) else None
    inputs = (network_input(to_float(images), networks, networks.eval_dtype) for images in batches)
    latents, patches = sums_of(map(model.encode, inputs), latent_norm)
    if latent_norm is not None and patches.count:
        set_latent_norm(model, patches.statistics())
    if not latents.count:
        return fixed or LatentConstants()
    measured = latents.statistics().constants
    return measured._replace(scaling=fixed.scaling, shift=fixed.shift) if fixed else measured


def is_exported(output_dir: Path, checkpoint: Path) -> bool:
    """Whether OUTPUT_DIR/vae has the weights of this checkpoint."""
    metadata = stored_metadata(output_dir / EXPORT_NAME / WEIGHTS_NAME)
    return (
        metadata.get(CHECKPOINT_KEY) == checkpoint_digest(checkpoint)
        and (output_dir / EXPORT_NAME / "config.json").is_file()  # it is written last
    )


class Export:
    """Writes OUTPUT_DIR/vae. `remedy`: that of the last stage, if PSNR has fallen in it."""

    def __init__(self, config: Config, state: TrainingState, remedy: str) -> None:
        self.folder = Path(config.run.output_dir) / EXPORT_NAME
        self._config = config
        self._state = state
        self._remedy_of_decrease = remedy

    def write(self, constants: LatentConstants, checkpoint: Path, overflows_fp16: bool = False) -> None:
        """Write the folder with constants of the latents; nothing if a value is not finite: NonFiniteError.

        The hash of the weights with which the run began is in the file; averages of VAEs compare it. So is
        the SHA-256 of the `checkpoint` with these weights.
        """
        state = self._state
        numbers = (constants.scaling, constants.shift, *constants.mean, *constants.std)
        values = torch.tensor(numbers), *state.eval_model.state_dict().values()
        if not all(bool(torch.isfinite(value.cpu()).all()) for value in values):  # as the file will have them
            raise NonFiniteError(
                f"{self.folder} is not written, because weights or statistics of the latents are not finite: "
                f"{self._remedy('lower --learning_rate')}"
            )
        weights = stored_weights(state.eval_model, "fp32")
        start = state.identity.start
        digest = checkpoint_digest(checkpoint)
        marker = read_marker(self.folder.parent)
        metadata = {CHECKPOINT_KEY: digest, RUN_KEY: marker.id if marker else ""}
        metadata |= {START_KEY: start} if start else {}
        before = stored_metadata(self.folder / WEIGHTS_NAME)
        if self._is_foreign(before, metadata[RUN_KEY]):
            console.warning(f"{self.folder} is not of this run, so it is kept in {self._keep_replaced()}")
        if state.history.is_below_start:
            self._report_worse()
        model, size = state.eval_model, state.stage.image_size
        in_file = state.latent_constants is not None and bool(state.latent_constants.mean)
        how = {"force_upcast": overflows_fp16, "were_in_config": in_file}
        config, of_latents = describe(model, size, constants, **how)
        metadata |= of_latents | modelspec(model, self.folder.absolute().parent, size)
        save_diffusers_folder(self.folder, weights, config, metadata)
        note_exported(self.folder.parent, digest)

    def _is_foreign(self, before: dict[str, str], run_id: str) -> bool:
        """Whether the folder has files that this run has not written, but would replace."""
        if not self.folder.is_dir():
            return os.path.lexists(self.folder)
        names = (WEIGHTS_NAME, "config.json")
        return before.get(RUN_KEY) != run_id and any((self.folder / name).exists() for name in names)

    def _keep_replaced(self) -> Path:
        """Rename the folder that would be replaced; its new name."""
        folder = self.folder
        kept = folder.with_name("vae_before")
        number = 2
        while os.path.lexists(kept):
            kept = folder.with_name(f"vae_before_{number}")
            number += 1
        try:
            folder.rename(kept)
        except OSError as error:  # Windows: a program has opened one of its files
            raise UserError(
                f"{folder} cannot be renamed to {kept.name}: {error.strerror}: close the programs that use "
                f"it, then export with: {resume_command(folder.parent)}"
            ) from error
        return kept

    def _report_worse(self) -> None:
        history = self._state.history
        line = (
            f"PSNR is {history.last_psnr:.2f} dB, and {history.start_psnr:.2f} dB at the start of this stage"
        )
        if self._config.loss.adversarial_weight > 0:
            console.info(f"{line}: the adversarial loss may lower PSNR, so compare the pictures of both")
        else:
            console.warning(f"{line}: {self._remedy(self._remedy_of_decrease)}")

    def _remedy(self, text: str) -> str:
        """The remedy `text`, and the command that trains on from the best checkpoint."""
        name = self._state.history.best_checkpoint
        stage = self._state.stage
        folder = self.folder.parent
        if not name or name == position_name(self._state.position) or not (folder / name).is_file():
            return text
        flags = ["--image_size", str(stage.image_size), "--num_epochs", str(stage.num_epochs)]
        if name in {epoch_name(n) for n in range(stage.first_epoch + 1, stage.end_epoch + 1)}:
            flags = []  # the stage continues
        command = console.command_line("python", "train_vae.py", "--resume_from", folder / name, *flags)
        return f"{text}, from the better checkpoint: {command}"
