"""Any VAE, recognised from its file: our checkpoints, diffusers folders, single safetensors files."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vae.config.errors import UserError
from vae.config.options import build
from vae.interop.checkpoint_file import DamagedCheckpointError, ForeignFileError, load_checkpoint
from vae.interop.diffusers_folder import (
    PICKLE_ADVICE,
    WEIGHTS_NAME,
    locate_weights,
    parse_config,
    read_config,
)
from vae.interop.fitting import check_fit, load_weights, shape_of
from vae.interop.safetensors_file import read_safetensors
from vae.model.autoencoder import AutoencoderKL

PICKLES = (".ckpt", ".bin", ".pth", ".pkl", ".pickle")
CONFIG_KEY = "vae_config"  # in the metadata of single files that are written here: config.json as text
_SHAPE = ("channels", "layers_per_block", "z_channels", "norm_groups", "use_quant_conv", "latent_norm")


@dataclass
class VaeFile:
    """What a file says of a VAE."""

    kind: str  # checkpoint, diffusers, or compvis: whose parameter names the file uses
    shape: dict[str, Any]  # ModelConfig values by name; norm_groups only where the file says it
    weights: dict[str, torch.Tensor]  # by this project's names, fp32
    dtype: torch.dtype  # of the weights in the file
    scaling_factor: float | None  # latents are read as (z - shift) * scaling; None: the file does not say
    shift_factor: float | None
    sample_size: int | None  # px it was trained at
    force_upcast: (
        bool | None
    )  # whether programs in fp16 are to run the VAE in fp32; None: the file does not say
    step: int | None  # optimizer step of a checkpoint


@dataclass
class LoadedVae:
    """A VAE ready to encode and decode: fp32 on the CPU, in evaluation mode, without gradients."""

    autoencoder: AutoencoderKL
    file: VaeFile

    @property
    def kind(self) -> str:
        return self.file.kind

    @property
    def scaling_factor(self) -> float | None:
        return self.file.scaling_factor

    @property
    def shift_factor(self) -> float | None:
        return self.file.shift_factor


def load_vae(path: Path, *, flag: str = "--vae", weights: str = "ema") -> LoadedVae:
    """The VAE at `path`, whatever its format.

    `weights` chooses among those of our checkpoints: "averaged", which is what a run validates and ships, or
    "raw"; other formats have one kind only. Raises UserError that begins with `flag` and the path.
    """
    file = read_vae(path, flag=flag, weights=weights)
    config = build(file.shape).model
    groups = config.norm_groups
    if any(width % groups for width in config.channels):
        raise UserError(
            f"{flag} {path} has widths {' '.join(map(str, config.channels))}, which {groups} norm groups do "
            "not divide, and does not say its own groups: name a folder with config.json, which does"
        )
    check_fit(config, file.weights, f"{flag} {path}")
    autoencoder = AutoencoderKL(config)
    load_weights(autoencoder, file.weights)
    file.weights = {}  # the network holds them now
    return LoadedVae(autoencoder.eval().requires_grad_(False), file)


def read_vae(path: Path, *, flag: str = "--init_from", weights: str = "ema") -> VaeFile:
    """What the file or folder at `path` says of a VAE; UserError that begins with `flag` and the path."""
    where = f"{flag} {path}"
    if path.is_file() and path.suffix.lower() in PICKLES:
        raise _refused_pickle(where)
    if path.is_file() and path.suffix.lower() == ".pt":
        return _read_checkpoint(path, flag, weights)
    if path.is_dir() or path.name == WEIGHTS_NAME:
        return _read_diffusers(path, where)
    if not path.exists():
        raise UserError(f"{where}: there is no such file or folder")
    if path.suffix.lower() == ".gguf":
        raise UserError(f"{where} is a GGUF file, whose weights are quantised: take the .safetensors file")
    if path.suffix.lower() not in (".safetensors", ".sft"):
        raise UserError(f"{where} is not a .safetensors file, a checkpoint (.pt) or a diffusers folder")
    return _from_tensors(path, where, None)


def _refused_pickle(where: str) -> UserError:
    return UserError(f"{where} is a pickle, {PICKLE_ADVICE}")


def _read_checkpoint(path: Path, flag: str, weights: str) -> VaeFile:
    where = f"{flag} {path}"
    try:
        content = load_checkpoint(path, flag=flag)
    except ForeignFileError:
        raise _refused_pickle(where) from None
    except DamagedCheckpointError as error:
        raise UserError(f"{where}: {error}") from None
    config = content["config"]
    scaling, shift = content.get("latent_scaling") or (None, None)
    ema = content["ema"] if weights == "ema" else None
    return VaeFile(
        kind="checkpoint",
        shape={name: config[name] for name in _SHAPE if name in config},
        weights=ema if ema is not None else content["model"],
        dtype=torch.float32,
        scaling_factor=scaling,
        shift_factor=shift,
        sample_size=content["stages"][-1]["image_size"],
        force_upcast=None,
        step=content["position"]["step"],
    )


def _read_diffusers(path: Path, where: str) -> VaeFile:
    weights_path, config_path = locate_weights(path, where)
    return _from_tensors(weights_path, where, read_config(config_path, where) if config_path else None)


def _number(said: dict[str, Any], name: str, where: str) -> float | None:
    value = said.get(name)
    if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
        raise UserError(f"{where}: config.json says {name} {value}, which is no number")
    return value


def _from_tensors(path: Path, where: str, config: dict[str, Any] | None) -> VaeFile:
    tensors = read_safetensors(path, where)
    if config is None and CONFIG_KEY in tensors.metadata:
        config = parse_config(tensors.metadata[CONFIG_KEY], where, CONFIG_KEY)
    said = config or {}
    shape = shape_of(tensors.weights, where)
    if "norm_num_groups" in said:
        groups = said["norm_num_groups"]
        if type(groups) is not int or groups < 1:
            raise UserError(f"{where}: config.json says norm_num_groups {groups}, which is no count")
        shape["norm_groups"] = groups
    scaling, shift = (_number(said, name, where) for name in ("scaling_factor", "shift_factor"))
    if config is None and tensors.published_scaling:
        scaling, shift = tensors.published_scaling
    size = said.get("sample_size")
    return VaeFile(
        kind="compvis" if tensors.compvis else "diffusers",
        shape=shape,
        weights=tensors.weights,
        dtype=tensors.dtype,
        scaling_factor=scaling,
        shift_factor=(shift or 0.0) if scaling is not None else None,
        sample_size=size if type(size) is int and size > 0 else None,
        force_upcast=said.get("force_upcast") is True if "force_upcast" in said else None,
        step=None,
    )
