"""The tiny family: encoder and decoder of taesd, TAEF2 and taesana (madebyollin/taesd on GitHub).

Their layers read and compute images in [0, 1], and latents as diffusion models have them. Parameter names are
those of diffusers' AutoencoderTiny. A tiny decoder alone also previews the latents of any other VAE.

- taesd (family "tiny"): convolutions with ReLU, no norms and no attention, so a pixel depends on 21 latent
  positions around it.
- TAEF2: the blocks at the lowest resolution also have a path with a norm over the whole image.
- taesana: two convolutions of stride 2 begin the encoder, and the decoder is wider near the latents.

Shapes: B images, C channels, H x W pixels, f downsampling, Z latent channels.
"""

from itertools import pairwise

import torch
from torch import nn

from vae.config.model_options import ModelConfig
from vae.model.layers import Conv2d, GroupNorm, maybe_checkpoint
from vae.ops.fused_conv import end_dtype
from vae.ops.shapes import AnyImages, Features, Latents, Moments

LOGVAR_RANGE = (-30.0, 20.0)  # AutoencoderKL clamps to this range, so that exp() stays finite
TINY_LIMIT = 3.0  # of the normalized latents that it distinguishes: taesd's
TINY_BLOCKS = 3  # of each level, the last one has 1
POOL_GROUPS = 4
POOL_WIDENING = 4
POOL_EPS = 1e-5  # PyTorch's default


class TinyBlock(nn.Module):
    """Three convolutions with ReLU, added to their input; `pooled`: after the path of TAEF2 with a norm."""

    def __init__(self, channels: int, pooled: bool = False):
        super().__init__()
        first, second, third = (Conv2d(channels, channels, 3, padding=1) for _ in range(3))
        self.conv = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third)
        self.pool: nn.Sequential | None = None
        if pooled:
            wide = POOL_WIDENING * channels
            norm = GroupNorm(POOL_GROUPS, wide, POOL_EPS)
            widen, narrow = Conv2d(channels, wide, 1, bias=False), Conv2d(wide, channels, 1, bias=False)
            self.pool = nn.Sequential(widen, norm, nn.ReLU(), narrow)

    def forward(self, x: Features) -> Features:
        if self.pool is not None:
            x = x + self.pool(x)
        return torch.relu(self.conv(x) + x)


def _blocks(config: ModelConfig, channels: int, level: int) -> list[nn.Module]:
    """The blocks of a level but the first, counted from the image."""
    pooled = config.family == "taef2" and level == len(config.channels) - 1
    return [TinyBlock(channels, pooled) for _ in range(TINY_BLOCKS)]


class TinyEncoder(nn.Module):
    """(B, C, H, W) images in [-1, 1] to (B, 2Z, H/f, W/f).

    It knows no variance: the log-variance is the least one, so a sample is the mean within 3e-7.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        widths = config.channels
        first = Conv2d(config.image_channels, widths[0], 3, padding=1)
        layers: list[nn.Module] = [first]
        done = 1  # levels
        if config.family == "taesana":
            first.stride = (2, 2)
            layers += [nn.ReLU(), Conv2d(widths[1], widths[2], 3, stride=2, padding=1), nn.ReLU()]
            done = 3
        layers.append(TinyBlock(widths[done - 1]))
        for level in range(done, len(widths)):
            width = widths[level]
            layers.append(Conv2d(widths[level - 1], width, 3, stride=2, padding=1, bias=False))
            layers += _blocks(config, width, level)
        self.layers = nn.Sequential(*layers, Conv2d(widths[-1], config.z_channels, 3, padding=1))
        self.checkpointed = False  # set by set_recompute: each layer

    def forward(self, images: AnyImages) -> Moments:
        h = (images + 1) / 2
        for layer in self.layers[:-1]:
            h = maybe_checkpoint(layer, h, self.checkpointed)
        mean = self.layers[-1](h.to(end_dtype(h)))
        return torch.cat([mean, torch.full_like(mean, LOGVAR_RANGE[0])], dim=1)


class TinyDecoder(nn.Module):
    """(B, Z, H/f, W/f) latents to (B, C, H, W) images.

    Programs give it latents as diffusion models have them. For another VAE's latents, the buffers make them
    so: `latents_mean` and `latents_std` of each channel (vae.interop.writing). Those of a tiny encoder are.
    """

    latents_mean: torch.Tensor
    latents_std: torch.Tensor

    def __init__(self, config: ModelConfig):
        super().__init__()
        widths = config.up_channels
        layers: list[nn.Module] = [Conv2d(config.z_channels, widths[-1], 3, padding=1), nn.ReLU()]
        for level, (after, width) in reversed(list(enumerate(pairwise(widths), start=1))):
            layers += [*_blocks(config, width, level), nn.Upsample(scale_factor=2)]
            layers.append(Conv2d(width, after, 3, padding=1, bias=False))
        layers += [TinyBlock(widths[0]), Conv2d(widths[0], config.image_channels, 3, padding=1)]
        self.layers = nn.Sequential(*layers)
        for name, value in (("latents_mean", 0.0), ("latents_std", 1.0)):
            constants = torch.full((config.z_channels,), value)
            self.register_buffer(name, constants, persistent=not config.is_tiny)
        self.checkpointed = False  # set by set_recompute: each layer

    def forward(self, latents: Latents) -> AnyImages:
        mean, std = self.latents_mean[:, None, None], self.latents_std[:, None, None]
        h = TINY_LIMIT * torch.tanh((latents - mean) / (TINY_LIMIT * std))  # fp32 at least, as the buffers
        h = h.to(latents.dtype)
        for layer in self.layers[:-1]:
            h = maybe_checkpoint(layer, h, self.checkpointed)
        return (2 * self.layers[-1](h.to(end_dtype(h))) - 1).to(latents.dtype)
