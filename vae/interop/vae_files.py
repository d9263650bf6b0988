"""Loading a VAE of any supported format: checkpoints, diffusers folders, single safetensors files."""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from vae.config.declare import PUBLISHED_SCALING
from vae.config.model_options import TINY_WIDTH, ModelConfig
from vae.config.options import build
from vae.config.resolve import tiny_shape
from vae.images.channels import FROM_RGB, OPAQUE, TO_RGB
from vae.interop.checkpoint_file import (
    CheckpointContent,
    DamagedCheckpointError,
    checked,
    is_checkpoint,
    verify_checkpoint,
)
from vae.interop.families import PADDING_KEY, WAN_MEAN, WAN_STD, is_module
from vae.interop.latent_statistics import LatentConstants
from vae.interop.parameter_names import BLOCK
from vae.interop.vae_path import VaePath, locate_vae
from vae.interop.weight_file import VaeTensors, read_metadata, read_pickle, read_tensors, read_weights
from vae.interop.writing import CONFIG_KEY, parse_config, read_config
from vae.model.autoencoder import AutoencoderKL, widths_fit
from vae.model.diffusers_autoencoder import build_autoencoder, model_values
from vae.system.errors import UserError

START_KEY = "start"  # metadata key of the hash in VaeFile.start
_NOT_OF_SHAPE = ("init", "init_from", "scaling_factor", "shift_factor")  # of ModelConfig
_USE_WITHOUT = {
    "encoder": "it can only decode latents (infer_vae.py --mode decode); for all else, give the whole VAE",
    "decoder": "it can only encode images (infer_vae.py --mode encode), or get a new decoder "
    "(train_vae.py --profile decoder --init_from); for all else, give the whole VAE",
}
# A file may have one of these parts of a network alone; its names begin like this.
PARTS = {"encoder": ("encoder.", "quant_conv."), "decoder": ("decoder.", "post_quant_conv.")}
_MAX_CHARS = 200  # of a message of PyTorch


@dataclass
class VaeFile:
    """Contents of a VAE file, independent of its format."""

    kind: str  # checkpoint, diffusers, compvis or wan: the origin of the parameter names
    shape: dict[str, Any]  # ModelConfig values by name; norm_groups only if the file contains it
    weights: dict[str, torch.Tensor]  # fp32, with diffusers names
    dtype: torch.dtype  # of the weights in the file
    constants: LatentConstants  # of its latents, as far as the file contains them
    sample_size: int | None  # training image size, px
    force_upcast: bool | None = None  # whether fp16 programs must run the VAE in fp32; None: not in the file
    step: int | None = None  # optimizer step of a checkpoint
    start: str = ""  # hash of the weights with which its training began; "": not known
    encoder_trained: bool = False  # a checkpoint of a run that changes its latents
    learns_more: bool = False  # its decoder returns alpha 1, or repeated pixels, until it is trained
    metadata: dict[str, str] = field(default_factory=dict)  # of a safetensors file

    @property
    def has_decoder(self) -> bool:
        """Whether the weights contain a decoder."""
        return missing_part(self.weights) != "decoder"

    @property
    def is_trained(self) -> bool:
        """Whether it reconstructs its images."""
        return self.has_decoder and not self.learns_more

    def fit_decoder(self, model: ModelConfig) -> None:
        """Give the decoder the scale of that of `model`; remove its weights if the shape differs otherwise.

        Repeated rows return every pixel several times: nearest enlargement. The mean of rows returns the mean
        of their pixels: the image at half its size.
        """
        own = build(self.shape).model
        shapes = ((shape.decoder, shape.up_channels, shape.up_layers) for shape in (own, model))
        if len(set(shapes)) > 1:
            dropped = PARTS["decoder"] if model.decoder else ("decoder.",)
            self.weights = {n: value for n, value in self.weights.items() if not n.startswith(dropped)}
        for name in ("decoder.conv_out.weight", "decoder.conv_out.bias"):
            if name not in self.weights or own.up_scale == model.up_scale:
                continue
            rows = self.weights[name].unflatten(0, (-1, own.up_scale**2)).mean(1)
            self.weights = {**self.weights, name: rows.repeat_interleave(model.up_scale**2, dim=0)}
            self.learns_more = model.up_scale > own.up_scale

    def change_image_channels(self, channels: int) -> None:
        """Give an RGB VAE alpha, or make it grey: it computes the same as before of opaque or grey images.

        The first convolution reads alpha in a random direction, as strongly as all colors together: features
        contain it from the first step, and latents keep their range (benchmarks/LOG.md).
        """
        if channels == self.shape.get("image_channels", 3):  # not of an AutoencoderTiny
            return
        tables = (FROM_RGB, TO_RGB, OPAQUE)
        from_rgb, to_rgb, opaque = (torch.tensor(table[channels]).float() for table in tables)
        weights = self.weights
        kernel, bias = (weights[f"encoder.conv_in.{name}"] for name in ("weight", "bias"))
        of_alpha = torch.randn(len(kernel), generator=torch.Generator().manual_seed(0))
        of_alpha *= kernel.sum((2, 3)).norm() / of_alpha.norm()  # (C0,), as large as flat colors
        kernel = torch.einsum("orhw,rc->ochw", kernel, to_rgb)
        # Only the centre reads alpha, because alpha is 0 in the padding. The bias makes alpha 1 add nothing.
        kernel[:, :, 1, 1] += torch.outer(of_alpha, opaque)
        weights["encoder.conv_in.weight"] = kernel
        weights["encoder.conv_in.bias"] = bias - of_alpha * opaque.sum()
        for name in ("decoder.conv_out.weight", "decoder.conv_out.bias"):
            if (value := weights.get(name)) is not None:
                rows = torch.tensordot(from_rgb, value.unflatten(0, (3, -1)), 1)  # (C, pixels, ...)
                rows = rows + opaque[:, None] if name.endswith("bias") else rows
                weights[name] = rows.flatten(0, 1)
        self.shape["image_channels"] = channels
        self.learns_more |= bool(opaque.any())


@dataclass
class LoadedVae:
    """A VAE in fp32 on the CPU, in evaluation mode and without gradients."""

    autoencoder: AutoencoderKL
    file: VaeFile
    has_encoder: bool = True

    def __repr__(self) -> str:
        z, f = self.autoencoder.config.z_channels, self.autoencoder.downsampling
        return (
            f"LoadedVae({self.kind}, z_channels={z}, downsampling={f}, scaling_factor={self.scaling_factor})"
        )

    @property
    def kind(self) -> str:
        return self.file.kind

    @property
    def scaling_factor(self) -> float | None:
        return self.file.constants.scaling

    @property
    def shift_factor(self) -> float | None:
        return None if self.scaling_factor is None else self.file.constants.shift


def load_vae(
    path: Path, *, flag: str = "--vae", weights: str = "ema", needs: tuple[str, ...] = tuple(PARTS)
) -> LoadedVae:
    """Load the VAE at `path` from any supported format.

    `weights` applies to files with both: "ema", the weights that a run validates and exports, or "raw".
    `needs`: a file may lack the other part of encoder and decoder, whose weights are then meaningless. Raises
    UserError that starts with `flag` and the path.
    """
    file = read_vae(path, flag=flag, weights=weights)
    missing = missing_part(file.weights)
    if missing in needs:
        raise UserError(f"{flag} {path} has no {missing}: {_USE_WITHOUT[missing]}")
    config = build(file.shape).model
    groups = config.norm_groups
    if not widths_fit(config):
        raise UserError(
            f"{flag} {path} has channels {' '.join(map(str, config.channels))}, {groups} norm groups do not "
            "divide all widths, and it contains no number of groups: give a folder with config.json"
        )
    check_fit(config, file.weights, f"{flag} {path}")
    autoencoder = build_autoencoder(config)
    load_weights(autoencoder, file.weights)
    file.weights = {}  # the network has its own copy
    return LoadedVae(autoencoder.eval().requires_grad_(False), file, has_encoder=missing != "encoder")


def read_vae(path: Path, *, flag: str = "--init_from", weights: str = "ema") -> VaeFile:
    """Read the VAE file or folder at `path`; UserError that starts with `flag` and the path."""
    located = locate_vae(path, flag)
    where = f"{flag} {path}"
    content = None
    if len(located.weights) == 1 and located.format(where) == "pickle":
        (file,) = located.weights
        try:
            verify_checkpoint(file)
            content = read_pickle(file, where)
            if is_checkpoint(content):
                return _from_checkpoint(checked(content, file, flag), where, weights)
        except DamagedCheckpointError as error:
            raise UserError(f"{where}: {error}") from None
    return _from_tensors(located, where, weights, content)


def _from_checkpoint(content: CheckpointContent, where: str, weights: str) -> VaeFile:
    config = content["config"]
    ema = content["ema"] if weights == "ema" else None
    scaling, shift = content["latent_scaling"] or (None, 0.0)
    channels = _of_channels(content["latent_channels"] or {}, config["z_channels"], where)
    return VaeFile(
        kind="checkpoint",
        shape={f.name: config[f.name] for f in fields(ModelConfig) if f.name not in _NOT_OF_SHAPE},
        weights=ema if ema is not None else content["model"],
        dtype=torch.float32,
        constants=LatentConstants(scaling, shift, *channels),
        sample_size=config["image_size"],  # of the stage that trains; later ones are only planned
        step=content["position"]["step"],
        start=content["run"]["start"],
        encoder_trained=config["train_part"] == "all",
    )


def _numbers(values: Any, name: str, count: int, where: str) -> tuple[float, ...]:
    """`values` of config.json as numbers; UserError if they are not `count` finite ones."""
    try:
        numbers = tuple(map(float, values))
        if len(numbers) == count and all(map(math.isfinite, numbers)):
            return numbers
    except (TypeError, ValueError, OverflowError):
        pass
    raise UserError(f"{where}: {name} in config.json is not a list of {count} numbers: {values}")


def _number(config: dict[str, Any], name: str, where: str) -> float | None:
    """The number `name` of config.json, None if it is absent or null; UserError if it is no finite number."""
    value = config.get(name)
    if value is None:
        return None
    try:
        if math.isfinite(number := float(value)):
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise UserError(f"{where}: {name} in config.json is not a number: {value}")


def _of_channels(
    config: dict[str, Any], z_channels: int, where: str
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """`latents_mean` and `latents_std`, empty unless `config` has both; UserError if they do not fit."""
    mean, std = (config.get(name) for name in ("latents_mean", "latents_std"))
    if mean is None or std is None:
        return (), ()
    return (
        _numbers(mean, "latents_mean", z_channels, where),
        _numbers(std, "latents_std", z_channels, where),
    )


def _latent_norm(mean: tuple[float, ...], std: tuple[float, ...], z_channels: int) -> dict[str, torch.Tensor]:
    """The latent norm of a file of Wan 2.1 or Qwen-Image with these constants in its config.json.

    Without them it is the published one, and for another number of channels that of a new network.
    """
    if not mean:
        is_published = z_channels == len(WAN_MEAN)
        mean, std = (WAN_MEAN, WAN_STD) if is_published else ((0.0,) * z_channels, (1.0,) * z_channels)
    return {
        "bn.running_mean": torch.tensor(mean, dtype=torch.float64).float(),
        "bn.running_var": torch.tensor(std, dtype=torch.float64).square().float(),
        "bn.num_batches_tracked": torch.zeros((), dtype=torch.int64),
    }


def latent_scaling(
    config: dict[str, Any] | None, tensors: VaeTensors, is_folder: bool, where: str
) -> tuple[float | None, float]:
    """Scaling and shift of the latents from the first source that has them; (None, 0) if none has.

    The sources: the family, the config.json, the default of diffusers, the diffusion model in the same file.
    """
    if is_tiny(tensors.weights):  # its latents are those of diffusion models
        return 1.0, 0.0
    if config is None:
        return tensors.published_scaling or (None, 0.0)
    if is_folder and config.get("_class_name") == "AutoencoderKL" and "scaling_factor" not in config:
        return PUBLISHED_SCALING["sd"]  # folders of SD 1.x do not contain it
    return _number(config, "scaling_factor", where), _number(config, "shift_factor", where) or 0.0


def _from_tensors(located: VaePath, where: str, weights: str, content: Any) -> VaeFile:
    file_config = None
    if located.config is not None:
        file_config = read_config(located.config, where)
    elif text := read_metadata(located, where).get(CONFIG_KEY):
        file_config = parse_config(text, where, CONFIG_KEY)
    config = file_config or {}
    if is_module(config):
        return _from_diffusers(located, config, where)
    tensors = read_weights(located, where, weights, content)
    if is_tiny(tensors.weights):
        _check_encoder_of_tiny(tensors.weights, where)
    z_channels = _latent_channels(tensors.weights)
    if tensors.kind == "wan":
        tensors.weights |= _latent_norm(*_of_channels(config, z_channels, where), z_channels)
    shape = config_from_shapes(tensors.weights, where)
    groups = config.get("norm_num_groups")
    if groups is not None:
        if type(groups) is not int or groups < 1:
            raise UserError(f"{where}: norm_num_groups {groups} in config.json is not a positive integer")
        shape["norm_groups"] = groups
    if PADDING_KEY in config:
        if config[PADDING_KEY] not in ("zeros", "reflect"):
            raise UserError(f"{where}: {PADDING_KEY} {config[PADDING_KEY]} is neither zeros nor reflect")
        shape["padding"] = config[PADDING_KEY]
    try:
        build(shape)
    except UserError as error:  # it names a flag, but the value is the file's
        raise UserError(f"{where} is of another architecture: {error}") from None
    scaling = latent_scaling(file_config, tensors, located.config is not None, where)
    size = config.get("sample_size")
    return VaeFile(
        kind=tensors.kind,
        shape=shape,
        weights=tensors.weights,
        dtype=tensors.dtype,
        constants=LatentConstants(*scaling, *_of_channels(config, shape["z_channels"], where)),
        sample_size=size if type(size) is int and size > 0 else None,
        force_upcast=config["force_upcast"] is True if "force_upcast" in config else None,
        start=tensors.metadata.get(START_KEY, ""),
        metadata=tensors.metadata,
    )


def _from_diffusers(located: VaePath, config: dict[str, Any], where: str) -> VaeFile:
    """The file of a network that diffusers computes."""
    try:
        shape, constants = model_values(config)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except Exception as error:  # diffusers checks few values: each raises another type
        reason = " ".join(str(error).split())[:_MAX_CHARS]
        raise UserError(f"{where}: diffusers cannot build its {config['_class_name']}: {reason}") from None
    tensors, metadata = read_tensors(located, where)
    scaling = _number(constants, "scaling_factor", where)
    floats = [value.dtype for value in tensors.values() if value.is_floating_point()]
    z_channels = shape["z_channels"]
    return VaeFile(
        kind="diffusers",
        shape=shape,
        weights={n: value.float() if value.is_floating_point() else value for n, value in tensors.items()},
        dtype=floats[0] if floats else torch.float32,
        constants=LatentConstants(scaling, 0.0, *_of_channels(constants, z_channels, where)),
        sample_size=None,
        start=metadata.get(START_KEY, ""),
        metadata=metadata,
    )


# ---- Whether tensors fit the architecture ----------------------------------------------------------------


def config_from_shapes(weights: dict[str, torch.Tensor], where: str) -> dict[str, Any]:
    """ModelConfig values that follow from tensor names and shapes; UserError for another architecture.

    The number of norm groups is missing, because it does not follow from any tensor. A decoder without an
    encoder gets one of the same widths.
    """
    if is_tiny(weights):
        return _shape_of_tiny(weights, where)
    channels, per_level = _levels(weights, "encoder.down_blocks", where)
    up_channels, up_blocks = _levels(weights, "decoder.up_blocks", where)
    up_channels.reverse()
    z_channels = _latent_channels(weights)
    if missing_part(weights) == "encoder":
        channels, per_level = up_channels, up_blocks - 1
    if not channels or not z_channels:
        some = ", ".join(sorted(weights)[:3])
        raise UserError(
            f"{where} does not have the parameter names of an AutoencoderKL (first names: {some})"
        )
    shape = {
        "channels": channels,
        "layers_per_block": per_level,
        "decoder": "tiny" if "decoder.layers.0.weight" in weights else None,
        "decoder_channels": None,
        "decoder_layers_per_block": None,
        "decoder_scale": _decoder_scale(weights),
        "z_channels": z_channels,
        "image_channels": _image_channels(weights),
        "family": "kl" if any(name.endswith(".norm1.bias") for name in weights) else "wan",
        "mid_attention": any(".mid_block.attentions." in name for name in weights),
        "use_quant_conv": any(name in weights for name in ("quant_conv.weight", "post_quant_conv.weight")),
        "latent_norm": "bn.running_mean" in weights,
    }
    if len(up_channels) == len(channels) and up_channels != channels:
        shape["decoder_channels"] = up_channels
    if len(up_channels) == len(channels) and up_blocks - 1 not in (per_level, 0):
        shape["decoder_layers_per_block"] = up_blocks - 1
    return shape


def is_tiny(names: Collection[str]) -> bool:
    """Whether these are the parameter names of an AutoencoderTiny, or of a part of one."""
    has_other_encoder = "encoder.conv_in.weight" in names
    return not has_other_encoder and any(f"{part}.layers.0.weight" in names for part in PARTS)


def _check_encoder_of_tiny(weights: dict[str, torch.Tensor], where: str) -> None:
    """UserError if an AutoencoderTiny has no encoder, or the zeros that are written with a decoder alone."""
    if not any(value.any() for name, value in weights.items() if name.startswith("encoder.")):
        raise UserError(
            f"{where} is an AutoencoderTiny (TAESD) without an encoder, which reads the latents of another "
            "VAE: give that VAE, and --decoder tiny to train one like it"
        )


def _shape_of_tiny(weights: dict[str, torch.Tensor], where: str) -> dict[str, Any]:
    """ModelConfig values of an AutoencoderTiny: its levels end with convolutions without bias."""
    part = "encoder" if "encoder.layers.0.weight" in weights else "decoder"
    layer = re.compile(rf"{part}\.layers\.({BLOCK})\.weight")
    own = sorted((int(match[1]), name) for name in weights if (match := layer.fullmatch(name)))
    levels = 1 + sum(name.replace("weight", "bias") not in weights for _, name in own)
    (_, first), (_, last) = own[0], own[-1]
    if weights[first].dim() != 4:
        raise UserError(f"{where} has another shape of {first}: it has no convolutions of images")
    family = "tiny"
    if any(".pool." in name for name in weights):
        family = "taef2"
    elif len(weights[first]) != TINY_WIDTH and (levels > 2 or part == "encoder"):
        family = "taesana"
        levels += 2 if part == "encoder" else 0  # that begins with two convolutions with bias
    z_channels = len(weights[last]) if part == "encoder" else weights[first].shape[1]
    return tiny_shape(z_channels, levels, family)


def _levels(weights: dict[str, torch.Tensor], part: str, where: str) -> tuple[list[int], int]:
    """The width of each level of encoder or decoder, and blocks per level; UserError if some are missing."""
    pattern = re.compile(rf"{part}\.({BLOCK})\.resnets\.({BLOCK})\.conv1\.weight")
    matches = {match: value for name, value in weights.items() if (match := pattern.fullmatch(name))}
    blocks = {(int(match[1]), int(match[2])): value for match, value in matches.items()}
    if not blocks:
        return [], 0
    levels, per_level = (1 + max(numbers) for numbers in zip(*blocks, strict=True))
    if levels * per_level != len(blocks):
        raise UserError(f"{where} lacks some of {part}: it is no whole VAE, or of another architecture")
    if any(value.dim() == 5 for value in blocks.values()):
        raise UserError(
            f"{where} is a video VAE: {part} has a time axis; without config.json, only Wan 2.1 and "
            "Qwen-Image are supported: give its folder"
        )
    if any(value.dim() != 4 or 0 in value.shape for value in blocks.values()):
        raise UserError(f"{where} has another shape of {part}: it has no convolutions of images")
    return [blocks[level, 0].shape[0] for level in range(levels)], per_level


def _latent_channels(weights: dict[str, torch.Tensor]) -> int:
    """The number of latent channels; 0 if neither encoder nor decoder shows it."""
    if (encoding := weights.get("encoder.conv_out.weight")) is not None and encoding.dim():
        return len(encoding) // 2
    decoding = weights.get("decoder.conv_in.weight")
    return decoding.shape[1] if decoding is not None and decoding.dim() == 4 else 0


def _decoder_scale(weights: dict[str, torch.Tensor]) -> int | None:
    """2 if the decoder returns four times as many channels as images have."""
    returned = weights.get("decoder.conv_out.weight")
    if returned is None or not returned.dim():
        return None
    return 2 if len(returned) == 4 * _image_channels(weights) else None


def _image_channels(weights: dict[str, torch.Tensor]) -> int:
    """The channels of images: 1 or 4 if encoder and decoder agree, at any scale of the decoder; or 3."""
    read, returned = (weights.get(name) for name in ("encoder.conv_in.weight", "decoder.conv_out.weight"))
    rows = {len(returned)} if returned is not None and returned.dim() else set()
    for channels in (4, 1):
        is_read = read is None or (read.dim() > 1 and read.shape[1] == channels)
        if is_read and (rows or read is not None) and rows <= {channels, 4 * channels}:
            return channels
    return 3


def missing_part(weights: Collection[str]) -> str:
    """The part of a VAE that a file has nothing of, "encoder" or "decoder"; "" if it has both or neither."""
    missing = [part for part in PARTS if not any(name.startswith(f"{part}.") for name in weights)]
    return missing[0] if len(missing) == 1 else ""


def check_fit(config: ModelConfig, weights: dict[str, torch.Tensor], where: str) -> None:
    """Raise UserError if the weights are not those of such a network; no network is allocated.

    A file without anything of an encoder or of a decoder fits.
    """
    with torch.device("meta"):
        model = build_autoencoder(config)
    absent = PARTS.get(missing_part(weights), ())
    expected, shapes = (
        {name: value.shape for name, value in tensors.items() if not name.startswith(absent)}
        for tensors in (model.state_dict(), _in_shapes_of(model, weights))
    )
    different = sorted(n for n in expected.keys() & shapes.keys() if expected[n] != shapes[n])
    problems = [
        f"{verb} {names[0][:_MAX_CHARS]}" + (f" and {len(names) - 1} more tensors" if names[1:] else "")
        for verb, names in (
            ("has the unknown", sorted(shapes.keys() - expected.keys())),
            ("lacks", sorted(expected.keys() - shapes.keys())),
            ("has another shape of", different),
        )
        if names
    ]
    if problems:
        raise UserError(f"{where} is of another architecture: it {', '.join(problems)}")


def load_weights(model: AutoencoderKL, weights: dict[str, torch.Tensor]) -> None:
    """Copy weights that passed check_fit into `model`; it keeps its own part if they have none."""
    model.load_state_dict(model.state_dict() | _in_shapes_of(model, weights))


def _in_shapes_of(model: AutoencoderKL, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights, with linear layers that are stored as 1x1 convolutions as matrices."""
    linear = {name for name, value in model.state_dict().items() if value.dim() == 2}
    return {
        name: value.flatten(1) if name in linear and value.shape[2:] == (1, 1) else value
        for name, value in weights.items()
    }
