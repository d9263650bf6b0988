"""Writing safetensors files, and reading their metadata."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from vae.device import DTYPES
from vae.system.errors import UserError
from vae.system.files import atomic_path, parse_json, utf8_text


def stored_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file; empty if it has none or cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def stored_weights(model: nn.Module, dtype: str) -> dict[str, torch.Tensor]:
    """Tensors of a model on the CPU in `dtype` (fp32, fp16 or bf16); integer tensors are unchanged.

    Raises UserError if a weight is too large for fp16.
    """
    stored = {}
    for name, value in model.state_dict().items():
        value = value.detach().cpu().contiguous()
        if value.is_floating_point():
            value = value.to(DTYPES[dtype])
            if not torch.isfinite(value).all():
                raise UserError(
                    f"--dtype {dtype} cannot represent {name}: its values are too large; use bf16 or fp32"
                )
        stored[name] = value
    return stored


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file atomically; OSError if it cannot be written."""
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    metadata = {"format": "pt"} | {name: utf8_text(value) for name, value in metadata.items()}
    try:
        with atomic_path(path) as temporary:
            save_file(tensors, temporary, metadata=metadata)
            _sort_metadata(temporary)
    except SafetensorError as error:  # a full disk
        raise OSError(f"cannot write {path}: {error}") from error


def _sort_metadata(path: Path) -> None:
    """Sort the metadata in the header: safetensors writes it in a random order."""
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(size).decode())
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= size:  # it is padded with spaces
            file.seek(8)
            file.write(text.ljust(size))
