"""The decoder of taesd (https://github.com/madebyollin/taesd), for previews of any VAE's latents.

Its parameter names are those of diffusers' AutoencoderTiny. Its layers compute images in [0, 1]. It has no
norms and no attention, so a pixel depends on 21 latent positions around it. Shapes as in
vae.model.autoencoder.
"""

import torch
from torch import nn

from vae.config.options import TINY_WIDTH
from vae.model.layers import Conv2d, maybe_checkpoint
from vae.ops.fused_conv import end_dtype
from vae.ops.shapes import Features, Images, Latents

LIMIT = 3.0  # of the normalized latents that it distinguishes: taesd's
BLOCKS = 3  # of each level, the last one has 1


class TinyBlock(nn.Module):
    """Three convolutions with ReLU, added to their input."""

    def __init__(self, channels: int):
        super().__init__()
        first, second, third = (Conv2d(channels, channels, 3, padding=1) for _ in range(3))
        self.conv = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third)

    def forward(self, x: Features) -> Features:
        return torch.relu(self.conv(x) + x)


class TinyDecoder(nn.Module):
    """(B, Z, H/f, W/f) latents to (B, 3, H, W) images.

    Programs give it latents as diffusion models have them. Here, the buffers make them so: `latents_mean` and
    `latents_std` of each channel (vae.interop.tiny_files).
    """

    latents_mean: torch.Tensor
    latents_std: torch.Tensor

    def __init__(self, z_channels: int, levels: int, image_channels: int):
        super().__init__()
        layers: list[nn.Module] = [Conv2d(z_channels, TINY_WIDTH, 3, padding=1), nn.ReLU()]
        for _ in range(levels - 1):
            layers += [*(TinyBlock(TINY_WIDTH) for _ in range(BLOCKS)), nn.Upsample(scale_factor=2)]
            layers.append(Conv2d(TINY_WIDTH, TINY_WIDTH, 3, padding=1, bias=False))
        layers += [TinyBlock(TINY_WIDTH), Conv2d(TINY_WIDTH, image_channels, 3, padding=1)]
        self.layers = nn.Sequential(*layers)
        self.register_buffer("latents_mean", torch.zeros(z_channels))
        self.register_buffer("latents_std", torch.ones(z_channels))
        self.scale = 2 ** (levels - 1)
        self.checkpointed = False  # set by vae.model.recompute: each layer

    def forward(self, latents: Latents) -> Images:
        mean, std = self.latents_mean[:, None, None], self.latents_std[:, None, None]
        h = LIMIT * torch.tanh((latents - mean) / (LIMIT * std))  # fp32 at least, as the buffers
        h = h.to(latents.dtype)
        for layer in self.layers[:-1]:
            h = maybe_checkpoint(layer, h, self.checkpointed)
        return (2 * self.layers[-1](h.to(end_dtype(h))) - 1).to(latents.dtype)
