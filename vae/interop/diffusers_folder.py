"""The diffusers form of a VAE: a folder with config.json and diffusion_pytorch_model.safetensors.

Our parameter names are diffusers' own, so the model's state_dict is the file.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vae.config.errors import UserError
from vae.config.options import ModelConfig
from vae.model.autoencoder import AutoencoderKL

WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
_OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def diffusers_config(
    model: ModelConfig, sample_size: int, scaling_factor: float, shift_factor: float
) -> dict[str, Any]:
    """What diffusers.AutoencoderKL.from_pretrained reads from config.json."""
    levels = len(model.channels)
    return {
        "_class_name": "AutoencoderKL",
        "_diffusers_version": "0.35.0",
        "act_fn": "silu",
        "block_out_channels": list(model.channels),
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "force_upcast": False,
        "in_channels": 3,
        "latent_channels": model.z_channels,
        "layers_per_block": model.layers_per_block,
        "mid_block_add_attention": True,
        "norm_num_groups": model.norm_groups,
        "out_channels": 3,
        "sample_size": sample_size,
        "scaling_factor": scaling_factor,
        "shift_factor": shift_factor,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "use_post_quant_conv": model.use_quant_conv,
        "use_quant_conv": model.use_quant_conv,
    }


def save_diffusers_folder(
    folder: Path,
    model: AutoencoderKL,
    *,
    sample_size: int,
    scaling_factor: float,
    shift_factor: float,
) -> None:
    """Write `model` in fp32; both files appear whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().float().cpu().contiguous() for name, value in model.state_dict().items()}
    config = diffusers_config(model.config, sample_size, scaling_factor, shift_factor)
    temporary = folder / (WEIGHTS_NAME + ".tmp")
    save_file(weights, temporary, metadata={"format": "pt"})
    os.replace(temporary, folder / WEIGHTS_NAME)
    temporary = folder / "config.json.tmp"
    temporary.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(temporary, folder / "config.json")


def read_vae(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Shape (ModelConfig values by name) and weights of a diffusers folder or a .safetensors file.

    The shape is read off the tensors; only the number of norm groups, which no tensor shows, comes from
    config.json. It is left out where there is none: published VAEs of this family all have the default 32.
    """
    weights_path, config = _locate(path)
    weights = _read_safetensors(weights_path, path)
    weights = {_current_name(name): value for name, value in weights.items()}
    shape = shape_of(weights, path)
    if "norm_num_groups" not in config:
        return shape, weights
    groups = config["norm_num_groups"]
    if type(groups) is not int or groups < 1:
        raise UserError(f"--init_from {path}: config.json says norm_num_groups {groups}, which is no count")
    return {**shape, "norm_groups": groups}, weights


def _locate(path: Path) -> tuple[Path, dict[str, Any]]:
    if path.is_file():
        if path.suffix != ".safetensors":
            raise UserError(
                f"--init_from {path} is not a .safetensors file: other formats may run code when they are"
                " read; save it as safetensors first"
            )
        config = path.with_name("config.json")
        return path, _read_config(config, path) if path.name == WEIGHTS_NAME and config.is_file() else {}
    if not path.is_dir():
        raise UserError(f"--init_from {path}: there is no such file or folder")
    if (path / "vae" / "config.json").is_file() and not (path / WEIGHTS_NAME).is_file():
        path = path / "vae"  # a whole pipeline, or the output folder of a run
    config = _read_config(path / "config.json", path)
    if not (path / WEIGHTS_NAME).is_file():
        raise UserError(f"--init_from {path} has no {WEIGHTS_NAME}")
    return path / WEIGHTS_NAME, config


def _read_config(config_path: Path, path: Path) -> dict[str, Any]:
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--init_from {path} is no diffusers folder: config.json: {error}") from None
    name = config.get("_class_name") if isinstance(config, dict) else type(config).__name__
    if name != "AutoencoderKL":
        raise UserError(
            f"--init_from {path}: its config.json is of {name}: only AutoencoderKL can be trained here"
        )
    return config


def _read_safetensors(weights_path: Path, path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(weights_path, framework="pt") as file:
            return {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"--init_from {path}: {weights_path.name} cannot be read: {error}") from None


def _current_name(name: str) -> str:
    """Today's diffusers name of a parameter; its first releases named the attention's differently."""
    for old, new in _OLD_ATTENTION.items():
        name = re.sub(rf"(mid_block\.attentions\.0\.){old}\.", rf"\g<1>{new}.", name)
    return name


def shape_of(weights: dict[str, torch.Tensor], path: Path) -> dict[str, Any]:
    """ModelConfig values that the tensors show; UserError where they are not of this family."""
    down = [re.match(r"encoder\.down_blocks\.(\d+)\.resnets\.(\d+)\.conv1\.weight", name) for name in weights]
    blocks = [(int(m[1]), int(m[2])) for m in down if m]
    if not blocks or "encoder.conv_out.weight" not in weights:
        some = ", ".join(sorted(weights)[:3])
        raise UserError(
            f"--init_from {path} has not the parameter names of diffusers' AutoencoderKL (it begins {some})"
        )
    levels = 1 + max(level for level, _ in blocks)
    widths = [f"encoder.down_blocks.{level}.resnets.0.conv1.weight" for level in range(levels)]
    for name in (*widths, "encoder.conv_out.weight"):
        if name not in weights:
            raise UserError(f"--init_from {path} lacks {name}")
        if weights[name].dim() != 4 or 0 in weights[name].shape:
            raise UserError(f"--init_from {path} has another shape of {name}: it is no convolution")
    return {
        "channels": [weights[name].shape[0] for name in widths],
        "layers_per_block": 1 + max(block for _, block in blocks),
        "z_channels": weights["encoder.conv_out.weight"].shape[0] // 2,
        "use_quant_conv": "quant_conv.weight" in weights,
    }


def load_weights(model: AutoencoderKL, weights: dict[str, torch.Tensor], path: Path) -> None:
    """Copy `weights` into `model`; UserError that groups what is missing, surplus or of another shape."""
    own = model.state_dict()
    missing = sorted(own.keys() - weights.keys())
    surplus = sorted(weights.keys() - own.keys())
    unequal = sorted(
        name
        for name in own.keys() & weights.keys()
        if weights[name].shape not in (own[name].shape, (*own[name].shape, 1, 1))  # old linears: 1x1 convs
    )
    for what, names in (("lacks", missing), ("has the unknown", surplus), ("has another shape of", unequal)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(f"--init_from {path} {what} {', '.join(names[:3])}{more}")
    model.load_state_dict({name: value.reshape(own[name].shape) for name, value in weights.items()})
