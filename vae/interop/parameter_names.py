"""The parameter names of other programs. This project uses the names of diffusers' AutoencoderKL.

CompVis, the research code, whose names ComfyUI reads, numbers the decoder levels from the image, diffusers
from the latents. CompVis attention has four 1x1 convolutions, diffusers attention four linear layers. Source:
the two published model definitions.

Wan 2.1 and Qwen-Image are video VAEs, of which one part acts on a single image. Their convolutions are causal
in time: in front of a single image there is only zero padding, so of each kernel only the last time slice
acts, and the convolutions of time alone (`time_conv`) are skipped. What remains is a 2-D network with our
parameter names (vae.model.autoencoder, family "wan").

Both forms are read: the official names, which ComfyUI reads, and those of diffusers. Encoder levels, and in
the official form decoder levels, are one flat list: a new level begins after each resampling.
"""

import re
from collections.abc import Collection, Mapping

import torch

BLOCK = r"\d{1,9}"  # pattern of the number of a block: a forged one could have thousands of digits
# Each row has a part of a name in CompVis, and in diffusers.
_COMPVIS = (
    (".mid.block_1.", ".mid_block.resnets.0."),
    (".mid.block_2.", ".mid_block.resnets.1."),
    (".mid.attn_1.norm.", ".mid_block.attentions.0.group_norm."),
    (".mid.attn_1.q.", ".mid_block.attentions.0.to_q."),
    (".mid.attn_1.k.", ".mid_block.attentions.0.to_k."),
    (".mid.attn_1.v.", ".mid_block.attentions.0.to_v."),
    (".mid.attn_1.proj_out.", ".mid_block.attentions.0.to_out.0."),
    (".nin_shortcut.", ".conv_shortcut."),
    (".norm_out.", ".conv_norm_out."),
)
_LEVELS = (  # and of the levels of encoder and decoder
    ("encoder.down", "block", "encoder.down_blocks", "resnets"),
    ("encoder.down", "downsample", "encoder.down_blocks", "downsamplers.0"),
    ("decoder.up", "block", "decoder.up_blocks", "resnets"),
    ("decoder.up", "upsample", "decoder.up_blocks", "upsamplers.0"),
)
_LINEARS = ("to_q.weight", "to_k.weight", "to_v.weight", "to_out.0.weight")
# The first releases of diffusers had other names in attention.
_OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
_TAESD = re.compile(rf"(?:(?:.*\.)?taesd_)?(encoder|decoder)\.({BLOCK})\.(.+)")
_TAESD_LAYER = re.compile(rf"({BLOCK})\.(?:(?:conv|pool)\.\d\.)?(?:weight|bias)")
WEIGHT_DIMS = 5  # of a convolution in space and time

_FLAT = re.compile(r"(encoder\.down_blocks|decoder\.up_blocks)\.(\d+)\.(.*)")
_OFFICIAL = (  # patterns of official names, and the name in diffusers; decoder levels stay flat
    (r"^conv1\.", "quant_conv."),
    (r"^conv2\.", "post_quant_conv."),
    (r"^(en|de)coder\.conv1\.", r"\1coder.conv_in."),
    (r"^encoder\.downsamples\.", "encoder.down_blocks."),
    (r"^decoder\.upsamples\.", "decoder.up_blocks."),
    (r"\.middle\.0\.", ".mid_block.resnets.0."),
    (r"\.middle\.1\.", ".mid_block.attentions.0."),
    (r"\.middle\.2\.", ".mid_block.resnets.1."),
    (r"\.head\.0\.", ".norm_out."),
    (r"\.head\.2\.", ".conv_out."),
    (r"\.residual\.0\.", ".norm1."),
    (r"\.residual\.2\.", ".conv1."),
    (r"\.residual\.3\.", ".norm2."),
    (r"\.residual\.6\.", ".conv2."),
    (r"\.shortcut\.", ".conv_shortcut."),
)
_OURS = (  # patterns of diffusers' names, and ours
    (r"\.norm_out\.gamma$", ".conv_norm_out.weight"),
    (r"\.attentions\.0\.norm\.gamma$", ".attentions.0.group_norm.weight"),
    (r"\.attentions\.0\.proj\.", ".attentions.0.to_out.0."),
    (r"\.gamma$", ".weight"),
    (r"\.upsamplers\.0\.resample\.1\.", ".upsamplers.0.conv."),
)


def is_compvis(name: str) -> bool:
    """Whether a parameter name is used by CompVis but not by diffusers."""
    return re.match(r"encoder\.down\.\d|decoder\.up\.\d|(en|de)coder\.(mid\.|norm_out)", name) is not None


def from_compvis(name: str, levels: int) -> str:
    """Diffusers' name of a parameter of CompVis, or of the first diffusers, in a network of `levels`."""
    name = re.sub(r"^(?:en|de)coder\.((?:post_)?quant_conv\.)", r"\1", name)
    for theirs, ours in _COMPVIS:
        name = name.replace(theirs, ours)
    for old, new in _OLD_ATTENTION.items():
        name = name.replace(f"mid_block.attentions.0.{old}.", f"mid_block.attentions.0.{new}.")
    for part, inner, our_part, our_inner in _LEVELS:
        if match := re.match(rf"{part}\.({BLOCK})\.{inner}\.", name):
            level = _level(part, int(match[1]), levels)
            return f"{our_part}.{level}.{our_inner}.{name[match.end() :]}"
    return name


def _level(part: str, level: int, levels: int) -> int:
    return levels - 1 - level if part == "decoder.up" else level


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
    for theirs, ours in _COMPVIS:
        name = name.replace(ours, theirs)
    for part, inner, our_part, our_inner in _LEVELS:
        if match := re.match(rf"{our_part}\.(\d+)\.{our_inner}\.", name):
            return f"{part}.{_level(part, int(match[1]), levels)}.{inner}.{name[match.end() :]}"
    return name


def from_taesd(names: Collection[str]) -> dict[str, str]:
    """Diffusers' names of the parameters in a file of taesd, by its own; those of other files stay.

    Its encoder and decoder are also files of their own, without a name for the part. In its decoder, the
    first layer limits the latents.
    """
    part = taesd_half(names)
    renamed = {}
    for name in names:
        match = _TAESD.match(name if part is None else f"{part}.{name}")
        layer = int(match[2]) - (match[1] == "decoder") if match else 0
        renamed[name] = f"{match[1]}.layers.{layer}.{match[3]}" if match else name
    return renamed


def taesd_half(names: Collection[str]) -> str | None:
    """The part of taesd, "encoder" or "decoder", whose names begin with the number of a layer."""
    layers = [int(match[1]) for match in map(_TAESD_LAYER.fullmatch, names) if match]
    if len(layers) < len(names) or not any(".conv." in name for name in names):
        return None
    return {0: "encoder", 1: "decoder"}.get(min(layers))  # the decoder's first layer has no weights


def to_taesd(weights: dict[str, torch.Tensor], half: str | None = None) -> dict[str, torch.Tensor]:
    """The weights of an AutoencoderTiny with taesd's names; of its `half` alone, as a file of its own."""
    renamed = {}
    for name, value in weights.items():
        part, _, layer, rest = name.split(".", 3)
        prefix = f"taesd_{part}." if half is None else ""
        if half in (None, part):
            renamed[f"{prefix}{int(layer) + (part == 'decoder')}.{rest}"] = value
    return renamed


def is_wan(names: Collection[str]) -> bool:
    """Whether these are the parameter names of Wan 2.1 or Qwen-Image, in either form."""
    return any(
        re.match(r"encoder\.(downsamples\.0\.residual|down_blocks\.0\.norm1)\.", name) for name in names
    )


def our_names(names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Our names of each parameter: none of a convolution of time alone, three of a fused qkv."""
    renamed = {name: _replaced(name, _OFFICIAL) for name in names}
    resamplings: dict[str, list[int]] = {}
    for name in renamed.values():
        flat = _FLAT.match(name)
        if flat and flat[3] == "resample.1.weight":
            resamplings.setdefault(flat[1], []).append(int(flat[2]))
    return {name: _ours(diffusers, resamplings) for name, diffusers in renamed.items()}


def _ours(name: str, resamplings: Mapping[str, list[int]]) -> tuple[str, ...]:
    if ".time_conv." in name:
        return ()
    flat = _FLAT.match(name)
    if flat and not flat[3].startswith(("resnets.", "upsamplers.")):
        part = flat[1]
        index = int(flat[2])
        rest = flat[3]
        before = [other for other in resamplings.get(part, []) if other < index]
        block = index - max(before, default=-1) - 1
        resampler = "upsamplers" if part.startswith("decoder") else "downsamplers"
        conv, is_resampling = re.subn(r"^resample\.1\.", f"{resampler}.0.conv.", rest)
        name = f"{part}.{len(before)}.{conv if is_resampling else f'resnets.{block}.{rest}'}"
    name = _replaced(name, _OURS)
    if ".to_qkv." in name:
        return tuple(name.replace(".to_qkv.", f".to_{letter}.") for letter in "qkv")
    return (name,)


def _replaced(name: str, patterns: Collection[tuple[str, str]]) -> str:
    for pattern, replacement in patterns:
        name = re.sub(pattern, replacement, name)
    return name


def from_wan(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of the 2-D network in the tensors of a file."""
    weights: dict[str, torch.Tensor] = {}
    for name, ours in our_names(tensors).items():
        value = tensors[name]
        if value.dim() == WEIGHT_DIMS:
            value = value[:, :, -1].contiguous()  # so that the rest of the file is freed
        elif name.endswith(".gamma"):  # (C, 1, 1, 1) or (C, 1, 1)
            value = value.flatten()
        if ours:
            weights |= zip(ours, value.chunk(len(ours)), strict=False)
    return weights


def into_wan(
    tensors: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Copies of the tensors of a file with the 2-D network `weights` in them, the inverse of from_wan."""
    result = {name: value.clone() for name, value in tensors.items()}
    for name, ours in our_names(tensors).items():
        if not ours:
            continue
        target = result[name]
        target = target[:, :, -1] if target.dim() == WEIGHT_DIMS else target
        target.copy_(torch.cat([weights[part] for part in ours]).reshape(target.shape))
    return result
