"""What a checkpoint contains, as dataclasses. The check of a file follows from their types.

In the file each dataclass is a dict with exactly the keys of its fields, and a tuple may be a list.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from vae.update import UpdateState

MAX_COUNT = 2**53
MAX_SHOWN = 40  # characters of a value in a message

RANDOM, WARM, TRAINED = "random weights", "warm start", "trained VAE"  # what a stage begins with


@dataclass(frozen=True)
class Stage:
    """Epochs [first_epoch, end_epoch) at one image size (px) and batch size (images per device)."""

    first_epoch: int
    num_epochs: int = field(metadata={"at_least": 1})
    image_size: int = field(metadata={"at_least": 1})
    batch_size: int = field(metadata={"at_least": 1})

    @property
    def end_epoch(self) -> int:
        return self.first_epoch + self.num_epochs


@dataclass
class Position:
    """The progress of a run. Images are counted as dataset indices over all processes, used or rejected."""

    epoch: int = 0
    images_in_epoch: int = 0
    step: int = 0  # optimizer steps of the autoencoder, over the whole run
    images: int = 0  # over the whole run


@dataclass
class Validations:
    """What the validations of a run have found so far."""

    best: dict[str, float] = field(default_factory=dict)  # metrics of the best validation, with its epoch
    best_is_start: bool = False  # of a stage: before its first step
    best_checkpoint: str | None = None  # file name of the saved epoch, or of the start, with the best PSNR
    best_checkpoint_psnr: float | None = None
    without_gain: int = 0  # validations since the best one, for --early_stopping
    start_psnr: float | None = None  # dB before the stage's first step
    last_psnr: float | None = None  # dB of the stage's last validation
    decrease_reported: bool = False  # in this stage
    quick_best: dict[str, float] = field(default_factory=dict)  # of the quick validations
    quick_has_fallen: bool = False  # the last quick validation


@dataclass(frozen=True)
class Lineage:
    """A run and its ancestors.

    Every command that trains is a run of its own, and so is what follows a rollback. Its parent is the run
    that it continues, with the step at which it does. Checkpoints that are neither its own nor those of an
    ancestor up to this step belong to abandoned branches.
    """

    id: str
    ancestors: tuple[tuple[str, int], ...] = ()  # id and the step at which it was left, oldest first
    start: str = ""  # hash of the weights before the first step of the line; "": not known

    @classmethod
    def new(cls, ancestors: tuple[tuple[str, int], ...] = ()) -> "Lineage":
        """A run with a random id."""
        return cls(secrets.token_hex(8), ancestors)

    def continued(self, step: int) -> "Lineage":
        """A new run that continues this one after `step`."""
        return replace(Lineage.new((*self.ancestors, (self.id, step))), start=self.start)

    def is_of(self, run_id: str) -> bool:
        """Whether this run, or one of its ancestors, has this id."""
        return run_id in (self.id, *(one for one, _ in self.ancestors))

    def contains(self, run_id: str, step: int) -> bool:
        """Whether a checkpoint of this run and step is on the line."""
        return run_id == self.id or any(run_id == one and step <= left for one, left in self.ancestors)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Lineage":
        """The inverse of `asdict`, also from JSON; ContentError for anything else."""
        check_type("run", dict(plain), cls)
        return cls(plain["id"], tuple((one, left) for one, left in plain["ancestors"]), plain["start"])


@dataclass(frozen=True)
class Topology:
    """How a step is divided."""

    processes: int
    batch_size: int
    accumulation_steps: int
    streams: int | None  # of shards
    shuffle_shards: int | None


@dataclass(frozen=True)
class Samples:
    """What decides the samples of a run. config.json contains it, too."""

    training: dict[str, Any]  # version and number of images, and for shards the rules of their acceptance
    validation: dict[str, Any] | None
    transform: dict[str, Any]  # from an image to a crop
    seed: dict[str, Any]
    topology: Topology
    code: dict[str, Any]  # version and revision
    continues: dict[str, Any] | None  # run, step and checkpoint


Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class CheckpointContent:
    """All of it. `optimizers` are state dicts, the autoencoder's first."""

    model: Weights
    ema: Weights | None
    discriminator: Weights | None
    optimizers: list[dict[str, Any]]
    update: UpdateState
    fp16: bool
    running_sq_norms: torch.Tensor
    running_moments: torch.Tensor
    overflows_fp16: bool
    activation_scale: float
    latent_scaling: tuple[float, float] | None
    latent_channels: dict[str, list[float]] | None  # latents_mean and latents_std
    run: Lineage
    rollbacks: dict[int, list[float]]
    position: Position
    history: Validations
    config: dict[str, Any]
    stages: list[Stage]
    contract: Samples
    begun_from: Literal["random weights", "warm start", "trained VAE"]
    torch_version: str


# ---- the check -------------------------------------------------------------------------------------------


class ContentError(ValueError):
    """The content is not what train_vae.py saves; the message names the part."""


def check_type(what: str, value: Any, kind: Any, at_least: int = 0) -> None:
    """Raise ContentError if the plain form of `kind`, a dataclass or a type of its fields, is not `value`.

    Whole numbers are at least `at_least`. Floats may be NaN, because metrics may.
    """
    parts = get_args(kind)
    if get_origin(kind) is UnionType:
        if value is None and NoneType in parts:
            return
        (kind,) = (part for part in parts if part is not NoneType)
        parts = get_args(kind)
    origin = get_origin(kind) or kind
    is_right = True
    if is_dataclass(kind):
        _check_fields(what, value, kind)
    elif origin is Literal:
        is_right = isinstance(value, str) and value in parts
    elif origin in (list, tuple):
        is_right = isinstance(value, list | tuple)
        kinds = parts if origin is tuple and ... not in parts else parts[:1] * len(value) if is_right else ()
        if is_right and len(kinds) != len(value):
            is_right = False
        for index, (part, wanted) in enumerate(zip(value, kinds, strict=True) if is_right else ()):
            check_type(f"{what}[{index}]", part, wanted)
    elif origin is dict:
        is_right = isinstance(value, dict)
        for name, part in value.items() if is_right else ():
            check_type(f"a key of {what}", name, parts[0])
            check_type(f"{what}.{shown(name)}", part, parts[1])
    elif origin is int:
        is_right = type(value) is int and at_least <= value <= MAX_COUNT
    elif origin is float:
        is_right = type(value) is float or (type(value) is int and abs(value) <= MAX_COUNT)
    elif origin is not Any:
        is_right = type(value) is origin
    if not is_right:
        raise ContentError(f"{what} is {shown(value)}")


def _check_fields(what: str, value: Any, kind: Any) -> None:
    if not isinstance(value, dict):
        raise ContentError(f"{what} is {shown(value)}")
    names = [item.name for item in fields(kind)]
    for name in value:
        if name not in names:
            raise ContentError(f"{what} has the unknown {shown(name)}")
    check_keys(what, value, kind)


def check_keys(what: str, values: Mapping[str, Any], kind: Any) -> None:
    """Raise ContentError if a field of the dataclass `kind` is missing in `values` or has another type."""
    hints = get_type_hints(kind)
    for item in fields(kind):
        if item.name not in values:
            raise ContentError(f"{what} lacks {item.name}")
        at_least = item.metadata.get("at_least", 0)
        check_type(f"{what}.{item.name}".removeprefix("it."), values[item.name], hints[item.name], at_least)


def shown(value: Any) -> str:
    """A value on one line, or the kind of a large one."""
    if isinstance(value, dict | list | tuple | torch.Tensor):
        return f"a {type(value).__name__}"
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**MAX_SHOWN else "a huge number"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
