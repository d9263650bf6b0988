"""The end of a run: OUTPUT_DIR/vae, which diffusers.AutoencoderKL.from_pretrained loads."""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from vae.images.pixels import to_float
from vae.interop.checkpoint_file import checkpoint_digest
from vae.interop.latent_statistics import LatentConstants, is_unmeasured, set_latent_norm, sums_of
from vae.interop.vae_files import START_KEY
from vae.interop.vae_path import WEIGHTS_NAME
from vae.interop.writing import WritePlan, constants_text, write_vae
from vae.model.autoencoder import AutoencoderKL
from vae.step import Networks, network_input, unwrapped
from vae.system.errors import NonFiniteError, UserError
from vae.system.files import read_marker, utf8_path
from vae.training.state import TrainingState

EXPORT_NAME = "vae"  # folder in OUTPUT_DIR
CHECKPOINT_KEY = "checkpoint_sha256"  # metadata key: of the checkpoint with the same weights
RUN_KEY = "run"  # metadata key of the id in the marker of the run's folder
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
        return fixed or LatentConstants(1.0)
    latent_norm = model.bn if model.bn is not None and is_unmeasured(model.bn, encoder_trained=True) else None
    inputs = (network_input(to_float(images), networks, networks.eval_dtype) for images in batches)
    latents, patches = sums_of(map(model.encode, inputs), latent_norm)
    if latent_norm is not None and patches.count:
        set_latent_norm(model, patches.statistics())
    if not latents.count:
        return fixed or LatentConstants(1.0)
    measured = latents.statistics().constants
    return measured._replace(scaling=fixed.scaling, shift=fixed.shift) if fixed else measured


def is_exported(output_dir: Path, checkpoint: Path) -> bool:
    """Whether OUTPUT_DIR/vae has the weights of this checkpoint."""
    metadata = stored_metadata(output_dir / EXPORT_NAME / WEIGHTS_NAME)
    return (
        metadata.get(CHECKPOINT_KEY) == checkpoint_digest(checkpoint)
        and (output_dir / EXPORT_NAME / "config.json").is_file()  # it is written last
    )


def stored_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file; empty if it has none or cannot be read."""
    try:
        with utf8_path(path) as readable, safe_open(readable, framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def write_export(
    output_dir: Path,
    state: TrainingState,
    constants: LatentConstants,
    checkpoint: Path,
    resume_command: str,
    overflows_fp16: bool = False,
) -> str:
    """Write OUTPUT_DIR/vae with constants of the latents; nothing if a value is not finite: NonFiniteError.

    Returns the constants that are in config.json, for people.

    In the file are the hash of the weights with which the run began, which averages of VAEs compare, and the
    SHA-256 of the `checkpoint` with these weights.
    """
    model = state.eval_model
    folder = output_dir / EXPORT_NAME
    numbers = (constants.scaling or 0.0, constants.shift, *constants.mean, *constants.std)
    values = torch.tensor(numbers), *model.state_dict().values()
    if not all(bool(torch.isfinite(value.cpu()).all()) for value in values):  # as the file will have them
        raise NonFiniteError(
            f"{folder} is not written, because weights or statistics of the latents are not finite: "
            "lower --learning_rate"
        )
    marker = read_marker(output_dir)
    metadata = {CHECKPOINT_KEY: checkpoint_digest(checkpoint), RUN_KEY: marker.id if marker else ""}
    if state.identity.start:
        metadata[START_KEY] = state.identity.start
    check_export_folder(output_dir, metadata[RUN_KEY], f"export with: {resume_command}")
    in_file = state.latent_constants is not None and bool(state.latent_constants.mean)
    plan = WritePlan(
        state.stage.image_size,
        constants,
        title=output_dir.absolute().stem,
        force_upcast=overflows_fp16,
        channels_were_in_config=in_file,
        metadata=metadata,
    )
    return constants_text(write_vae(model, folder, plan))


def check_export_folder(output_dir: Path, run_id: str, then: str) -> None:
    """Raise UserError that ends with `then` if OUTPUT_DIR/vae has a VAE that the run did not write."""
    folder = output_dir / EXPORT_NAME
    if not any((folder / name).exists() for name in (WEIGHTS_NAME, "config.json")):
        return
    if stored_metadata(folder / WEIGHTS_NAME).get(RUN_KEY) != run_id:
        raise UserError(f"{folder} is not of this run, so it is not replaced: move it away, then {then}")
