"""A prepared run, and the parts of a stage that are built from it. Only set-up and run.py see all of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from vae.config.options import Config
from vae.data.loading import TrainLoader
from vae.model.activation_scale import scale_activations
from vae.step import Networks
from vae.training.command import Command
from vae.training.data_parallel import GradientWaits
from vae.training.datasets import TrainingSet
from vae.training.distributed import Distributed
from vae.training.loop import TrainingLoop
from vae.training.memory.oom_retry import OomRetry, StepSettings
from vae.training.memory.stage_memory import StagePlan, plan_stage
from vae.training.output.logbook import Logbook
from vae.training.provenance import Provenance
from vae.training.records.profiling import StepProfiler
from vae.training.records.recorder import Recorder
from vae.training.recovery.watchdog import Liveness
from vae.training.run_folder import resume_command
from vae.training.saver import Saver
from vae.training.schedule import StageSchedule
from vae.training.stages import Stage, StageSteps
from vae.training.state import TrainingState
from vae.training.stepper import Stepper
from vae.training.validation.measure import ValidationSet
from vae.training.validation.sample_grid import SampleGrids
from vae.training.validation.validator import Validator


@dataclass(frozen=True)
class PreparedRun:
    """What set-up has checked and built, before anything is written."""

    config: Config
    command: Command
    dist: Distributed
    networks: Networks
    gradient_waits: GradientWaits
    state: TrainingState
    training_set: TrainingSet
    validation_set: ValidationSet | None
    sample_images: dict[int, torch.Tensor]  # of --sample_images by image size, on the CPU; empty: none
    num_workers: int
    compiled: bool
    provenance: Provenance

    @property
    def output_dir(self) -> Path:
        """The folder of the run."""
        return Path(self.config.run.output_dir)

    @property
    def resume_command(self) -> str:
        """The command that resumes this run."""
        return resume_command(self.output_dir)

    def steps(self, stage: Stage) -> StageSteps:
        """How the epochs of `stage` divide into optimizer steps."""
        accumulation = self.config.run.accumulation_steps
        local_batch = stage.batch_size * accumulation
        order = self.training_set.order_of(self.config, stage.image_size, local_batch, self.dist.world_size)
        return StageSteps.of(stage, len(order), accumulation, self.dist.world_size)

    def schedule(self, stage: Stage) -> StageSchedule:
        """The steps and learning rates of `stage`."""
        width = self.config.model.widest
        options = (self.config.optim, self.config.loss)
        return StageSchedule(self.steps(stage), self.provenance.begun_from, width, *options)

    def plan(self, stage: Stage) -> StagePlan:
        """How the steps of `stage` run; UserError if not even one image fits."""
        return plan_stage(self.config, stage, self.networks.dtype, self.dist, self.state.activation_scale)

    def scale_activations(self, scale: float) -> None:
        """Let all networks of the step compute with this scale (vae/model/activation_scale.py)."""
        self.state.activation_scale = scale
        for network in filter(None, (self.state.autoencoder, self.state.ema)):
            scale_activations(network, scale)

    def crops(self, count: int) -> Iterator[torch.Tensor]:
        """About `count` training crops uint8 (1, 3, H, W) on the device (TrainingSet.sample)."""
        dataset = self.training_set.crops(self.config, self.state.stage.image_size)
        first_epoch = 0
        position, dist = self.state.position, self.dist
        for index in self.training_set.sample(count, position, dist.rank, dist.world_size):
            crop = dataset[first_epoch, index].image
            if crop is not None:
                yield crop[None].to(self.dist.device)

    def retry(self, plan: StagePlan | None = None) -> OomRetry:
        """What computes the steps of a stage; without a plan, no step is computed."""
        settings = plan.step_settings(self.config.speed) if plan else StepSettings(1, "none", False)
        size = self.state.stage.image_size
        return OomRetry(self.networks, self.dist, settings, self.output_dir, size)

    def stepper(self, schedule: StageSchedule, retry: OomRetry) -> Stepper:
        """What makes the optimizer steps of a stage."""
        return Stepper(self.state, retry, schedule, self.dist, self.config.run.seed)

    def loader(self, schedule: StageSchedule, alive: Liveness) -> TrainLoader:
        """The training batches of the stage that trains."""
        steps, size = schedule.steps, self.state.stage.image_size
        return TrainLoader(
            self.training_set.crops(self.config, size),
            local_batch=steps.local_images,
            order=self.training_set.order_of(self.config, size, steps.local_images, self.dist.world_size),
            rank=self.dist.rank,
            world_size=self.dist.world_size,
            num_workers=self.num_workers,
            pin_memory=self.dist.device.type == "cuda",
            while_waiting=alive.check,
        )

    def samples(self, retry: OomRetry, logbook: Logbook, alive: Liveness) -> SampleGrids:
        """What writes the sample grids."""
        return SampleGrids(
            state=self.state,
            networks=self.networks,
            dist=self.dist,
            retry=retry,
            logbook=logbook,
            alive=alive,
            sample_images=self.sample_images,
            validation_set=self.validation_set,
        )

    def loop(
        self, plan: StagePlan, schedule: StageSchedule, saver: Saver, logbook: Logbook, alive: Liveness
    ) -> TrainingLoop:
        """The loop of the stage that trains."""
        config = self.config
        state = self.state
        retry = self.retry(plan)
        stepper = self.stepper(schedule, retry)
        validator = None
        if self.validation_set is not None:
            validator = Validator(
                images=self.validation_set,
                state=state,
                networks=self.networks,
                dist=self.dist,
                retry=retry,
                schedule=schedule,
                logbook=logbook,
                alive=alive,
                options=config.run,
            )
        recorder = Recorder(
            state=state,
            schedule=schedule,
            terms=self.networks.terms,
            retry=retry,
            dist=self.dist,
            logbook=logbook,
            options=config.run,
            gradient_waits=self.gradient_waits,
            planned_bytes=min(plan.memory.total, plan.available),
        )
        folder = self.output_dir / "profile" / f"{state.stage.image_size}px"
        return TrainingLoop(
            options=config.run,
            max_bad_fraction=config.data.max_bad_fraction,
            num_images=self.training_set.num_images,
            state=state,
            stepper=stepper,
            recorder=recorder,
            validator=validator,
            samples=self.samples(retry, logbook, alive),
            saver=saver,
            stability=saver.stability,
            logbook=logbook,
            alive=alive,
            profiler=StepProfiler(config.speed.profile_steps if self.dist.is_main else 0, folder),
        )
