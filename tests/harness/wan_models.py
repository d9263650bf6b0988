"""Wan 2.1 and Qwen-Image with random weights, built by diffusers, and the official names of their weights."""

import re

import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan

CLASSES = (AutoencoderKLWan, AutoencoderKLQwenImage)
_IN_BLOCK = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6"}
_REST = {
    "quant_conv": "conv1",
    "post_quant_conv": "conv2",
    "coder.conv_in": "coder.conv1",
    "mid_block.resnets.0": "middle.0",
    "mid_block.attentions.0": "middle.1",
    "mid_block.resnets.1": "middle.2",
    "norm_out": "head.0",
    "conv_out": "head.2",
    "conv_shortcut": "shortcut",
    "encoder.down_blocks": "encoder.downsamples",
}


def wan_model(
    cls=AutoencoderKLWan, base_dim: int = 8, **options
) -> AutoencoderKLWan | AutoencoderKLQwenImage:
    """A model of one of CLASSES; its norms differ from ones, so that swapped tensors are detected."""
    torch.manual_seed(7)
    model = cls(base_dim=base_dim, **options)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("gamma"):
                value.add_(0.3 * torch.randn_like(value))
    return model.eval().requires_grad_(False)


def official_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights of a model of diffusers with the names of Wan's own code."""
    renamed = {}
    for name, value in model.state_dict().items():
        found = re.match(r"decoder\.up_blocks\.(\d)\.(resnets|upsamplers)\.(\d)\.(.*)", name)
        if found:  # levels of three blocks, and a resampling after each but the last
            place = 4 * int(found[1]) + (3 if found[2] == "upsamplers" else int(found[3]))
            name = f"decoder.upsamples.{place}.{found[4]}"
        for ours, theirs in _REST.items():
            name = re.sub(rf"(^|(?<=[.ne])){re.escape(ours)}(?=\.)", theirs, name)
        if "time_conv" not in name:
            for ours, theirs in _IN_BLOCK.items():
                name = re.sub(rf"(amples\.\d+|middle\.[02])\.{ours}\.", rf"\1.{theirs}.", name)
        renamed[name] = value.contiguous()
    return renamed


def one_frame(model: torch.nn.Module, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents (B, Z, h, w) and clamped reconstructions of images (B, 3, H, W), each a video of one frame."""
    latents = model.encode(images[:, :, None]).latent_dist.mode()
    return latents[:, :, 0], model.decode(latents).sample[:, :, 0]
