"""What training functions share, by lifetime: the run and a stage. state.py has what training changes."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vae.config.options import Config
from vae.step import Networks
from vae.training.checkpoints.writer import CheckpointWriter
from vae.training.contract import Resume
from vae.training.datasets import TrainingSet
from vae.training.distributed import Distributed
from vae.training.memory.oom_retry import StepSettings
from vae.training.memory.stage_memory import StagePlan
from vae.training.output.logbook import Logbook
from vae.training.output.run_folder import resume_command
from vae.training.records.duration import StageDuration
from vae.training.records.running_metrics import RunningMetrics
from vae.training.recovery.signals import StopSignals
from vae.training.recovery.watchdog import Watchdog
from vae.training.schedule import TRAINED, peak_learning_rate
from vae.training.stages import Stage, StageSteps
from vae.training.validation.measure import Metrics, ValidationSet
from vae.training.validation.slices import Slices


@dataclass(frozen=True)
class RunContext:
    """What a run is: fixed from its preparation to its end."""

    config: Config
    given: dict[str, Any]  # options of the command
    dist: Distributed
    networks: Networks
    training_set: TrainingSet
    validation_set: ValidationSet | None
    sample_images: dict[int, torch.Tensor]  # of --sample_images by image size, on the CPU; empty: none
    num_workers: int
    compiled: bool
    begun_from: str  # RANDOM, WARM or TRAINED of schedule.py: the weights of the first stage
    resumed_from: Path | None
    contract: dict[str, Any]  # vae/training/contract.py: what decides the samples
    resume: Resume  # how it continues the run before it

    @property
    def output_dir(self) -> Path:
        return Path(self.config.run.output_dir)

    @property
    def resume_command(self) -> str:
        """The command that resumes this run."""
        return resume_command(self.output_dir)

    @property
    def fp16(self) -> bool:
        return self.networks.dtype == torch.float16

    def steps_of(self, stage: Stage) -> StageSteps:
        """How the epochs of `stage` divide into optimizer steps."""
        accumulation = self.config.run.accumulation_steps
        global_batch = stage.batch_size * accumulation * self.dist.world_size
        order = self.training_set.order_of(self.config, stage.image_size, global_batch)
        return StageSteps.of(stage, len(order), accumulation, self.dist.world_size)

    def start_of(self, stage: Stage) -> str:
        """What `stage` begins with: later stages go on with a trained VAE."""
        return TRAINED if stage.first_epoch > 0 else self.begun_from

    def peak_of(self, stage: Stage) -> float:
        """The peak learning rate of the autoencoder in `stage`: --learning_rate, or the rule."""
        given = self.config.optim.learning_rate
        return self.ruled_peak(stage) if given is None else given

    def ruled_peak(self, stage: Stage) -> float:
        """The peak learning rate by the rule for `stage`."""
        width = max(self.config.model.channels)
        return peak_learning_rate(width, self.start_of(stage), self.steps_of(stage).total)


@dataclass
class StageContext:
    """What a stage adds to the run."""

    stage: Stage  # replaced by a shorter one if --early_stopping ends it
    steps: StageSteps
    peak: float  # learning rate of the autoencoder
    plan: StagePlan
    settings: StepSettings  # changed if memory runs out
    logbook: Logbook
    writer: CheckpointWriter
    signals: StopSignals
    watchdog: Watchdog
    metrics: RunningMetrics = field(default_factory=RunningMetrics)
    duration: StageDuration = field(default_factory=StageDuration)
    baselines: dict[str, Metrics] = field(default_factory=dict)  # by name
    validation_batch: int | None = None  # if memory ran out with the micro-batch
    slices: Slices | None = None  # of the validation set, from the first validation on
    smoke_crops: list[torch.Tensor] | None = None  # uint8 (1, 3, S, S) on the CPU: this process's share

    def check_waiting(self) -> None:
        """End a wait for images with an exception, if the run hangs or a signal has asked to stop."""
        self.watchdog.check()
        self.signals.check_loading()
