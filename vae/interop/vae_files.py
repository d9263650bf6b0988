"""Loading a VAE of any supported format: checkpoints, diffusers folders, single safetensors files."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vae.config.options import build
from vae.interop.checkpoint_file import DamagedCheckpointError, ForeignFileError, load_checkpoint
from vae.interop.diffusers_folder import parse_config, read_config
from vae.interop.fitting import check_fit, config_from_shapes, load_weights
from vae.interop.safetensors_file import read_safetensors
from vae.interop.vae_path import locate_vae, refused_pickle
from vae.model.autoencoder import AutoencoderKL
from vae.system.errors import UserError

CONFIG_KEY = "vae_config"  # metadata key of single files from export_vae.py: config.json as text
# Metadata keys of files from train_vae.py.
START_KEY = "start"  # the hash in VaeFile.start
CHECKPOINT_KEY = "checkpoint_sha256"  # of the checkpoint with the same weights
RUN_KEY = "run"  # the id in the marker of the run's folder
_MODEL_KEYS = ("channels", "layers_per_block", "z_channels", "norm_groups", "use_quant_conv", "latent_norm")


@dataclass
class VaeFile:
    """Contents of a VAE file, independent of its format."""

    kind: str  # checkpoint, diffusers or compvis: the origin of the parameter names
    shape: dict[str, Any]  # ModelConfig values by name; norm_groups only if the file contains it
    weights: dict[str, torch.Tensor]  # fp32, with diffusers names
    dtype: torch.dtype  # of the weights in the file
    scaling_factor: float | None  # for (z - shift) * scaling; None: not in the file
    shift_factor: float | None
    sample_size: int | None  # training image size, px
    force_upcast: bool | None  # whether fp16 programs must run the VAE in fp32; None: not in the file
    step: int | None  # optimizer step of a checkpoint
    start: str = ""  # hash of the weights with which its training began; "": not known


@dataclass
class LoadedVae:
    """A VAE in fp32 on the CPU, in evaluation mode and without gradients."""

    autoencoder: AutoencoderKL
    file: VaeFile

    def __repr__(self) -> str:
        z, f = self.autoencoder.config.z_channels, self.autoencoder.downsampling
        return (
            f"LoadedVae({self.kind}, z_channels={z}, downsampling={f}, scaling_factor={self.scaling_factor})"
        )

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
    """Load the VAE at `path` from any supported format.

    `weights` applies to checkpoints: "ema", the weights that a run validates and exports, or "raw". Raises
    UserError that starts with `flag` and the path.
    """
    file = read_vae(path, flag=flag, weights=weights)
    config = build(file.shape).model
    groups = config.norm_groups
    if any(width % groups for width in config.channels):
        raise UserError(
            f"{flag} {path} has channels {' '.join(map(str, config.channels))}, which {groups} norm groups "
            "do not divide, and it contains no number of groups: give a folder with config.json"
        )
    check_fit(config, file.weights, f"{flag} {path}")
    autoencoder = AutoencoderKL(config)
    load_weights(autoencoder, file.weights)
    file.weights = {}  # the network has its own copy
    return LoadedVae(autoencoder.eval().requires_grad_(False), file)


def read_vae(path: Path, *, flag: str = "--init_from", weights: str = "ema") -> VaeFile:
    """Read the VAE file or folder at `path`; UserError that starts with `flag` and the path."""
    located = locate_vae(path, flag)
    if located.kind == "checkpoint":
        return _read_checkpoint(path, flag, weights)
    where = f"{flag} {path}"
    config = read_config(located.config, where) if located.config else None
    return _from_tensors(located.weights, where, config)


def _read_checkpoint(path: Path, flag: str, weights: str) -> VaeFile:
    where = f"{flag} {path}"
    try:
        content = load_checkpoint(path, flag=flag)
    except ForeignFileError:
        raise refused_pickle(where) from None
    except DamagedCheckpointError as error:
        raise UserError(f"{where}: {error}") from None
    config = content["config"]
    scaling, shift = content.get("latent_scaling") or (None, None)
    ema = content["ema"] if weights == "ema" else None
    return VaeFile(
        kind="checkpoint",
        shape={name: config[name] for name in _MODEL_KEYS if name in config},
        weights=ema if ema is not None else content["model"],
        dtype=torch.float32,
        scaling_factor=scaling,
        shift_factor=shift,
        sample_size=content["stages"][-1]["image_size"],
        force_upcast=None,
        step=content["position"]["step"],
        start=content.get("run", {}).get(START_KEY, ""),
    )


def _number(config: dict[str, Any], name: str, where: str) -> float | None:
    value = config.get(name)
    if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
        raise UserError(f"{where}: {name} {value} in config.json is not a number")
    return value


def _from_tensors(path: Path, where: str, found_config: dict[str, Any] | None) -> VaeFile:
    tensors = read_safetensors(path, where)
    if found_config is None and CONFIG_KEY in tensors.metadata:
        found_config = parse_config(tensors.metadata[CONFIG_KEY], where, CONFIG_KEY)
    config = found_config or {}
    shape = config_from_shapes(tensors.weights, where)
    if "norm_num_groups" in config:
        groups = config["norm_num_groups"]
        if type(groups) is not int or groups < 1:
            raise UserError(f"{where}: norm_num_groups {groups} in config.json is not a positive integer")
        shape["norm_groups"] = groups
    scaling, shift = (_number(config, name, where) for name in ("scaling_factor", "shift_factor"))
    if found_config is None and tensors.published_scaling:
        scaling, shift = tensors.published_scaling
    size = config.get("sample_size")
    return VaeFile(
        kind="compvis" if tensors.compvis else "diffusers",
        shape=shape,
        weights=tensors.weights,
        dtype=tensors.dtype,
        scaling_factor=scaling,
        shift_factor=(shift or 0.0) if scaling is not None else None,
        sample_size=size if type(size) is int and size > 0 else None,
        force_upcast=config["force_upcast"] is True if "force_upcast" in config else None,
        step=None,
        start=tensors.metadata.get(START_KEY, ""),
    )
