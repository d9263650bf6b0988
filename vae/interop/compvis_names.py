"""Conversion between this project's parameter names and those of the research code (CompVis) and ComfyUI.

This project uses the names of diffusers. CompVis numbers the decoder levels from the image, diffusers from
the latents. CompVis attention has four 1x1 convolutions, diffusers attention four linear layers. Source: the
two published model definitions.
"""

import re

import torch

BLOCK = r"\d{1,9}"  # pattern of the number of a block: a forged one could have thousands of digits
_ATTENTION = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}
_ATTENTION_BACK = {ours: theirs for theirs, ours in _ATTENTION.items()}
_LINEARS = ("to_q.weight", "to_k.weight", "to_v.weight", "to_out.0.weight")
_OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def is_compvis(name: str) -> bool:
    """Whether a parameter name is used by CompVis but not by diffusers."""
    return re.match(r"encoder\.down\.\d|decoder\.up\.\d|(en|de)coder\.(mid\.|norm_out)", name) is not None


def from_compvis(name: str, levels: int) -> str:
    """Diffusers name of a CompVis parameter in an autoencoder of `levels` levels, or `name` if unknown."""
    name = re.sub(
        r"^(encoder\.quant_conv|decoder\.post_quant_conv)\.", lambda m: m[1].split(".")[1] + ".", name
    )
    name = re.sub(r"^encoder\.down\.(\d+)\.block\.", r"encoder.down_blocks.\1.resnets.", name)
    name = re.sub(r"^encoder\.down\.(\d+)\.downsample\.", r"encoder.down_blocks.\1.downsamplers.0.", name)
    up = re.match(rf"decoder\.up\.({BLOCK})\.(block|upsample)\.", name)
    if up:
        inner = "resnets" if up[2] == "block" else "upsamplers.0"
        name = f"decoder.up_blocks.{levels - 1 - int(up[1])}.{inner}.{name[up.end() :]}"
    name = re.sub(r"\.mid\.block_([12])\.", lambda m: f".mid_block.resnets.{int(m[1]) - 1}.", name)
    name = re.sub(
        r"\.mid\.attn_1\.(norm|q|k|v|proj_out)\.",
        lambda m: f".mid_block.attentions.0.{_ATTENTION[m[1]]}.",
        name,
    )
    name = name.replace(".nin_shortcut.", ".conv_shortcut.")
    return re.sub(r"^((en|de)coder)\.norm_out\.", r"\1.conv_norm_out.", name)


def to_compvis(weights: dict[str, torch.Tensor], quant_conv_inside: bool) -> dict[str, torch.Tensor]:
    """Convert weights to CompVis names and shapes.

    `quant_conv_inside`: the 1x1 convolutions are part of encoder and decoder, as in FLUX.2.
    """
    levels = 1 + max(int(m[1]) for m in (re.match(r"encoder\.down_blocks\.(\d+)\.", n) for n in weights) if m)
    renamed = {}
    for name, value in weights.items():
        if name.endswith(_LINEARS):
            value = value[:, :, None, None]  # (C, C, 1, 1)
        renamed[_to_compvis_name(name, levels, quant_conv_inside)] = value
    return renamed


def _to_compvis_name(name: str, levels: int, quant_conv_inside: bool) -> str:
    if quant_conv_inside:
        name = re.sub(r"^quant_conv\.", "encoder.quant_conv.", name)
        name = re.sub(r"^post_quant_conv\.", "decoder.post_quant_conv.", name)
    name = re.sub(r"^encoder\.down_blocks\.(\d+)\.resnets\.", r"encoder.down.\1.block.", name)
    name = re.sub(r"^encoder\.down_blocks\.(\d+)\.downsamplers\.0\.", r"encoder.down.\1.downsample.", name)
    up = re.match(r"decoder\.up_blocks\.(\d+)\.(resnets|upsamplers\.0)\.", name)
    if up:
        inner = "block" if up[2] == "resnets" else "upsample"
        name = f"decoder.up.{levels - 1 - int(up[1])}.{inner}.{name[up.end() :]}"
    name = re.sub(r"\.mid_block\.resnets\.([01])\.", lambda m: f".mid.block_{int(m[1]) + 1}.", name)
    name = re.sub(
        r"\.mid_block\.attentions\.0\.(group_norm|to_q|to_k|to_v|to_out\.0)\.",
        lambda m: f".mid.attn_1.{_ATTENTION_BACK[m[1]]}.",
        name,
    )
    name = name.replace(".conv_shortcut.", ".nin_shortcut.")
    return name.replace(".conv_norm_out.", ".norm_out.")


def current_name(name: str) -> str:
    """Current diffusers name of a parameter: its first releases had other names in attention."""
    for old, new in _OLD_ATTENTION.items():
        name = re.sub(rf"(mid_block\.attentions\.0\.){old}\.", rf"\g<1>{new}.", name)
    return name
