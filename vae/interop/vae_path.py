"""The files of the VAE that a path names, and their format by their content. Needs no PyTorch."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vae.interop.hub import download, hub_name
from vae.system.console import command_line
from vae.system.errors import UserError
from vae.system.files import read_json

METRICS_NAME = "metrics.jsonl"  # in the folder of a run
_STEM = "diffusion_pytorch_model"
WEIGHTS_NAME = f"{_STEM}.safetensors"
INDEX_NAME = f"{WEIGHTS_NAME}.index.json"  # of weights in several files
HUB_NAMES = (WEIGHTS_NAME, f"{_STEM}.fp16.safetensors", f"{_STEM}.bin")
_IN_FOLDER = (
    *(WEIGHTS_NAME, INDEX_NAME, f"{_STEM}.*.safetensors", f"{WEIGHTS_NAME}.index.*.json"),
    *(f"{_STEM}.bin", f"{_STEM}.bin.index.json", f"{_STEM}.*.bin"),
)
_ENDINGS = (".safetensors", ".sft", ".ckpt", ".pth")  # of files that may be a VAE, for messages
CONVERT = "docs/export.md shows how to convert it without running code"
_HEAD_BYTES = 1024
_AGAIN = "download it again"
# The beginnings of other files, and what to do about them.
_OTHER_FILES = (
    (rb"version https://git-lfs", "is a pointer of Git LFS, not the file: run git lfs pull, or download it"),
    (rb"(?i)\s*(<!doctype|<html|<\?xml|<head)", "is a web page: download the file itself"),
    (rb"", "is not a .safetensors file, a checkpoint (.pt, .ckpt) or a diffusers folder, or not all of it: "
     f"{_AGAIN}, or use another copy"),
)  # fmt: skip


@dataclass(frozen=True)
class VaePath:
    """The files of a VAE; `config` is the config.json of a diffusers folder."""

    weights: tuple[Path, ...]  # several: each has a part
    config: Path | None = None

    def format(self, where: str) -> Literal["pickle", "safetensors"]:
        """The format of the weights by their content; UserError, which starts with `where`, for others."""
        kind, *others = {file_format(path, where) for path in self.weights}
        if others:
            raise UserError(f"{where}: the parts of its weights have different formats: use another copy")
        return kind


def locate_vae(path: Path, flag: str) -> VaePath:
    """The files of the VAE at `path`; UserError that starts with `flag` and the path if it is none.

    OWNER/REPO[:PATH] that does not exist here, or its address, is downloaded from the Hugging Face hub.
    """
    on_hub = None if os.path.lexists(path) else hub_name(path)
    where = f"{flag} {path.as_posix() if on_hub else path}"
    if on_hub:
        path = download(*on_hub, HUB_NAMES, where)
    if path.is_dir():
        return _in_folder(path, where)
    if not os.path.exists(path):
        if re.match(r"https?:", str(path)):
            raise UserError(f"{where}: only huggingface.co is read: download the file, and give it")
        run = path.parent
        if (run / METRICS_NAME).exists():
            words = command_line("python", "train_vae.py", "--output_dir", run, "--resume_from", "latest")
            raise UserError(f"{where}: the run in {run} has not written it yet: resume it first: {words}")
        raise UserError(f"{where}: there is no such file or folder")
    if not path.is_file():
        raise UserError(f"{where} is neither a file nor a folder: give one of these")
    if re.search(r"-\d+-of-\d+\.", path.name):
        raise UserError(f"{where} is one of several parts: give its folder, which has an index of them")
    config = path.with_name("config.json")
    is_diffusers = path.name.startswith(_STEM) and config.is_file()
    return VaePath((path,), config if is_diffusers else None)


def file_format(path: Path, where: str) -> Literal["pickle", "safetensors"]:
    """The format of a file of weights by its content; UserError, which starts with `where`, for others."""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise UserError(f"{where}: {path.name} cannot be read: {error.strerror or error}") from None
    if head.startswith(b"PK\x03\x04") or re.match(rb"\x80[\x02-\x05]", head):
        return "pickle"
    if head[8:9] == b"{":
        return "safetensors"
    problem = next(text for pattern, text in _OTHER_FILES if re.match(pattern, head))
    raise UserError(f"{where if where.endswith(str(path)) else f'{where}: {path.name}'} {problem}")


def check_checkpoint_path(path: Path) -> None:
    """Raise UserError if the path of --resume_from cannot be that of a checkpoint."""
    where = f"--resume_from {path}"
    latest = "or latest for the newest one in --output_dir"
    if path.is_dir() and _weights_in(path):
        raise UserError(
            f"{where} is a VAE, without the state of a run: begin a run from it with --init_from {path}"
        )
    if path.is_dir():
        raise UserError(
            f"{where} is a folder: name a checkpoint in it, or use --output_dir {path} --resume_from latest"
        )
    if not os.path.lexists(path):
        raise UserError(f"{where}: there is no such file: give a checkpoint (.pt), {latest}")
    if path.suffix.lower() != ".pt":
        raise UserError(f"{where} is not a checkpoint: give a file with the ending .pt, {latest}")


def _in_folder(folder: Path, where: str) -> VaePath:
    """The files of a diffusers folder, of a complete pipeline, or of the output folder of a run."""
    if (folder / "vae" / "config.json").is_file() and _weights_in(folder) is None:
        folder = folder / "vae"
    weights = _weights_in(folder)
    if weights is None and (half := _only_half(folder)):
        return VaePath((half,))
    if weights is None:
        raise UserError(f"{where} has no {WEIGHTS_NAME}{_alternatives(folder)}")
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{where} is not a diffusers folder, because it has no config.json: give {weights.name} in it"
        )
    parts = _parts_of(weights, where) if weights.suffix == ".json" else (weights,)
    return VaePath(parts, folder / "config.json")


def _parts_of(index: Path, where: str) -> tuple[Path, ...]:
    """The files in an index of weights."""
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
        parts = tuple(index.with_name(Path(name).name) for name in names)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        parts = ()
    missing = next((path.name for path in parts if not path.is_file()), None)
    if not parts or missing:
        problem = f"its part {missing} is missing" if missing else "it is no index of weights"
        raise UserError(f"{where}: {index.name}: {problem}: {_AGAIN}")
    return parts


def _weights_in(folder: Path) -> Path | None:
    """The weights file in a diffusers folder, or its index: the default one, else a variant such as fp16."""
    paths = (path for pattern in _IN_FOLDER for path in sorted(folder.glob(pattern)) if path.is_file())
    return next(paths, None)


def _only_half(folder: Path) -> Path | None:
    """The encoder of the only two files such as taef2_encoder.pth and taef2_decoder.pth in a folder."""
    encoders = [path for path in sorted(folder.glob("*encoder*")) if path.suffix in _ENDINGS]
    pairs = [path for path in encoders if path.with_name(path.name.replace("encoder", "decoder")).is_file()]
    return pairs[0] if len(pairs) == 1 else None


def _alternatives(folder: Path) -> str:
    if any(folder.glob("checkpoint_*.pt")):
        return " yet: give one of the checkpoints in it"
    files = sorted(path.name for path in folder.iterdir() if path.suffix in _ENDINGS)
    if files:
        return f": give a file in it, such as {files[0]}"
    return ": give a diffusers folder, a checkpoint or a .safetensors file"
