"""The options of the networks: their architecture and initial weights."""

import json
from dataclasses import dataclass

from vae.config.declare import option, scaling_option, shift_option

MAX_CHANNELS = 2**16  # of a layer: a hundred times the widest in use, and no tensor overflows its count
TINY_WIDTH = 64  # channels of every level of --decoder tiny, as in taesd
TINY_FAMILIES = ("tiny", "taef2", "taesana")


@dataclass(frozen=True)
class DiffusersClass:
    """What this project must know about a class of diffusers, beside its configuration."""

    is_video: bool  # it computes an image as a video of one frame
    has_posterior: bool  # the encoder returns a log-variance


# Classes of --family diffusers. Each was tried (docs/export.md); vae.interop.families names the others.
DIFFUSERS_CLASSES = {
    "AutoencoderDC": DiffusersClass(is_video=False, has_posterior=False),
    "AutoencoderKLCosmos": DiffusersClass(is_video=True, has_posterior=False),
    "AutoencoderKLHunyuanImage": DiffusersClass(is_video=False, has_posterior=True),
    "AutoencoderKLKVAE": DiffusersClass(is_video=False, has_posterior=True),
    "AutoencoderKLWan": DiffusersClass(is_video=True, has_posterior=True),
}


def tiny_channels(family: str, levels: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The channels per level of the encoder and the decoder of a tiny family, from image to latents."""
    channels = (TINY_WIDTH,) * levels
    if family != "taesana":
        return channels, channels
    inner = channels[2:]
    return (TINY_WIDTH // 2,) * 2 + inner, (*inner, 2 * TINY_WIDTH, 4 * TINY_WIDTH)


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of the autoencoder and its initial weights."""

    family: str = option(
        "kl",
        "layers of the network; kl: those of AutoencoderKL; wan: those of Wan 2.1 and Qwen-Image, set by "
        "--init_from; tiny: those of AutoencoderTiny (taesd), taef2 and taesana: its variants; each set by "
        "--init_from or new with --teacher; diffusers: those of its other classes, set by --init_from",
        choices=("kl", "wan", *TINY_FAMILIES, "diffusers"),
    )
    module: str | None = option(
        None, "class and configuration of --family diffusers as JSON, set by --init_from", metavar="JSON"
    )
    channels: tuple[int, ...] = option(
        (128, 256, 512, 512),
        "channels per resolution level; each further level halves the sides of the latents",
        at_least=1,
        at_most=MAX_CHANNELS,
    )
    layers_per_block: int = option(
        2, "residual blocks per encoder level; each decoder level has one more", at_least=1, at_most=100
    )
    decoder: str | None = option(
        None,
        "another kind of decoder; tiny: that of taesd, for previews; needs --init_from and --train_part "
        "decoder (docs/export.md)",
        choices=("tiny",),
        unset="the layers of the encoder",
    )
    decoder_channels: tuple[int, ...] | None = option(
        None,
        "channels per level of the decoder, in the order of --channels",
        unset="those of --channels",
        at_least=1,
        at_most=MAX_CHANNELS,
    )
    decoder_layers_per_block: int | None = option(
        None,
        "residual blocks per decoder level, minus one",
        unset="--layers_per_block",
        at_least=1,
        at_most=100,
    )
    decoder_scale: int | None = option(
        None,
        "side of a decoded image divided by that of the encoder's input; 2: the encoder reads crops of "
        "--image_size at half their size (docs/larger_decoder.md)",
        unset="1, or that of --init_from",
        at_least=1,
        at_most=2,
    )
    mid_attention: bool = option(True, "attention in the middle of encoder and decoder")
    padding: str = option(
        "zeros",
        "padding of the 3x3 convolutions; reflect: as in EQ-VAE's releases, slower (docs/export.md)",
        choices=("zeros", "reflect"),
    )
    z_channels: int = option(16, "latent channels", at_least=1, at_most=MAX_CHANNELS)
    image_channels: int = option(
        3,
        "channels of an image; 3: RGB over --background; 4: RGB and alpha; 1: grey; an RGB VAE of "
        "--init_from is changed to it (docs/alpha.md)",
        choices=(1, 3, 4),
    )
    norm_groups: int = option(
        32, "groups of every GroupNorm; must divide every value of --channels", at_least=1
    )
    use_quant_conv: bool = option(
        False, "add 1x1 convolutions before and after the latents, as in SD 1.x and SDXL"
    )
    latent_norm: bool = option(False, "store fixed statistics of 2x2 latent patches, as FLUX.2 does")
    init: str = option(
        "warm",
        "initial weights; warm: the network starts as a linear codec; default: PyTorch's initialization",
        choices=("warm", "default"),
    )
    init_from: str | None = option(
        None,
        "start from an existing VAE: a checkpoint, diffusers folder, .safetensors file, or OWNER/REPO[:PATH] "
        "of the Hugging Face hub",
        metavar="PATH",
        inherited=False,
    )
    scaling_factor: float | None = scaling_option()
    shift_factor: float | None = shift_option()

    @property
    def is_tiny(self) -> bool:
        """Whether encoder and decoder are those of a tiny autoencoder."""
        return self.family in TINY_FAMILIES

    @property
    def has_posterior(self) -> bool:
        """Whether the encoder has a variance, for the terms of the posterior."""
        return DIFFUSERS_CLASSES[self.class_name].has_posterior if self.module else not self.is_tiny

    @property
    def class_name(self) -> str:
        """The class of --module."""
        return json.loads(self.module)["_class_name"] if self.module else ""

    @property
    def widest(self) -> int:
        """The channels of the widest level, for the learning rate: a tiny decoder's, or the encoder's."""
        return max(self.up_channels if self.decoder or self.is_tiny else self.channels)

    @property
    def up_scale(self) -> int:
        """Side of a decoded image divided by that of the encoder's input."""
        return self.decoder_scale or 1

    @property
    def downsampling(self) -> int:
        """Side of a decoded image, or of a crop, divided by the side of its latent."""
        return 2 ** (len(self.channels) - 1) * self.up_scale

    @property
    def up_channels(self) -> tuple[int, ...]:
        """The channels of the decoder's levels, from the image to the latents."""
        if self.is_tiny or self.decoder == "tiny":
            return tiny_channels("tiny" if self.decoder else self.family, len(self.channels))[1]
        return self.decoder_channels or self.channels

    @property
    def up_layers(self) -> int:
        """The residual blocks of a decoder level, without the additional one."""
        return self.decoder_layers_per_block or self.layers_per_block
