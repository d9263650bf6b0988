"""A VAE with the parameter names and shapes of the original research code, written for these tests.

It computes images, so a test can check the meaning of a file and not only its names. Sources of the names:
CompVis latent-diffusion and Black Forest Labs' published model definitions.
"""

import torch
import torch.nn.functional as F
from torch import nn


def norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, width, eps=1e-6)


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.norm1, self.conv1 = norm(inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = norm(outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        if inputs != outputs:
            self.nin_shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return h + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class Attention(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = norm(width)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (part(h).flatten(2).transpose(1, 2) for part in (self.q, self.k, self.v))  # (B, N, C)
        scores = torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, dim=-1)
        return x + self.proj_out((scores @ v).transpose(1, 2).reshape(x.shape))


class Conv(nn.Module):
    """A module around one convolution, as in their down- and upsampling."""

    def __init__(self, width: int, stride: int):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride, padding=0 if stride == 2 else 1)


def middle(width: int) -> nn.Module:
    part = nn.Module()
    part.block_1, part.attn_1, part.block_2 = Block(width, width), Attention(width), Block(width, width)
    return part


class Encoder(nn.Module):
    def __init__(self, channels: tuple[int, ...], blocks: int, z: int):
        super().__init__()
        self.conv_in = nn.Conv2d(3, channels[0], 3, padding=1)
        self.down = nn.ModuleList()
        previous = channels[0]
        for index, width in enumerate(channels):
            level = nn.Module()
            level.block = nn.ModuleList(Block(previous if i == 0 else width, width) for i in range(blocks))
            if index < len(channels) - 1:
                level.downsample = Conv(width, 2)
            self.down.append(level)
            previous = width
        self.mid = middle(previous)
        self.norm_out, self.conv_out = norm(previous), nn.Conv2d(previous, 2 * z, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        h = self.conv_in(images)
        for level in self.down:
            for block in level.block:
                h = block(h)
            if hasattr(level, "downsample"):
                h = level.downsample.conv(F.pad(h, (0, 1, 0, 1)))
        h = self.mid.block_2(self.mid.attn_1(self.mid.block_1(h)))
        return self.conv_out(F.silu(self.norm_out(h)))


class Decoder(nn.Module):
    def __init__(self, channels: tuple[int, ...], blocks: int, z: int):
        super().__init__()
        self.conv_in = nn.Conv2d(z, channels[-1], 3, padding=1)
        self.mid = middle(channels[-1])
        levels = []
        previous = channels[-1]
        for index in reversed(range(len(channels))):
            level = nn.Module()
            width = channels[index]
            level.block = nn.ModuleList(
                Block(previous if i == 0 else width, width) for i in range(blocks + 1)
            )
            if index > 0:
                level.upsample = Conv(width, 1)
            levels.insert(0, level)
            previous = width
        self.up = nn.ModuleList(levels)
        self.norm_out, self.conv_out = norm(previous), nn.Conv2d(previous, 3, 3, padding=1)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        h = self.conv_in(latents)
        h = self.mid.block_2(self.mid.attn_1(self.mid.block_1(h)))
        for level in reversed(self.up):
            for block in level.block:
                h = block(h)
            if hasattr(level, "upsample"):
                h = level.upsample.conv(F.interpolate(h, scale_factor=2.0, mode="nearest"))
        return self.conv_out(F.silu(self.norm_out(h)))


class ResearchVAE(nn.Module):
    """`quant`: "outer" as in SD 1.x, "inner" as in FLUX.2 (with batch norm over latent patches), or None."""

    def __init__(self, channels: tuple[int, ...], z: int, quant: str | None, blocks: int = 2):
        super().__init__()
        self.encoder, self.decoder = Encoder(channels, blocks, z), Decoder(channels, blocks, z)
        convolutions = nn.Conv2d(2 * z, 2 * z, 1), nn.Conv2d(z, z, 1)
        if quant == "outer":
            self.quant_conv, self.post_quant_conv = convolutions
        if quant == "inner":
            self.encoder.quant_conv, self.decoder.post_quant_conv = convolutions
            self.bn = nn.BatchNorm2d(4 * z, eps=1e-4, affine=False)

    def _quant_convolutions(self) -> tuple[nn.Module, nn.Module]:
        if hasattr(self, "bn"):
            return self.encoder.quant_conv, self.decoder.post_quant_conv
        return getattr(self, "quant_conv", nn.Identity()), getattr(self, "post_quant_conv", nn.Identity())

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """The posterior's mean."""
        return self._quant_convolutions()[0](self.encoder(images)).chunk(2, dim=1)[0]

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return self.decoder(self._quant_convolutions()[1](latents))
