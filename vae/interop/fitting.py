"""Whether tensors fit the architecture: the model config from their shapes, and clear errors if not."""

import itertools
import re
from collections.abc import Collection
from typing import Any

import torch

from vae.config.options import ModelConfig
from vae.interop.compvis_names import BLOCK
from vae.model.autoencoder import AutoencoderKL
from vae.system.errors import UserError

_UP_BLOCK = re.compile(r"decoder\.up_blocks\.(\d{1,9})\.resnets\.(\d{1,9})\.conv1\.weight")
# The parts of a network that files have without each other, by the beginnings of their names.
PARTS = {"encoder": ("encoder.", "quant_conv."), "decoder": ("decoder.", "post_quant_conv.")}
_MAX_CHARS = 256  # of a parameter name that is shown


def config_from_shapes(weights: dict[str, torch.Tensor], where: str) -> dict[str, Any]:
    """ModelConfig values that follow from tensor names and shapes; UserError for another architecture.

    The number of norm groups is missing, because it does not follow from any tensor.
    """
    missing = missing_part(weights)
    if missing == "encoder":
        return _mirrored_encoder(weights, where)
    pattern = re.compile(rf"encoder\.down_blocks\.({BLOCK})\.resnets\.({BLOCK})\.conv1\.weight")
    down = map(pattern.fullmatch, weights)
    blocks = [(int(m[1]), int(m[2])) for m in down if m]
    if not blocks or "encoder.conv_out.weight" not in weights:
        some = ", ".join(sorted(weights)[:3])
        raise UserError(
            f"{where} does not have the parameter names of an AutoencoderKL (first names: {some})"
        )
    levels, per_level = 1 + max(level for level, _ in blocks), 1 + max(block for _, block in blocks)
    if levels * per_level != len(blocks):
        known = set(blocks)
        grid = ((level, block) for level in range(levels) for block in range(per_level))
        level, block = next(pair for pair in grid if pair not in known)
        raise UserError(f"{where} lacks encoder.down_blocks.{level}.resnets.{block}.conv1.weight")
    conv_names = [f"encoder.down_blocks.{level}.resnets.0.conv1.weight" for level in range(levels)]
    for name in (*conv_names, "encoder.conv_out.weight"):
        if name not in weights:
            raise UserError(f"{where} lacks {name}")
        if weights[name].dim() == 5:
            raise UserError(
                f"{where} is a video VAE: {name} has a time axis, and of these only Wan 2.1 and Qwen-Image "
                "are supported"
            )
        if weights[name].dim() != 4 or 0 in weights[name].shape:
            raise UserError(f"{where} has another shape of {name}: it is not a convolution")
    channels = [weights[name].shape[0] for name in conv_names]
    return {
        "channels": channels,
        "layers_per_block": per_level,
        **_decoder_shape(weights, channels, per_level),
        "z_channels": weights["encoder.conv_out.weight"].shape[0] // 2,
        **_layers(weights),
    }


def missing_part(weights: Collection[str]) -> str:
    """The part of a VAE that a file has nothing of, "encoder" or "decoder"; "" if it has both or neither."""
    missing = [part for part in PARTS if not any(name.startswith(f"{part}.") for name in weights)]
    return missing[0] if len(missing) == 1 else ""


def _layers(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What any part of a network shows."""
    has_biases = any(name.endswith(".norm1.bias") for name in weights)
    return {
        "family": "kl" if has_biases else "wan",
        "mid_attention": any(".mid_block.attentions." in name for name in weights),
        "use_quant_conv": any(name in weights for name in ("quant_conv.weight", "post_quant_conv.weight")),
        "latent_norm": "bn.running_mean" in weights,
    }


def _mirrored_encoder(weights: dict[str, torch.Tensor], where: str) -> dict[str, Any]:
    """The shape of a network whose decoder this is, with an encoder of the same widths."""
    blocks = {(int(m[1]), int(m[2])): name for name in weights if (m := _UP_BLOCK.fullmatch(name))}
    levels = 1 + max((level for level, _ in blocks), default=-1)
    firsts = [weights[blocks[level, 0]] for level in reversed(range(levels)) if (level, 0) in blocks]
    conv_in = weights.get("decoder.conv_in.weight", torch.empty(0))
    layers = len(blocks) // levels - 1 if levels else 0
    if len(firsts) != levels or layers < 1 or any(value.dim() != 4 for value in (*firsts, conv_in)):
        raise UserError(f"{where} has no encoder, and its decoder is not that of an AutoencoderKL")
    return {
        "channels": [value.shape[0] for value in firsts],
        "layers_per_block": layers,
        "decoder": None,
        "decoder_channels": None,
        "decoder_layers_per_block": None,
        "z_channels": conv_in.shape[1],
        **_layers(weights),
    }


def _decoder_shape(weights: dict[str, torch.Tensor], channels: list[int], per_level: int) -> dict[str, Any]:
    """What differs from the encoder in the decoder's levels; nothing if they are not complete."""
    if "decoder.layers.0.weight" in weights:
        return {"decoder": "tiny", "decoder_channels": None, "decoder_layers_per_block": None}
    names = {name: _UP_BLOCK.fullmatch(name) for name in weights}
    blocks = {(int(m[1]), int(m[2])): weights[name] for name, m in names.items() if m}
    levels = len(channels)
    rest = len(blocks) % len(channels)
    own_layers = len(blocks) // levels - 1
    complete = set(itertools.product(range(levels), range(own_layers + 1)))
    shape: dict[str, Any] = {"decoder": None, "decoder_channels": None, "decoder_layers_per_block": None}
    if rest or own_layers < 1 or blocks.keys() != complete:
        return shape
    if any(weight.dim() != 4 for weight in blocks.values()):
        return shape
    own = [blocks[level, 0].shape[0] for level in reversed(range(levels))]
    shape["decoder_channels"] = own if own != channels else None
    shape["decoder_layers_per_block"] = own_layers if own_layers != per_level else None
    return shape


def check_fit(config: ModelConfig, weights: dict[str, torch.Tensor], where: str) -> None:
    """Raise UserError that names missing, unknown and misshaped tensors; no network is allocated.

    A file without anything of an encoder or of a decoder fits.
    """
    with torch.device("meta"):
        own = AutoencoderKL(config).state_dict()
    absent = PARTS.get(missing_part(weights), ())
    unequal = {
        name
        for name in own.keys() & weights.keys()
        if weights[name].shape
        not in (own[name].shape, (*own[name].shape, 1, 1))  # linear layers stored as 1x1 convolutions
    }
    problems = {
        "lacks": {name for name in own.keys() - weights.keys() if not name.startswith(absent)},
        "has the unknown": weights.keys() - own.keys(),
        "has another shape of": unequal,
    }
    if any(problems.values()):
        found = [f"{problem} {_some(names)}" for problem, names in problems.items() if names]
        raise UserError(f"{where} {' and '.join(found)}: it is cut, or of another architecture")


def _some(names: Collection[str]) -> str:
    """The first name, and the number of others."""
    return min(names)[:_MAX_CHARS] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def load_weights(model: AutoencoderKL, weights: dict[str, torch.Tensor]) -> None:
    """Copy weights that passed check_fit into `model`; it keeps its own part if they have none."""
    own = model.state_dict()
    reshaped = {name: value.reshape(own[name].shape) for name, value in weights.items()}
    model.load_state_dict({**own, **reshaped})
