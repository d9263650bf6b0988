"""The families of VAEs that are read and written, by the class in their config.json."""

from collections.abc import Callable, Mapping
from typing import Any

from vae.config.declare import PUBLISHED_SCALING
from vae.config.model_options import DIFFUSERS_CLASSES, ModelConfig
from vae.interop.latent_statistics import LatentConstants
from vae.model.autoencoder import FLUX2_EPS
from vae.model.tiny import TINY_BLOCKS
from vae.system.errors import UserError

# These constants are in config.json of Wan 2.1 and Qwen-Image; official single files do not contain them.
WAN_MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
WAN_STD = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)
# config.json has it if the network pads by reflection; no class of diffusers reads it.
PADDING_KEY = "padding_mode"
TINY_CLASS = "AutoencoderTiny"
TAEF2_CHANNELS = 32  # with so many latent channels, programs take a file with the names of taesd for TAEF2
OWN_CLASS = "VaeTrainerAutoencoder"  # of networks that no class of diffusers has; only this project reads it


def _kl(model: ModelConfig) -> dict[str, Any]:
    return _blocks(model) | {
        "block_out_channels": list(model.channels),
        "layers_per_block": model.layers_per_block,
        "mid_block_add_attention": model.mid_attention,
        "use_post_quant_conv": model.use_quant_conv,
        "use_quant_conv": model.use_quant_conv,
    }


def _blocks(model: ModelConfig) -> dict[str, Any]:
    levels = len(model.channels)
    return {
        "act_fn": "silu",
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "norm_num_groups": model.norm_groups,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
    }


def _flux2(model: ModelConfig) -> dict[str, Any]:
    own = {"decoder_block_out_channels": list(model.up_channels)} if model.decoder_channels else {}
    return _kl(model) | own | {"batch_norm_eps": FLUX2_EPS, "patch_size": [2, 2]}


def _tiny(model: ModelConfig) -> dict[str, Any]:
    """The encoder has its default shape, also if a decoder is written alone and has no encoder."""
    widths = list(model.up_channels)
    blocks = [TINY_BLOCKS] * (len(model.channels) - 1)
    return {
        "decoder_block_out_channels": widths,
        "encoder_block_out_channels": widths,
        "in_channels": model.image_channels,
        "latent_channels": model.z_channels,
        "num_decoder_blocks": [*blocks, 1],
        "num_encoder_blocks": [1, *blocks],
        "out_channels": model.image_channels,
    }


def _own(model: ModelConfig) -> dict[str, Any]:
    return {"family": model.family} if model.is_tiny else _kl(model)


def _asymmetric(model: ModelConfig) -> dict[str, Any]:
    return _blocks(model) | {
        "down_block_out_channels": list(model.channels),
        "layers_per_down_block": model.layers_per_block,
        "layers_per_up_block": model.up_layers,
        "up_block_out_channels": list(model.up_channels),
    }


# These functions return the keys of config.json of each class.
FAMILIES: dict[str, Callable[[ModelConfig], dict[str, Any]]] = {
    "AutoencoderKL": _kl,
    "AutoencoderKLFlux2": _flux2,
    "AsymmetricAutoencoderKL": _asymmetric,
    "AutoencoderKLWan": _kl,
    "AutoencoderKLQwenImage": _kl,
    TINY_CLASS: _tiny,  # a tiny decoder alone is written by vae.interop.writing
    OWN_CLASS: _own,
}


def is_module(config: Mapping[str, Any]) -> bool:
    """Whether the network of this config.json is computed by diffusers: by no network of our own."""
    name = config.get("_class_name")
    is_wan22 = config.get("is_residual") is True or config.get("patch_size") in (2, [2])
    return name in DIFFUSERS_CLASSES and (name not in FAMILIES or is_wan22)


def class_of(model: ModelConfig) -> str:
    """The class as which networks of this shape are written."""
    if model.module:
        return model.class_name
    if model.family == "tiny":
        return TINY_CLASS
    if model.family != "kl" or model.decoder:
        return OWN_CLASS
    if model.latent_norm:
        return OWN_CLASS if model.decoder_layers_per_block else "AutoencoderKLFlux2"
    if not (model.decoder_channels or model.decoder_layers_per_block):
        return "AutoencoderKL"
    is_asymmetric = model.use_quant_conv and model.mid_attention
    return "AsymmetricAutoencoderKL" if is_asymmetric else OWN_CLASS


def check_class(config: Any, where: str, source: str) -> dict[str, Any]:
    """The content of a config.json; UserError with the name `source` if it is for another class."""
    name = config.get("_class_name") if isinstance(config, dict) else type(config).__name__
    if isinstance(config, dict) and is_module(config):
        return config
    has_class = name is not None or not isinstance(config, dict)  # a config without one is not refused
    if has_class and (not isinstance(name, str) or name not in FAMILIES):
        known = ", ".join({**FAMILIES, **DIFFUSERS_CLASSES})
        raise UserError(f"{where}: its {source} is for {name}, but only {known} are supported")
    layers = [config.get(key, default) for key, default in (("act_fn", "relu"), ("upsample_fn", "nearest"))]
    if name == TINY_CLASS and layers != ["relu", "nearest"]:
        raise UserError(
            f"{where}: its {source} has {' and '.join(layers)}: only relu and nearest are supported"
        )
    return config


# Programs give a VAE images with these channels, which are not RGB, in these forms.
DIFFUSERS_IMAGES = {
    1: "are grey: give L in [-1, 1]",
    4: "have alpha: give RGBA in [-1, 1] with straight alpha",
}


def comfyui_problem(model: ModelConfig, constants: LatentConstants) -> str | None:
    """The reason why ComfyUI misreads a single file of this network, with the remedy, or None.

    ComfyUI decides by the number of latent channels, and knows the scaling of its diffusion models only.
    """
    z = model.z_channels
    if model.module:
        return f"reads no file with the names of diffusers' {model.class_name}: use its folder with diffusers"
    if model.is_tiny:
        levels = len(model.channels)
        if model.family == "taesana" or levels != 4 or (model.family == "taef2") != (z == TAEF2_CHANNELS):
            return f"reads no --family {model.family} with {z} latent channels and {levels} levels"
        return None
    if model.image_channels != 3:
        return f"reads images of 3 channels, not of {model.image_channels}: use its folder with diffusers"
    if model.family == "wan":
        return "reads Wan 2.1 in the form of its video VAE only: add --into with that file"
    if z == 64 or (z == 32 and not model.latent_norm):
        return f"takes a VAE with {z} latent channels for one of Hunyuan, with other layers: use its folder"
    if model.up_scale != 1:
        return "has no decoders of twice the size: a run of --init_from with --decoder_scale 1 writes another"
    shape = model.channels, model.layers_per_block, model.up_layers, model.mid_attention
    if shape not in (((128, 256, 512, 512), 2, 2, True), ((128, 256, 512), 2, 2, True)):
        return "expects channels 128 256 512 512, two blocks per level and attention: it cannot read this VAE"
    known = [PUBLISHED_SCALING[name] for name in ("sd3", "flux")]
    if z == 16 and constants.scaling is not None and constants[:2] not in known:
        text = f"scaling {constants.scaling:.5g}, shift {constants.shift:.5g}"
        return f"scales 16 latent channels as SD3 or FLUX.1, not by {text}: --fold_scaling makes them fit"
    return None
