"""What kind of VAE a path names, and its files. Reads no weights and needs no PyTorch."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vae.interop.hub import download, hub_name
from vae.system.errors import UserError

WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
_HUB_NAMES = (WEIGHTS_NAME, "diffusion_pytorch_model.fp16.safetensors")
PICKLES = (".ckpt", ".bin", ".pth", ".pkl", ".pickle")
PICKLE_REMEDY = "which can run code when loaded: convert it to .safetensors first (docs/export.md shows how)"


@dataclass(frozen=True)
class VaePath:
    """The files of a VAE; `config` is the config.json of a diffusers folder."""

    kind: Literal["checkpoint", "safetensors"]
    weights: Path
    config: Path | None = None


def locate_vae(path: Path, flag: str) -> VaePath:
    """The files of the VAE at `path`; UserError that starts with `flag` and the path if it is none.

    OWNER/REPO[:PATH] that does not exist here is downloaded from the Hugging Face hub.
    """
    on_hub = None if os.path.lexists(path) else hub_name(path)
    where = f"{flag} {path.as_posix() if on_hub else path}"
    if on_hub:
        path = download(*on_hub, _HUB_NAMES, where)
    suffix = path.suffix.lower()
    if path.is_file() and suffix in PICKLES:
        raise refused_pickle(where)
    if path.is_file() and suffix == ".pt":
        return VaePath("checkpoint", path)
    if path.is_dir():
        return _in_folder(path, where)
    if not os.path.exists(path):
        raise UserError(f"{where}: there is no such file or folder")
    if not path.is_file():
        raise UserError(f"{where} is neither a file nor a folder: give one of these")
    if suffix == ".gguf":
        raise UserError(f"{where} is a GGUF file, whose weights are quantized: use the .safetensors file")
    if suffix not in (".safetensors", ".sft"):
        raise UserError(f"{where} is not a .safetensors file, a checkpoint (.pt) or a diffusers folder")
    config = path.with_name("config.json")
    is_diffusers = path.name == WEIGHTS_NAME and config.is_file()
    return VaePath("safetensors", path, config if is_diffusers else None)


def check_checkpoint_path(path: Path, flag: str) -> None:
    """Raise UserError, which starts with `flag` and the path, if the path cannot be that of a checkpoint."""
    latest = "or latest for the newest one in --output_dir"
    if path.is_dir() and _weights_in(path):
        raise UserError(
            f"{flag} {path} is a VAE, without the state of a run: begin a run from it with --init_from {path}"
        )
    if path.is_dir():
        raise UserError(
            f"{flag} {path} is a folder: name a checkpoint in it, or use --output_dir {path} "
            "--resume_from latest"
        )
    if not os.path.lexists(path):
        raise UserError(f"{flag} {path}: there is no such file: give a checkpoint (.pt), {latest}")
    if path.suffix.lower() != ".pt":
        raise UserError(f"{flag} {path} is not a checkpoint: give a file with the ending .pt, {latest}")


def refused_pickle(where: str) -> UserError:
    """The error for a file that can run code; `where` is its flag and path."""
    return UserError(f"{where} is a pickle, {PICKLE_REMEDY}")


def _in_folder(folder: Path, where: str) -> VaePath:
    """The files of a diffusers folder, of a complete pipeline, or of the output folder of a run."""
    if (folder / "vae" / "config.json").is_file() and _weights_in(folder) is None:
        folder = folder / "vae"
    weights = _weights_in(folder)
    if weights is None:
        raise UserError(f"{where} has no {WEIGHTS_NAME}{_alternatives(folder)}")
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{where} is not a diffusers folder, because it has no config.json: give {weights.name} in it"
        )
    return VaePath("safetensors", weights, folder / "config.json")


def _weights_in(folder: Path) -> Path | None:
    """The weights file in a diffusers folder: the default one, else a variant such as .fp16.safetensors."""
    if (folder / WEIGHTS_NAME).is_file():
        return folder / WEIGHTS_NAME
    return next(iter(sorted(folder.glob("diffusion_pytorch_model.*.safetensors"))), None)


def _alternatives(folder: Path) -> str:
    if any(folder.glob("diffusion_pytorch_model*.bin")):
        return f", only a pickle (.bin), {PICKLE_REMEDY}"
    if any(folder.glob("checkpoint_*.pt")):
        return " yet: give one of the checkpoints in it"
    return ": give a diffusers folder, a checkpoint or a .safetensors file"
