"""What a checkpoint contains, as dataclasses: in the file each is a dict with the keys of its fields."""

import secrets
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from vae.update import UpdateState

RANDOM, WARM, TRAINED = "random weights", "warm start", "trained VAE"  # what a stage begins with


@dataclass(frozen=True)
class Stage:
    """Epochs [first_epoch, end_epoch) at one image size (px) and batch size (images per device)."""

    first_epoch: int
    num_epochs: int
    image_size: int
    batch_size: int

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
class Identity:
    """A run: all commands that train in one folder. Nothing is computed with its parent."""

    id: str  # of the folder
    parent: str = ""  # id of the run that it began from, in another folder
    restarts: int = 0  # commands that have continued it
    start: str = ""  # hash of the weights before its first step, or its parent's; "": not known

    @classmethod
    def new(cls, parent: str = "", restarts: int = 0, start: str = "") -> "Identity":
        """A run with a random id."""
        return cls(secrets.token_hex(8), parent, restarts, start)

    def continued(self) -> "Identity":
        """The same run after another restart."""
        return replace(self, restarts=self.restarts + 1)


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
    run: Identity
    position: Position
    history: Validations
    config: dict[str, Any]
    stages: list[Stage]
    contract: Samples
    begun_from: Literal["random weights", "warm start", "trained VAE"]
    torch_version: str
