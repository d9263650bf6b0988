"""The autoencoder; its parameter names are those of diffusers' AutoencoderKL.

So its state_dict has the keys of a diffusers file. A tiny encoder or decoder has those of AutoencoderTiny.

Recompute levels are what the network saves for backward, and what backward recomputes. All levels give the
same gradients. Each level needs less memory and more time than the one before it.

With --decoder_scale 2, the last convolution returns four pixels for each position of its features, so a
decoded image has twice the side of the encoder's input. In all other modules, an image is what the decoder
returns, or is to return; the encoder reads it at half its size.

Shapes: B images, C channels, H x W pixels, f downsampling, Z latent channels; h x w = H/f x W/f.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from vae.config.model_options import TINY_WIDTH, ModelConfig, tiny_channels
from vae.images.composites import premultiply, unpremultiply
from vae.model.layers import (
    Attention,
    Conv2d,
    Downsample,
    ModuleList,
    ResnetBlock,
    Upsample,
    build_norm_silu,
    maybe_checkpoint,
    readout,
    reflect_padding,
)
from vae.model.tiny import LOGVAR_RANGE, TinyDecoder, TinyEncoder
from vae.ops.library import layout_of
from vae.ops.shapes import AnyImages, Features, Latents, Moments
from vae.system.errors import UserError

FLUX2_EPS = 1e-4  # batch_norm_eps of its config.json


@dataclass
class Posterior:
    """Diagonal Gaussian over the latent of each image; mean and logvar are (B, Z, H/f, W/f)."""

    mean: Latents
    logvar: Latents

    @classmethod
    def from_moments(cls, moments: Moments) -> "Posterior":
        """Split an encoder's means and log-variances (B, 2Z, H/f, W/f), in fp32 at least."""
        moments = moments if moments.dtype == torch.float64 else moments.float()
        mean, logvar = moments.chunk(2, dim=1)
        return cls(mean, logvar.clamp(*LOGVAR_RANGE))

    def mode(self) -> Latents:
        return self.mean

    def sample(self, noise: Latents) -> Latents:
        """Reparametrized sample from standard normal `noise` in the shape of the latent."""
        return self.mean + torch.exp(0.5 * self.logvar) * noise


class Sampling(nn.Module):
    """The latents between encoder and decoder; a module, so that torch.compile can get them alone."""

    def forward(
        self, moments: Moments, noise: Latents | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A sample with `noise`, or the mode without; the mean, and the log-variance."""
        posterior = Posterior.from_moments(moments)
        latents = posterior.mode() if noise is None else posterior.sample(noise)
        return latents, posterior.mean, posterior.logvar


class MidBlock(nn.Module):
    """Residual block, attention (if it has one), residual block at the lowest resolution."""

    def __init__(self, channels: int, groups: int, has_attention: bool):
        super().__init__()
        self.attentions = ModuleList([Attention(channels, groups)] if has_attention else [])
        self.resnets = ModuleList([ResnetBlock(channels, channels, groups) for _ in range(2)])
        self.checkpointed = False  # set by set_recompute, here and below

    def forward(self, h: Features) -> Features:
        return maybe_checkpoint(self._forward, h, self.checkpointed)

    def _forward(self, h: Features) -> Features:
        h = self.resnets[0](h)
        for attention in self.attentions:
            h = attention(h)
        return self.resnets[1](h)


def _resnets(in_channels: int, out_channels: int, blocks: int, groups: int) -> ModuleList[ResnetBlock]:
    """A sequence of `blocks` residual blocks; the first one changes the width."""
    widths = [in_channels, *[out_channels] * blocks]
    return ModuleList(ResnetBlock(widths[i], out_channels, groups) for i in range(blocks))


class DownBlock(nn.Module):
    """Residual blocks of one encoder level; each level except the last ends with a downsampling."""

    def __init__(self, in_channels: int, out_channels: int, blocks: int, groups: int, last: bool):
        super().__init__()
        self.resnets = _resnets(in_channels, out_channels, blocks, groups)
        if not last:
            self.downsamplers = ModuleList([Downsample(out_channels)])
        self.last = last
        self.checkpointed = False

    def forward(self, h: Features) -> torch.Tensor:
        for block in self.resnets:
            h = block(h)
        return h if self.last else self.downsamplers[0](h)


class UpBlock(nn.Module):
    """Residual blocks of one decoder level.

    Each level except the last has an upsampler to `upsampled` channels, which runs at the start of the next
    level's forward.
    """

    def __init__(self, in_channels: int, out_channels: int, blocks: int, groups: int, upsampled: int | None):
        super().__init__()
        self.resnets = _resnets(in_channels, out_channels, blocks, groups)
        if upsampled is not None:
            self.upsamplers = ModuleList([Upsample(out_channels, upsampled)])
        self.last = upsampled is None
        self.checkpointed = False
        self.start_checkpointed = False  # the upsampling and the first block, nested within the level

    def forward(self, h: Features, upsampler: nn.Module) -> torch.Tensor:
        """`h` is not yet upsampled, so checkpointing stores the smaller tensor."""
        h = maybe_checkpoint(lambda h: self.resnets[0](upsampler(h)), h, self.start_checkpointed)
        for block in self.resnets[1:]:
            h = block(h)
        return h


class Encoder(nn.Module):
    """(B, C, H, W) images in [-1, 1] to (B, 2Z, H/f, W/f) mean and log-variance."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        widths = config.channels
        groups = _groups(config)
        self.conv_in = Conv2d(config.image_channels, widths[0], 3, padding=1)
        inputs = (widths[0], *widths[:-1])
        self.down_blocks = ModuleList(
            DownBlock(a, b, config.layers_per_block, groups, last=level == len(widths) - 1)
            for level, (a, b) in enumerate(zip(inputs, widths, strict=True))
        )
        self.mid_block = MidBlock(widths[-1], groups, config.mid_attention)
        self.conv_norm_out = build_norm_silu(groups, widths[-1])
        self.conv_out = Conv2d(widths[-1], 2 * config.z_channels, 3, padding=1)
        self.checkpointed = False

    def forward(self, images: AnyImages) -> Moments:
        return maybe_checkpoint(self._forward, images, self.checkpointed)

    def _forward(self, images: AnyImages) -> Moments:
        first, *others = self.down_blocks
        h = maybe_checkpoint(lambda images: first(self.conv_in(images)), images, first.checkpointed)
        for level in others:
            h = maybe_checkpoint(level, h, level.checkpointed)
        h = self.mid_block(h)
        return readout(self.conv_norm_out, self.conv_out, h)


class Decoder(nn.Module):
    """(B, Z, H/f, W/f) latents to (B, C, H, W) images.

    At a scale s, the last convolution returns C s^2 channels of H/s x W/s positions: s^2 pixels for each.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        widths = config.up_channels[::-1]
        groups = _groups(config)
        self.conv_in = Conv2d(config.z_channels, widths[0], 3, padding=1)
        self.mid_block = MidBlock(widths[0], groups, config.mid_attention)
        upsampled = [width // 2 if config.family == "wan" else width for width in widths[:-1]]
        levels = zip((widths[0], *upsampled), widths, (*upsampled, None), strict=True)
        self.up_blocks = ModuleList(
            UpBlock(before, width, config.up_layers + 1, groups, after) for before, width, after in levels
        )
        self.conv_norm_out = build_norm_silu(groups, widths[-1])
        self.scale = config.up_scale
        self.conv_out = Conv2d(widths[-1], config.image_channels * self.scale**2, 3, padding=1)

    def forward(self, latents: Latents) -> AnyImages:
        h = self.mid_block(self.conv_in(latents))
        *others, last = self.up_blocks
        upsampler: nn.Module = nn.Identity()
        for level in others:
            h = maybe_checkpoint(partial(level, upsampler=upsampler), h, level.checkpointed)
            upsampler = level.upsamplers[0]
        return maybe_checkpoint(lambda h: self._to_images(last(h, upsampler)), h, last.checkpointed)

    def _to_images(self, h: Features) -> torch.Tensor:
        images = readout(self.conv_norm_out, self.conv_out, h)
        if self.scale == 1:
            return images
        layout = layout_of(images)  # pixel_shuffle does not keep it on a GPU; kernels of the losses need it
        return F.pixel_shuffle(images, self.scale).contiguous(memory_format=layout)


class LatentNorm(nn.Module):
    """Fixed mean and variance of each channel of square latent patches, with which models normalize latents.

    FLUX.2 has patches of 2x2 positions, Wan 2.1 and Qwen-Image of one. Encoder and decoder do not use it.
    Training never runs it and never changes its buffers. They have the names of FLUX.2's batch norm.
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor
    num_batches_tracked: torch.Tensor

    def __init__(self, z_channels: int, patch: int):
        super().__init__()
        self.patch = patch
        self.eps = FLUX2_EPS if patch == 2 else 0.0
        self.register_buffer("running_mean", torch.zeros(patch**2 * z_channels))
        self.register_buffer("running_var", torch.ones(patch**2 * z_channels))
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.int64))

    def normalize(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents (B, Z, h, w), with sides that `patch` divides, to normalized patches (B, Z', h', w')."""
        mean = self.running_mean
        std = (self.running_var + self.eps).sqrt()
        return (F.pixel_unshuffle(latents, self.patch) - mean[:, None, None]) / std[:, None, None]


class AutoencoderKL(nn.Module):
    """Variational autoencoder of latent diffusion (Rombach et al. 2022), for any aspect ratio.

    It computes in the dtype of the images, but never ends encoder and decoder in bf16 (vae.ops.fused_conv),
    and leaves the dtype of its parameters as it is. Height and width of the images must be multiples of
    `downsampling`.
    """

    has_torch_layers: ClassVar[bool] = False  # they are of vae.ops

    def __init__(self, config: ModelConfig):
        super().__init__()
        check_widths(config)
        self.config = config
        z = config.z_channels
        is_tiny = config.is_tiny or config.decoder == "tiny"
        self.encoder: Encoder | TinyEncoder
        self.encoder = TinyEncoder(config) if config.is_tiny else Encoder(config)
        self.decoder: Decoder | TinyDecoder
        self.decoder = TinyDecoder(config) if is_tiny else Decoder(config)
        self.quant_conv = Conv2d(2 * z, 2 * z, 1) if config.use_quant_conv else None
        self.post_quant_conv = Conv2d(z, z, 1) if config.use_quant_conv and not is_tiny else None
        self.bn = LatentNorm(z, 1 if config.family == "wan" else 2) if config.latent_norm else None
        self.sampling = Sampling()
        self.encoder_frozen = False
        if config.padding == "reflect":
            reflect_padding(self.encoder if is_tiny else self)

    def freeze_encoder(self) -> None:
        """Train only the decoder: freeze everything that produces latents and run it without a graph."""
        for part in filter(None, (self.encoder, self.quant_conv)):
            part.requires_grad_(False)
        self.encoder_frozen = True

    @property
    def downsampling(self) -> int:
        """Side of a decoded image divided by the side of its latent."""
        return self.config.downsampling

    @property
    def encoder_downsampling(self) -> int:
        """Side of the encoder's input divided by the side of its latent."""
        return self.downsampling // self.config.up_scale

    def encoder_input(self, images: AnyImages) -> torch.Tensor:
        """The images as the encoder reads them: (B, C, H/s, W/s) for a decoder that enlarges by s.

        Pixels are means of s x s, as in the bicubic baseline. This filter never reads across the border of a
        crop or a tile, so cropping or turning gives the same before and after it. It is the inverse of the
        nearest enlargement with which the decoder begins.
        """
        scale = self.config.up_scale
        if scale == 1:
            return images
        return unpremultiply(F.avg_pool2d(premultiply(images), scale)).to(images.dtype)

    def encode(self, images: AnyImages) -> Posterior:
        """Posterior of the encoder's input (B, C, H, W) in [-1, 1]; mean and logvar are at least fp32."""
        return Posterior.from_moments(self._moments(images))

    def _moments(self, images: AnyImages) -> Moments:
        moments = self.encoder(images)
        return moments if self.quant_conv is None else self.quant_conv(moments)

    def decode(self, latents: Latents) -> AnyImages:
        """Images (B, C, H, W) in the dtype of `latents`, in about [-1, 1] and not clamped."""
        if self.post_quant_conv is not None:
            latents = self.post_quant_conv(latents)
        return self.decoder(latents)

    def forward(
        self,
        images: AnyImages,
        noise: Latents | None = None,
        views: Sequence[Callable[[torch.Tensor], list[torch.Tensor]]] = (),
        targets: Latents | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Reconstruction, posterior mean and log-variance; without `noise`, the mode is decoded.

        The images of the latents of each of `views` follow. `targets`: latents that are decoded instead.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.encoder_frozen):
            moments = self._moments(self.encoder_input(images))
        latents, mean, logvar = self.sampling(moments, noise)
        latents = latents if targets is None else targets
        dtype = images.dtype
        others = [self.decode(view.to(dtype)) for function in views for view in function(latents)]
        return self.decode(latents.to(dtype)), mean, logvar, *others

    def set_recompute(self, level: "RecomputeLevel") -> None:
        """Let backward recompute what the level names, starting with the next forward."""
        encoder, decoder = self.encoder, self.decoder
        for module in self.modules():
            if isinstance(module, ResnetBlock):
                module.recompute = level.resnets
        for tiny in (encoder, decoder):
            if isinstance(tiny, TinyEncoder | TinyDecoder):
                tiny.checkpointed = level.full_resolution or level.resnets == "block"
        if isinstance(encoder, Encoder):
            encoder.mid_block.checkpointed = level.every_resolution
            for down_block in encoder.down_blocks:
                down_block.checkpointed = level.every_resolution
            encoder.down_blocks[0].checkpointed |= level.full_resolution
            encoder.checkpointed = level.encoder
        if isinstance(decoder, TinyDecoder):
            return
        decoder.mid_block.checkpointed = level.every_resolution
        for up_block in decoder.up_blocks:
            up_block.checkpointed = level.every_resolution
        last = decoder.up_blocks[-1]
        last.checkpointed |= level.full_resolution
        last.start_checkpointed = level.every_resolution


def _groups(config: ModelConfig) -> int:
    """The groups of all norms; 0: RMS norms, or none."""
    return config.norm_groups if config.family == "kl" else 0


def widths_fit(config: ModelConfig) -> bool:
    """Whether the number of norm groups divides all widths."""
    groups = _groups(config)
    own = () if config.decoder == "tiny" else config.up_channels
    return not groups or not any(width % groups for width in (*config.channels, *own))


def check_widths(config: ModelConfig) -> None:
    """Raise UserError if norm groups do not divide a width, or the decoder has another number of levels."""
    if config.decoder == "tiny" and (config.decoder_channels or config.decoder_layers_per_block):
        raise UserError(
            f"--decoder tiny has {TINY_WIDTH} channels in each level: omit --decoder_channels and "
            "--decoder_layers_per_block, and use --profile decoder"
        )
    if config.decoder == "tiny" and config.up_scale != 1:
        raise UserError(f"--decoder tiny has the scale 1: omit --decoder_scale {config.decoder_scale}")
    if config.is_tiny and config.channels != tiny_channels(config.family, len(config.channels))[0]:
        raise UserError(f"--family {config.family} has its own channels in each level: omit --channels")
    if config.family == "taesana" and len(config.channels) < 3:
        raise UserError("--family taesana has at least 3 levels: use --family tiny")
    own, levels = len(config.up_channels), len(config.channels)
    if own != levels:
        raise UserError(f"--decoder_channels has {own} levels, and --channels {levels}: give as many")
    if widths_fit(config):
        return
    common = math.gcd(*config.channels, *config.up_channels)
    groups = max(number for number in range(1, config.norm_groups + 1) if common % number == 0)
    for flag, widths in (("--channels", config.channels), ("--decoder_channels", config.up_channels)):
        for width in widths:
            if width % config.norm_groups:
                raise UserError(
                    f"{flag} {width} is not a multiple of --norm_groups {config.norm_groups}: "
                    f"add --norm_groups {groups}, or use multiples of {config.norm_groups}"
                )


# ---- Recompute levels ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecomputeLevel:
    """The recompute level: which results backward computes again."""

    resnets: Literal["none", "activations", "block"] = "none"  # of each: nothing, activations, all but x
    encoder: bool = False  # the whole encoder, from the images
    full_resolution: bool = False  # the encoder's first and the decoder's last resolution
    every_resolution: bool = False  # each one and the mid blocks; the start of the last one is nested


RECOMPUTE_LEVELS = {
    "none": RecomputeLevel(),
    "activations": RecomputeLevel("activations"),
    "top_level": RecomputeLevel("activations", full_resolution=True),
    "blocks": RecomputeLevel("block"),
    "blocks_encoder": RecomputeLevel("block", encoder=True),
    "all": RecomputeLevel("block", every_resolution=True),
}


def set_recompute(autoencoder: AutoencoderKL, name: str) -> None:
    """Apply the recompute level `name` to the network, starting with its next forward."""
    autoencoder.set_recompute(RECOMPUTE_LEVELS[name])
