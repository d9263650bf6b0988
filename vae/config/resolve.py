"""Combine flags, checkpoint, profile and card into one Config, and check it. Pure functions of plain data."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from vae.config.declare import OptionValues, check_scaling
from vae.config.model_options import TINY_FAMILIES, ModelConfig, tiny_channels
from vae.config.options import MIN_IMAGE_SIZE, MIN_VIEW, Config, DataConfig, LossConfig, build, names_where
from vae.config.precision import exclude_precisions
from vae.system.errors import UserError

PER_COMMAND = frozenset(names_where("inherited", False))
BATCHES = ("batch_size", "progressive")  # these contradict --global_batch_size
LENGTHS = ("num_epochs", "num_steps")  # of a stage
DEFAULT_EPOCHS = 100
_NO_SHAPE = ("init", "init_from", "scaling_factor", "shift_factor")
SHAPE = tuple(item.name for item in fields(ModelConfig) if item.name not in _NO_SHAPE)
DECODER_SHAPE = ("decoder", "decoder_channels", "decoder_layers_per_block", "decoder_scale")
_DISCRIMINATOR_SHAPE = ("disc_channels", "disc_layers")


def resolve(
    given: OptionValues,
    checkpoint: OptionValues | None = None,
    profile: OptionValues | None = None,
    card: OptionValues | None = None,
    vae: OptionValues | None = None,
    teacher: ModelConfig | None = None,
) -> Config:
    """Combine all sources into one Config. Each overrides those before: card, profile, checkpoint, given.

    `given` contains the flags and the JSON file. The shape in the file of --init_from (`vae`) comes last, and
    then the one for the latents of --teacher: given values can change a decoder and image channels, and
    otherwise only repeat it. Raises UserError if values contradict each other.
    """
    check_given(given)
    values = {**(card or {}), **(profile or {})}
    if checkpoint is not None:
        check_same_model(given, checkpoint)
        values = override(values, {k: v for k, v in checkpoint.items() if k not in PER_COMMAND})
    values = override(values, exclude_precisions(given))
    if checkpoint is not None:
        values["init_from"] = checkpoint["init_from"]  # a restart loop may give the flag again
    if vae is not None:
        values |= _shape_in_file(values, given, vae)
    if values.get("family") in TINY_FAMILIES:
        _check_tiny(values, given)
        values |= _OF_TINY
    if module := values.get("module"):
        if module != (vae or checkpoint or {}).get("module"):
            raise UserError("--module is set by --init_from: omit it")
        _check_module(values, given)
        values |= {} if ModelConfig(module=module).has_posterior else _NO_POSTERIOR
    if teacher is not None:
        flag = "--init_from" if vae is not None else "--resume_from" if checkpoint is not None else None
        values |= _shape_for_teacher(values, given, teacher, flag)
    if all(values.get(name) is None for name in LENGTHS):
        values["num_epochs"] = DEFAULT_EPOCHS
    if values.get("find_lr"):
        values["adversarial_weight"] = 0.0  # it does not fall, so it would hide the best rate
    config = build(values)
    if vae is not None:
        check_image_channels(config, vae.get("image_channels", 3))
    check_together(config)
    return config


def override(below: OptionValues, above: OptionValues) -> OptionValues:
    """The values of two sources; a length or a batch size also replaces one of another kind below."""
    names = {name for name, value in above.items() if value is not None}
    replaced = set(LENGTHS) if names.intersection(LENGTHS) else set()
    if names.intersection(BATCHES):
        replaced.add("global_batch_size")
    if "global_batch_size" in names:
        replaced.update(BATCHES)
    return {**{name: value for name, value in below.items() if name not in replaced}, **above}


def _shape_in_file(values: OptionValues, given: OptionValues, shape: OptionValues) -> OptionValues:
    """The shape in the file of --init_from, without what `values` change: the decoder, image channels."""
    changed = [name for name in DECODER_SHAPE if values.get(name) is not None]
    changed += ["image_channels"] if "image_channels" in given else []
    check_shape({name: given[name] for name in given if name not in changed}, shape, "--init_from")
    return {name: value for name, value in {"image_channels": 3, **shape}.items() if name not in changed}


def _shape_for_teacher(
    values: OptionValues, given: OptionValues, teacher: ModelConfig, flag: str | None
) -> OptionValues:
    """The shape of an AutoencoderTiny for the latents of its teacher.

    UserError if the file of `flag`, which the values have their shape from, has another one.
    """
    levels = len(teacher.channels)
    shape = tiny_shape(teacher.z_channels, levels, values.get("family", "kl"))
    check_shape(given, {name: shape[name] for name in ("channels", "z_channels")}, "--teacher")
    if flag and any(_typed(values[name]) != _typed(value) for name, value in shape.items()):
        raise UserError(
            f"--teacher {values['teacher']} has {teacher.z_channels} latent channels and {levels} levels, "
            f"but the file of {flag} has {values['z_channels']} and {len(values['channels'])}: give its VAE"
        )
    return shape


def check_given(given: OptionValues) -> None:
    """Raise UserError if two given options contradict each other, whatever the others are."""
    for name in BATCHES:
        if given.get("global_batch_size") is not None and given.get(name) is not None:
            raise UserError(
                f"--global_batch_size {given['global_batch_size']} and --{name} {given[name]} both set the "
                "size of a batch: remove one of them"
            )
    if all(given.get(name) is not None for name in LENGTHS):
        raise UserError(
            f"--num_epochs {given['num_epochs']} and --num_steps {given['num_steps']} both set the length of "
            "the stage: remove one of them"
        )


def with_local_batch(config: Config, processes: int) -> Config:
    """Set the --batch_size that gives --global_batch_size, if any; UserError if it does not divide."""
    whole, accumulation = config.run.global_batch_size, config.run.accumulation_steps
    if whole is None:
        return config
    local, rest = divmod(whole, processes * accumulation)
    if rest or not local:
        below = local * processes * accumulation
        sizes = " or ".join(str(size) for size in (below, below + processes * accumulation) if size)
        raise UserError(
            f"--global_batch_size {whole} cannot be divided among {processes} processes with "
            f"--accumulation_steps {accumulation}: use {sizes}, or another number of either"
        )
    return replace(config, run=replace(config.run, batch_size=local))


def check_encoder(config: Config, given: OptionValues) -> None:
    """Raise UserError if a new run is to train the decoder of no VAE, or a family without initial weights."""
    family = config.model.family
    if config.model.is_tiny and not (config.model.init_from or config.loss.teacher):
        raise UserError(f"--family {family} learns the latents of another VAE: give it with --teacher")
    if family in ("wan", "diffusers") and not config.model.init_from:
        raise UserError(f"--family {family} needs trained weights: give a VAE with --init_from")
    if config.optim.train_part == "decoder" and not config.model.init_from:
        flag = "--train_part" if "train_part" in given else f"--profile {given['profile']}: --train_part"
        raise UserError(f"{flag} decoder needs a trained encoder: give its VAE with --init_from")


_NO_POSTERIOR = {"kl_weight": 0.0, "variance_weight": 0.0}
# An AutoencoderTiny has no KL term, and its latents need no scaling.
_OF_TINY = {"init": "default", "scaling_factor": 1.0, "shift_factor": 0.0, **_NO_POSTERIOR}


def _check_tiny(values: OptionValues, given: OptionValues) -> None:
    """Raise UserError for options that have no effect on an AutoencoderTiny."""
    if values.get("teacher") and values.get("train_part") == "decoder":
        raise UserError("--teacher has no effect with --train_part decoder: remove one of them")
    _check_no_posterior(given, "an AutoencoderTiny")
    names = ("scaling_factor", "shift_factor", *DECODER_SHAPE, "image_channels")
    _check_own(given, names, "an AutoencoderTiny")


def _check_module(values: OptionValues, given: OptionValues) -> None:
    """Raise UserError for options that have no effect on a network of diffusers."""
    network = f"the {ModelConfig(module=values['module']).class_name} of diffusers"
    if not ModelConfig(module=values["module"]).has_posterior:
        _check_no_posterior(given, network)
    _check_own(values, (*DECODER_SHAPE, "image_channels", "padding"), network)  # a profile may set them
    for name, value in (("init", "warm"), ("kernels", "triton")):
        if given.get(name) == value:
            raise UserError(f"--{name} {value} has no effect on {network}: omit it")


def _check_no_posterior(given: OptionValues, network: str) -> None:
    for name in _NO_POSTERIOR:
        if given.get(name):
            raise UserError(f"--{name} {given[name]:g}: the encoder of {network} has no variance: omit it")


def _check_own(values: OptionValues, names: Sequence[str], network: str) -> None:
    for name in names:
        if values.get(name) not in (None, getattr(ModelConfig(), name)):
            raise UserError(f"--{name} {_typed(values[name])}: {network} has its own: omit it")


def tiny_shape(z_channels: int, levels: int, family: str = "tiny") -> OptionValues:
    """ModelConfig values of an AutoencoderTiny, by name."""
    return {
        "family": family,
        "channels": tiny_channels(family, levels)[0],
        "z_channels": z_channels,
        "mid_attention": False,
        "use_quant_conv": False,
        "latent_norm": False,
    }


def check_image_channels(config: Config, in_file: int) -> None:
    """Raise UserError if the VAE of --init_from, with `in_file` channels, cannot get --image_channels."""
    model = config.model
    flag = f"--image_channels {model.image_channels}"
    if model.image_channels == in_file:
        return
    if in_file != 3:
        raise UserError(f"{flag} contradicts the file of --init_from, which has {in_file}: remove it")
    if config.optim.train_part == "decoder":
        raise UserError(f"{flag} changes the encoder, which --train_part decoder keeps: remove one of them")


def check_same_model(given: OptionValues, checkpoint: OptionValues) -> None:
    """Raise UserError if a given value contradicts the architecture of the checkpoint's networks."""
    if given.get("init_from") and given.get("resume_from") != "latest":  # a restart loop begins with it
        raise UserError("--init_from and --resume_from exclude each other: give only one of them")
    discriminator = _DISCRIMINATOR_SHAPE if checkpoint["adversarial_weight"] > 0 else ()
    shape = {name: checkpoint[name] for name in (*SHAPE, *discriminator)}
    check_shape(given, shape, "--resume_from")
    for name in ("train_part", "optimizer"):  # the optimizer's state would not fit
        saved = checkpoint[name]
        if given.get(name, saved) != saved:
            raise UserError(
                f"--{name} {given[name]} contradicts the checkpoint of --resume_from, which was trained with "
                f"{saved}: start a new run from that checkpoint with --init_from"
            )


def check_shape(given: OptionValues, shape: OptionValues, flag: str) -> None:
    """Raise UserError if a given value contradicts the `shape` of the file of `flag`."""
    for name, value in shape.items():
        if name in given and _typed(given[name]) != _typed(value):
            raise UserError(
                f"--{name} {_typed(given[name])} contradicts the file of {flag}, which has "
                f"{_typed(value)}: remove --{name}, or train a new network without {flag}"
            )


def _typed(value: Any) -> str:
    """A value as a user types it after its flag; a list and a tuple give the same text."""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def check_together(config: Config) -> None:
    """Raise UserError if options that are valid on their own contradict each other."""
    model = config.model
    if model.decoder and config.optim.train_part != "decoder":
        raise UserError(
            f"--decoder {model.decoder} learns the latents of another VAE, which must not change: "
            "add --train_part decoder, or use --profile decoder"
        )
    if config.loss.teacher and not model.is_tiny:
        raise UserError(
            f"--teacher {config.loss.teacher}: only an AutoencoderTiny learns the latents of another VAE: "
            "add --family tiny, or give one with --init_from"
        )
    background = config.data.background
    if model.image_channels == 4 and background != DataConfig().background:
        raise UserError(f"--background {background} has no effect with --image_channels 4: remove it")
    check_image_size(config.data.image_size, model)
    check_scaling(model.scaling_factor, model.shift_factor)
    check_augmentations(config.data)
    loss: LossConfig = config.loss
    weights = [item.name for item in fields(loss) if item.metadata.get("term") == "image"]
    if not any(getattr(loss, name) for name in weights):
        listed = " and ".join(f"--{name} 0" for name in weights)
        raise UserError(f"{listed} leave nothing to train: raise one of them")
    if loss.mse_weight and loss.reconstruction_loss == "mse":
        raise UserError(
            f"--mse_weight {loss.mse_weight:g} repeats --reconstruction_loss mse: remove one of them"
        )
    if loss.disc_start >= 1 and loss.disc_start != int(loss.disc_start):
        raise UserError(
            f"--disc_start {loss.disc_start:g} is neither a share below 1 nor a whole number of steps: use "
            f"{int(loss.disc_start)}"
        )
    if loss.perceptual_net == "random" and loss.perceptual_weights:
        raise UserError("--perceptual_weights has no effect with --perceptual_net random: remove one")
    if config.optim.train_part == "decoder" and loss.variance_weight:
        raise UserError(
            f"--variance_weight {loss.variance_weight:g} has no effect with --train_part decoder: remove it"
        )


def check_augmentations(data: DataConfig) -> None:
    """Raise UserError if the ranges of augmentations are none, have no effect or contradict --buckets."""
    for flag, is_given in (("--crop resized", data.crop == "resized"), ("--rotate90", data.rotate90)):
        if data.buckets and is_given:
            raise UserError(f"{flag} changes the shapes of --buckets {data.buckets}: remove one of them")
    for name in ("crop_scale", "crop_ratio"):
        limits = getattr(data, name)
        if len(limits) != 2 or limits[0] > limits[1]:
            raise UserError(
                f"--{name} {_typed(limits)} is no range: give the smallest and the largest value, "
                f"for example {_typed(getattr(DataConfig(), name))}"
            )
        if data.crop != "resized" and limits != getattr(DataConfig(), name):
            raise UserError(
                f"--{name} needs --crop resized (now --crop {data.crop}): remove it or change that"
            )
    if len(data.color_jitter) != 4:
        raise UserError(
            f"--color_jitter {_typed(data.color_jitter)} needs four numbers, for brightness, contrast, "
            "saturation and hue: for example 0.2 0.2 0.2 0.02"
        )
    if data.color_jitter[3] > 0.5:
        raise UserError(f"--color_jitter: the hue {data.color_jitter[3]} is too large: the maximum is 0.5")


LEAST_SIDES = {"alex": 31, "squeeze": 17}  # px that --perceptual_net needs, if more than MIN_VIEW


def check_views(image_size: int, model: ModelConfig, loss: LossConfig) -> None:
    """Raise UserError if the crop or the latent is too small for a term."""
    if loss.equivariance_weight and image_size < 2 * MIN_VIEW:
        raise UserError(
            f"--equivariance_weight needs {2 * MIN_VIEW} px, not {image_size}: raise --image_size or remove "
            "--equivariance_weight"
        )
    positions = image_size // model.downsampling
    if loss.equivariance_weight and positions < 2:
        raise UserError(
            f"--equivariance_weight halves latents and needs at least 2 x 2 positions, not {positions} of a "
            f"crop of {image_size} px: raise --image_size or remove it"
        )
    least_side = LEAST_SIDES.get(loss.perceptual_net, MIN_VIEW) if loss.perceptual_weight else 0
    scale = 4 if image_size >= 4 * MIN_VIEW else 2  # of the smallest image that is decoded
    if loss.equivariance_weight and image_size // scale < least_side:
        raise UserError(
            f"--equivariance_weight decodes images of {image_size // scale} px, and --perceptual_net "
            f"{loss.perceptual_net} needs {least_side}: raise --image_size to {4 * least_side}, or choose vgg"
        )


def check_discriminator(image_size: int, loss: LossConfig) -> None:
    """Raise UserError if the crop is too small for the discriminator, or a width does not fit its norms."""
    if loss.adversarial_weight == 0:
        return
    # Each strided layer halves the side; two more layers shrink it by 1 px each.
    least = 3 * 2**loss.disc_layers
    if image_size < least:
        raise UserError(
            f"--disc_layers {loss.disc_layers} needs {least} px, not {image_size}: lower --disc_layers or "
            "raise --image_size"
        )
    widths = [loss.disc_channels * min(2**layer, 8) for layer in range(1, loss.disc_layers + 1)]
    if any(width % min(32, width) for width in widths):
        raise UserError(
            f"--disc_channels {loss.disc_channels} gives layer widths of {_typed(widths)}, and a norm of 32 "
            "groups needs multiples of 32: use a multiple of 16"
        )


def check_image_size(image_size: int, model: ModelConfig) -> None:
    """Raise UserError if the crop side is too small or not a multiple of the downsampling factor."""
    step = model.downsampling
    smallest = -(-MIN_IMAGE_SIZE // step) * step
    if image_size < smallest:
        steps = f", in steps of {step}" if step > 1 else ""
        raise UserError(f"--image_size {image_size} is too small: the minimum is {smallest}{steps}")
    if image_size % step:
        below = image_size // step * step
        raise UserError(
            f"--image_size {image_size} is not a multiple of {step}: try {below} or {below + step}"
        )


@dataclass(frozen=True)
class StageRequest:
    """One stage of --progressive: image size in px, epochs or optimizer steps, and batch size per device."""

    image_size: int
    num_epochs: int | None
    num_steps: int | None
    batch_size: int


def parse_progressive(text: str, model: ModelConfig | None = None) -> list[StageRequest]:
    """The stages of a --progressive list such as 512:25:32,1024:2000steps:16.

    Raises UserError if it is malformed, or if an image size does not fit the model.
    """
    stages = []
    for part in text.split(","):
        number = "0*([1-9][0-9]{0,8})"
        match = re.fullmatch(f"{number}:{number}( ?steps)?:{number}", part.strip())
        if match is None:
            raise UserError(
                f"--progressive {text}: {part!r} is not SIZE:EPOCHS:BATCH or SIZE:STEPSsteps:BATCH; for "
                "example 512:25:32,1024:50:16 or 512:2000steps:32"
            )
        size, length, batch = (int(match[group]) for group in (1, 2, 4))
        in_steps = match[3] is not None
        stages.append(StageRequest(size, None if in_steps else length, length if in_steps else None, batch))
        if model is not None:
            check_image_size(stages[-1].image_size, model)
    return stages
