"""Whether tensors fit the architecture: its shape read off them, and what is wrong with its likely cause."""

import re
from collections.abc import Collection
from typing import Any

import torch

from vae.config.errors import UserError
from vae.config.options import ModelConfig
from vae.model.autoencoder import AutoencoderKL

_GROUPS_SHOWN = 3


def shape_of(weights: dict[str, torch.Tensor], where: str) -> dict[str, Any]:
    """ModelConfig values that the tensors show; UserError where they are not of this family.

    The number of norm groups is not among them: no tensor shows it.
    """
    down = [re.match(r"encoder\.down_blocks\.(\d+)\.resnets\.(\d+)\.conv1\.weight", name) for name in weights]
    blocks = [(int(m[1]), int(m[2])) for m in down if m]
    if not blocks or "encoder.conv_out.weight" not in weights:
        if any(name.startswith("decoder.") for name in weights) and not blocks:
            raise UserError(f"{where} lacks the encoder: a decoder alone cannot be used here")
        some = ", ".join(sorted(weights)[:3])
        raise UserError(f"{where} has not the parameter names of an AutoencoderKL (it begins {some})")
    levels, per_level = 1 + max(level for level, _ in blocks), 1 + max(block for _, block in blocks)
    if levels * per_level != len(blocks):
        grid = ((level, block) for level in range(levels) for block in range(per_level))
        level, block = next(place for place in grid if place not in blocks)
        raise UserError(f"{where} lacks encoder.down_blocks.{level}.resnets.{block}.conv1.weight")
    widths = [f"encoder.down_blocks.{level}.resnets.0.conv1.weight" for level in range(levels)]
    for name in (*widths, "encoder.conv_out.weight"):
        if name not in weights:
            raise UserError(f"{where} lacks {name}")
        if weights[name].dim() == 5:
            raise UserError(
                f"{where} is a video VAE: {name} has a time axis, and only images are handled here"
            )
        if weights[name].dim() != 4 or 0 in weights[name].shape:
            raise UserError(f"{where} has another shape of {name}: it is no convolution")
    return {
        "channels": [weights[name].shape[0] for name in widths],
        "layers_per_block": per_level,
        "z_channels": weights["encoder.conv_out.weight"].shape[0] // 2,
        "use_quant_conv": "quant_conv.weight" in weights,
        "latent_norm": "bn.running_mean" in weights,
    }


def check_fit(config: ModelConfig, weights: dict[str, torch.Tensor], where: str) -> None:
    """UserError that groups what is missing, surplus or of another shape; nothing is allocated before it."""
    with torch.device("meta"):
        own = AutoencoderKL(config).state_dict()
    missing = sorted(own.keys() - weights.keys())
    surplus = sorted(weights.keys() - own.keys())
    unequal = sorted(
        name
        for name in own.keys() & weights.keys()
        if weights[name].shape
        not in (own[name].shape, (*own[name].shape, 1, 1))  # linears as 1x1 convolutions
    )
    found = []
    for what, names, among in (
        ("lacks", missing, own),
        ("has the unknown", surplus, weights),
        ("has another shape of", unequal, own),
    ):
        if names:
            found.append(f"{what} {grouped(names, among)}")
    if found:
        cause = _likely_cause(own, weights, missing, surplus, unequal)
        raise UserError(f"{where} {' and '.join(found)}{f': {cause}' if cause else ''}")


def load_weights(model: AutoencoderKL, weights: dict[str, torch.Tensor]) -> None:
    """Copy weights that fit into `model`."""
    own = model.state_dict()
    model.load_state_dict({name: value.reshape(own[name].shape) for name, value in weights.items()})


def grouped(names: Collection[str], among: Collection[str]) -> str:
    """`names` in one line: all of `among` that begin alike are said by that beginning and their number."""
    left = set(names)
    shown = []
    for name in sorted(names):
        if name not in left:
            continue
        parts = name.split(".")
        for depth in range(1, len(parts)):
            start = ".".join(parts[:depth]) + "."
            alike = {other for other in among if other.startswith(start)}
            if len(alike) > 1 and alike <= left:
                shown.append(f"{start}* ({len(alike)})")
                left -= alike
                break
        else:
            shown.append(name)
    more = f" and {len(shown) - _GROUPS_SHOWN} more" if len(shown) > _GROUPS_SHOWN else ""
    return ", ".join(shown[:_GROUPS_SHOWN]) + more


def _likely_cause(own, weights, missing: list[str], surplus: list[str], unequal: list[str]) -> str:
    """Why a file differs, where its names or shapes show it; '' where they do not."""
    if not any(name.startswith("decoder.") for name in weights):
        return "it is an encoder alone"
    if any("mid_block.attentions" in name for name in missing):
        return "it is a VAE without attention in its middle block, which is another architecture"
    if any(re.search(r"\.attn\.|\.attentions\.[1-9]|_blocks\.\d+\.attentions", name) for name in surplus):
        return "it has attention inside its levels, which is another architecture"
    if any("quant_conv" in name for name in missing):
        return "it has only one of the two quant convolutions: part of it is missing"
    if unequal in (["encoder.conv_in.weight"], ["decoder.conv_out.bias", "decoder.conv_out.weight"]) or (
        set(unequal) == {"encoder.conv_in.weight", "decoder.conv_out.bias", "decoder.conv_out.weight"}
    ):
        channels = weights["encoder.conv_in.weight"].shape[1]
        return f"its images have {channels} channels, and only RGB is handled"
    if unequal and all(name.startswith("decoder.") for name in unequal):
        begins, ends = weights["decoder.conv_in.weight"], own["decoder.conv_in.weight"]
        if begins.dim() == 4 and len(begins) != len(ends):
            return f"its decoder begins {len(begins)} wide, its encoder ends {len(ends)} wide"
    if missing and not surplus and not unequal:
        return "part of it is missing"
    return ""
