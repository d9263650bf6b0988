"""From given values, checkpoint, profile and card to one Config; pure functions of plain data."""

from dataclasses import dataclass, fields
from typing import Any

from vae.config.errors import UserError
from vae.config.options import LEAST_IMAGE_SIZE, Config, LossConfig, ModelConfig, SpeedConfig, build

# What one command says of itself; the next command does not inherit it from a checkpoint.
PER_COMMAND = frozenset(
    [
        *("config", "profile", "output_dir", "resume_from", "new_stage", "progressive", "max_steps"),
        *("profile_steps", "device", "num_workers", "micro_batch_size", "recompute", "vram_margin"),
        "init_from",
    ]
)
SHAPE = tuple(item.name for item in fields(ModelConfig) if item.name not in ("init", "init_from"))
_DISCRIMINATOR_SHAPE = ("disc_channels", "disc_layers")


def resolve(
    given: dict[str, Any],
    checkpoint: dict[str, Any] | None = None,
    profile: dict[str, Any] | None = None,
    card: dict[str, Any] | None = None,
) -> Config:
    """One Config: given flags and JSON beat the checkpoint, which beats the profile, the card, the default.

    Raises UserError where values contradict each other or the checkpoint.
    """
    inherited = {k: v for k, v in (checkpoint or {}).items() if k not in PER_COMMAND}
    if checkpoint is not None:
        check_same_model(given, checkpoint)
    config = build({**(card or {}), **(profile or {}), **inherited, **given})
    if config.optim.train_part == "decoder" and checkpoint is None and not config.model.init_from:
        raise UserError(
            "--train_part decoder keeps an encoder that there is not yet: name its VAE by --init_from"
        )
    check_together(config)
    return config


def check_same_model(given: dict[str, Any], checkpoint: dict[str, Any]) -> None:
    """Raise UserError where a given value contradicts the shape of the checkpoint's networks."""
    if given.get("init_from"):
        raise UserError("--init_from and --resume_from are two starts: give one of them")
    discriminator = _DISCRIMINATOR_SHAPE if checkpoint["adversarial_weight"] > 0 else ()
    shape = {name: checkpoint[name] for name in (*SHAPE, *discriminator) if name in checkpoint}
    check_shape(given, shape, "the checkpoint of --resume_from")
    part = checkpoint.get("train_part", "all")
    if given.get("train_part", part) != part:
        raise UserError(
            f"--train_part {given['train_part']} contradicts the checkpoint of --resume_from, which trains "
            f"{part}: begin a new run from it by --init_from"
        )


def check_shape(given: dict[str, Any], shape: dict[str, Any], source: str) -> None:
    """Raise UserError where a given value contradicts the `shape` that `source` has."""
    for name, value in shape.items():
        if name in given and list_or_value(given[name]) != list_or_value(value):
            raise UserError(
                f"--{name} {shown(given[name])} contradicts {source}, which has {shown(value)}: "
                "leave the flag out, or start without that file"
            )


def list_or_value(value: Any) -> Any:
    """Tuples and lists compare alike."""
    return list(value) if isinstance(value, tuple) else value


def shown(value: Any) -> str:
    """A value as it is typed after its flag."""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def check_together(config: Config) -> None:
    """Raise UserError where options that are each fine do not fit together."""
    check_image_size(config.data.image_size, config.model)
    loss: LossConfig = config.loss
    if loss.reconstruction_weight == 0 and loss.perceptual_weight == 0:
        raise UserError(
            "--reconstruction_weight 0 and --perceptual_weight 0 leave nothing to learn: raise one of them"
        )
    if loss.perceptual_net == "random" and loss.perceptual_weights:
        raise UserError("--perceptual_weights names a file, but --perceptual_net random uses none: drop one")


def precision(speed: SpeedConfig, has_bf16: bool, device_name: str) -> str:
    """PyTorch's name of the dtype the networks compute in; UserError where --use_bf16 cannot be had."""
    if speed.use_bf16 and not has_bf16:
        raise UserError(
            f"--use_bf16: {device_name} has no bf16: use --mixed_precision alone, which takes fp16 there"
        )
    if speed.use_bf16 or (speed.mixed_precision and has_bf16):
        return "bfloat16"
    return "float16" if speed.mixed_precision else "float32"


def check_discriminator(image_size: int, loss: LossConfig) -> None:
    """Raise UserError where the discriminator's layers fit neither the crop nor its norms of 32 groups."""
    if loss.adversarial_weight == 0:
        return
    least = 3 * 2**loss.disc_layers  # each strided layer halves the side, two more take a pixel each
    if image_size < least:
        raise UserError(
            f"--disc_layers {loss.disc_layers} needs crops of at least {least} px, not {image_size}: "
            "lower --disc_layers or raise --image_size"
        )
    widths = [loss.disc_channels * min(2**layer, 8) for layer in range(1, loss.disc_layers + 1)]
    if any(width % min(32, width) for width in widths):
        raise UserError(
            f"--disc_channels {loss.disc_channels} gives widths of {shown(widths)}, which 32 groups do not "
            "divide: take a multiple of 16"
        )


def check_image_size(image_size: int, model: ModelConfig) -> None:
    """Raise UserError where the crop's side is too small or does not divide into latent pixels."""
    if image_size < LEAST_IMAGE_SIZE:
        raise UserError(f"--image_size {image_size} is too small: the least is {LEAST_IMAGE_SIZE}")
    step = 2 ** (len(model.channels) - 1)
    if image_size % step:
        around = (image_size // step * step, image_size // step * step + step)
        remedy = " or ".join(str(side) for side in around if side >= LEAST_IMAGE_SIZE)
        raise UserError(f"--image_size {image_size} is not a multiple of {step}: try {remedy}")


@dataclass(frozen=True)
class StageRequest:
    """One stage as --progressive writes it: image size in px, epochs, batch per device."""

    image_size: int
    num_epochs: int
    batch_size: int


def parse_progressive(text: str, model: ModelConfig) -> list[StageRequest]:
    """Stages of a --progressive list such as 512:25:32,1024:50:16."""
    stages = []
    for part in text.split(","):
        numbers = part.strip().split(":")
        if len(numbers) != 3 or not all(n.isdecimal() and int(n) > 0 for n in numbers):
            raise UserError(
                f"--progressive {text}: {part!r} is not SIZE:EPOCHS:BATCH; an example is 512:25:32,1024:50:16"
            )
        stage = StageRequest(*map(int, numbers))
        check_image_size(stage.image_size, model)
        stages.append(stage)
    return stages
