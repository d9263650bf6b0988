"""Set up a run: find its data, build its networks, plan each stage, and build its loop.

Everything is checked before anything is written.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from vae.config.options import Config
from vae.data.loading import TrainLoader
from vae.data.workers import resolve_num_workers
from vae.device import is_out_of_memory
from vae.interop.averaging import hash_of_weights
from vae.interop.checkpoint_file import CheckpointContent
from vae.interop.teacher import terms_of
from vae.losses.terms import LossTerms
from vae.memory.plan import stage_spec
from vae.model.activation_scale import LargestActivation, scale_activations, scale_for
from vae.ops.kernel_check import DTYPE_NAMES, Shape, choose_kernels
from vae.step import Networks
from vae.system import console
from vae.system.errors import UserError
from vae.training.checkpoints import saved_step
from vae.training.datasets import TrainingSet, check_stages, find_images, with_aspects, without_excluded
from vae.training.distributed import Distributed, GradientWaits, data_parallel
from vae.training.early_checks import Command
from vae.training.liveness import Liveness
from vae.training.logbook import Logbook
from vae.training.loop import TrainingLoop
from vae.training.precision import (
    MEASURED_CROPS,
    activations_of,
    compile_in_place,
    compute_dtype,
    kernel_shapes,
    replacement_of_fp16,
    set_backends,
    why_not_compile,
)
from vae.training.provenance import (
    NEW,
    Identity,
    Provenance,
    Resume,
    compare,
    print_resume,
    read_good_checkpoint,
    samples_record,
)
from vae.training.recorder import Recorder, step_profiler
from vae.training.resolved_options import ResolvedOptions, machine_of, resolve_options
from vae.training.saver import Saver, read_divergences
from vae.training.schedule import StageSchedule
from vae.training.stability import Stability
from vae.training.stage_memory import OomRetry, StagePlan, StepSettings, plan_stage
from vae.training.stages import Stage, StageSteps, current_stage, is_started, stages_left
from vae.training.state import TrainingState, begin_state, restore
from vae.training.stepper import Stepper
from vae.training.validation import History, ValidationSet
from vae.training.validator import SampleGrids, Validator, load_sample_images


@dataclass(frozen=True)
class PreparedRun:
    """A run that was checked and built, before anything is written."""

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

    # ---- Data ------------------------------------------------------------------------------------------

    def crops(self, count: int) -> Iterator[torch.Tensor]:
        """Yield about `count` training crops uint8 (1, C, H, W) on the device (TrainingSet.sample)."""
        dataset = self.training_set.crops(self.config, self.state.stage.image_size)
        first_epoch = 0
        position, dist = self.state.position, self.dist
        for index in self.training_set.sample(count, position, dist.rank, dist.world_size):
            crop = dataset[first_epoch, index].image
            if crop is not None:
                yield crop[None].to(self.dist.device)

    def loader(self, schedule: StageSchedule, alive: Liveness) -> TrainLoader:
        """Return the training batches of the stage that trains."""
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

    # ---- Plan ------------------------------------------------------------------------------------------

    def steps(self, stage: Stage) -> StageSteps:
        """Divide the epochs of `stage` into optimizer steps."""
        accumulation = self.config.run.accumulation_steps
        local_batch = stage.batch_size * accumulation
        order = self.training_set.order_of(self.config, stage.image_size, local_batch, self.dist.world_size)
        return StageSteps.of(stage, len(order), accumulation, self.dist.world_size)

    def schedule(self, stage: Stage) -> StageSchedule:
        """Return the steps and learning rates of `stage`."""
        width = self.config.model.widest
        options = (self.config.optim, self.config.loss)
        divergences = self.state.divergences_by_stage.get(stage.first_epoch, 0)
        begun_at = self.state.position.disc_begun_at
        return StageSchedule(
            self.steps(stage), self.provenance.begun_from, width, *options, begun_at, divergences
        )

    @property
    def last_step(self) -> int:
        """The optimizer step at which the run will have trained all stages."""
        position = self.state.position
        left = stages_left(self.state.stages, position)
        totals = [self.steps(stage).total for stage in left]
        return position.step + sum(totals) - (self.steps(left[0]).done(position) if left else 0)

    def plan(self, stage: Stage) -> StagePlan:
        """Plan the memory of the steps of `stage`; UserError if not even one image fits."""
        return plan_stage(self.config, stage, self.networks.dtype, self.dist, self.state.activation_scale)

    # ---- Loop ------------------------------------------------------------------------------------------

    def retry(self, plan: StagePlan | None = None) -> OomRetry:
        """Build what computes the gradients of a stage; without a plan, no step is computed."""
        settings = plan.step_settings(self.config.speed) if plan else StepSettings(1, "none", False)
        size = self.state.stage.image_size
        resume = self.command.resume_command
        return OomRetry(self.networks, self.dist, settings, self.output_dir, size, resume)

    def stepper(self, plan: StagePlan, schedule: StageSchedule) -> Stepper:
        """Build what makes the optimizer steps of a stage."""
        return Stepper(self.state, self.retry(plan), schedule, self.dist, self.config.run.seed)

    def samples(self, retry: OomRetry, logbook: Logbook, alive: Liveness) -> SampleGrids:
        """Build what writes the sample grids."""
        return SampleGrids(self.state, retry, logbook, alive, self.sample_images, self.validation_set)

    def loop(
        self, plan: StagePlan, schedule: StageSchedule, saver: Saver, logbook: Logbook, alive: Liveness
    ) -> TrainingLoop:
        """Build the loop of the stage that trains."""
        config = self.config
        self.networks.progress = alive.beat
        stepper = self.stepper(plan, schedule)
        validator = None
        if self.validation_set is not None:
            validator = Validator(self.validation_set, stepper, logbook, alive, config.run)
        planned_bytes = min(plan.memory.total, plan.available)
        folder = self.output_dir / "profile" / f"{self.state.stage.image_size}px"
        return TrainingLoop(
            config=config,
            num_images=self.training_set.num_images,
            stepper=stepper,
            recorder=Recorder(stepper, logbook, config.run, self.gradient_waits, planned_bytes),
            validator=validator,
            samples=self.samples(stepper.retry, logbook, alive),
            saver=saver,
            alive=alive,
            profiler=step_profiler(config.speed.profile_steps if self.dist.is_main else 0, folder),
        )


def prepare_run(command: Command, dist: Distributed) -> PreparedRun:
    """Check everything that PyTorch is needed for, and build the run.

    Raises UserError, with nothing written, if something is wrong.
    """
    options = resolve_options(command, *machine_of(dist.device), dist)
    config = options.config
    stages = options.stages
    position = options.position
    left = stages_left(stages, position)
    dtype = compute_dtype(config.speed, dist.device)
    num_workers = resolve_num_workers(config.data.num_workers, processes_here=dist.local_world_size)
    training_set, validation_set = _find_data(config, command, num_workers, dist)
    check_stages(config, left, position, training_set, dist)
    set_backends(config.speed)
    _choose_kernels(config, left, dtype, dist)
    state = begin_state(config, dist.device, dtype == torch.float16, options.source)
    terms = _terms(config, dist, dtype)
    waits = GradientWaits()
    networks, compiled = _networks(config, dist, state, terms, dtype, waits)
    _continue(state, options)
    state.stages = stages
    state.position = position
    state.begun_at = replace(position)
    state.stage = current_stage(stages, position) or stages[-1]
    run = PreparedRun(
        config=config,
        command=command,
        dist=dist,
        networks=networks,
        gradient_waits=waits,
        state=state,
        training_set=training_set,
        validation_set=validation_set,
        sample_images=load_sample_images(config, stages) if dist.is_main else {},
        num_workers=num_workers,
        compiled=compiled,
        provenance=_provenance(options, state, training_set, validation_set, dist.world_size),
    )
    if not run.provenance.resume.comparable or state.history.loss != terms.image_text:
        state.history = _new_history(state.history, terms)
    _check_discriminator_begins(run)
    if state.fp16:
        _fit_fp16(run, options.content)
    return run


def _find_data(
    config: Config, command: Command, num_workers: int, dist: Distributed
) -> tuple[TrainingSet, ValidationSet | None]:
    """Find the training and the validation images; UserError if they do not fit the options."""
    sets = find_images(config, num_workers, val_split_given="val_split" in command.given)
    training_set, validation_set = without_excluded(*sets, config.data, dist)
    if config.run.early_stopping and validation_set is None:
        raise UserError(
            f"--early_stopping {config.run.early_stopping} needs a validation set: raise --val_split, give "
            "--val_path, or remove it"
        )
    return with_aspects(training_set, config, dist), validation_set


def begin_stability(run: PreparedRun) -> Stability:
    """Begin to judge the records of the run, with the last checkpoint that is known to be good."""
    stability = Stability(run.config.optim.max_nonfinite_steps)
    step = run.state.begun_at.step
    if run.provenance.resumed_from is not None:
        stability.begin(step, run.provenance.resumed_from)
        good = read_good_checkpoint(run.output_dir)
        if good is not None and 0 <= saved_step(good) <= step:
            stability.good = good
    return stability


def _check_discriminator_begins(run: PreparedRun) -> None:
    """Raise UserError if all stages end before the adversarial loss begins; --max_steps is only a stop."""
    loss = run.config.loss
    last_step = run.last_step
    first_step = run.schedule(run.state.stage).adversarial_first_step
    if loss.adversarial_weight == 0 or not run.state.position.step < last_step <= first_step:
        return
    remedy = "lower --disc_warmup" if loss.disc_start < 1 else "give a share of the stage, --disc_start 0.5"
    raise UserError(
        f"--disc_start {loss.disc_start:g}: the adversarial loss would begin at step {first_step}, but "
        f"training ends at step {last_step}: {remedy}, train longer, or without it: --adversarial_weight 0"
    )


def _new_history(before: History, terms: LossTerms) -> History:
    """Forget the validations: those `before` compared other images, or another loss."""
    if before.loss not in ("", terms.image_text):
        console.info(
            f"the validation loss was {before.loss}, and is {terms.image_text} from now on: earlier "
            "validations are not compared with later ones"
        )
    return History(loss=terms.image_text)


def _fit_fp16(run: PreparedRun, content: CheckpointContent | None) -> None:
    """Scale activations of others' networks that are too large for fp16, or leave fp16.

    A resumed run in fp16 keeps its scale. The activations of a new network are small.
    """
    state = run.state
    if state.overflows_fp16:
        leave_fp16(run)
        return
    if content is not None and content["fp16"]:
        _scale_activations(state, content["activation_scale"])
        return
    if content is None and not run.config.model.init_from:
        return
    largest = _largest_activation(run)
    if not largest.may_overflow_fp16:
        return
    console.info(largest.text)
    if math.isfinite(largest.value):
        _scale_activations(state, scale_for(largest.value))
    if _largest_activation(run).may_overflow_fp16:
        leave_fp16(run)
    else:
        console.info(f"--mixed_precision computes with activations times {state.activation_scale:g}")


def _largest_activation(run: PreparedRun) -> LargestActivation:
    """Measure the largest activation on some training crops of all processes."""
    largest = activations_of(run.state.eval_model, run.crops(MEASURED_CROPS))
    return LargestActivation(*max(run.dist.all_gather_set({(largest.value, largest.module)})))


def leave_fp16(run: PreparedRun) -> None:
    """Compute in bf16 or fp32 from here on, because the activations of the network overflow fp16."""
    config = run.config
    dist = run.dist
    state = run.state
    dtype = replacement_of_fp16(config.speed, dist.device)
    _choose_kernels(config, stages_left(state.stages, state.position), dtype, dist)
    state.leave_fp16()
    _scale_activations(state, 1.0)
    run.networks.dtype = dtype
    run.networks.terms = _terms(config, dist, dtype)
    console.info(f"activations overflow fp16: --mixed_precision computes in {DTYPE_NAMES[dtype]}")


def _scale_activations(state: TrainingState, scale: float) -> None:
    """Let the networks compute with this scale (vae/model/activation_scale.py)."""
    state.activation_scale = scale
    for network in filter(None, (state.autoencoder, state.ema)):
        scale_activations(network, scale)


def _provenance(
    options: ResolvedOptions,
    state: TrainingState,
    training_set: TrainingSet,
    validation_set: ValidationSet | None,
    processes: int,
) -> Provenance:
    """Describe the origin of the run, and print how it continues the one before it."""
    content = options.content
    path = options.path
    stage = state.stage
    position = state.begun_at
    continues = None
    if content is not None:
        step = content["position"]["step"]
        continues = {"run": content["run"]["id"], "step": step, "checkpoint": str(path)}
    samples = samples_record(options.config, training_set, validation_set, stage, processes, continues)
    resume = Resume(NEW)
    if content is not None:
        resume = compare(content["provenance"], samples)
        print_resume(resume, None if is_started(stage, position) else stage.image_size)
    return Provenance(samples, options.begun_from, path, resume)


def _continue(state: TrainingState, options: ResolvedOptions) -> None:
    """Begin a run, after a checkpoint if there is one."""
    config = options.config
    content = options.content
    divergences = read_divergences(Path(config.run.output_dir), config.optim.learning_rate)
    state.divergences_by_stage = divergences.by_stage
    state.overflows_fp16 = divergences.overflows_fp16
    if content is None:
        state.identity = replace(state.identity, start=hash_of_weights(state.autoencoder.state_dict()))
        return
    try:
        restore(state, content)
    except (RuntimeError, ValueError) as error:  # of load_state_dict
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())
        raise UserError(
            f"--resume_from {options.path} does not fit its own configuration: use another checkpoint "
            f"({reason:.200})"
        ) from None
    state.apply_given_scaling(config)
    run = Identity(**content["run"])
    state.identity = replace(run, restarts=run.restarts + 1)
    assert options.path is not None
    if options.path.parent.resolve() != Path(config.run.output_dir).resolve():
        state.identity = Identity(parent=run.id, restarts=run.restarts + 1, start=run.start)
        state.history = replace(  # names of files in the other folder
            state.history, best_checkpoint=None, best_checkpoint_loss=None, before_adversarial=None
        )


def _terms(config: Config, dist: Distributed, dtype: torch.dtype) -> LossTerms:
    """Build the terms of the loss. The main process downloads their weights before others load them."""
    return dist.main_first(partial(terms_of, config.loss, config.model.has_posterior, dtype, dist.device))


def _choose_kernels(config: Config, stages: list[Stage], dtype: torch.dtype, dist: Distributed) -> None:
    """Test the kernels with the shapes of these stages, and replace those that fail."""

    def shapes() -> list[Shape]:
        return kernel_shapes(stage_spec(config, stage.image_size, 1, dtype, 0) for stage in stages)

    choose_kernels(config.speed.kernels, dist.device, [dtype], dist.all_gather_set, shapes)


def _networks(
    config: Config,
    dist: Distributed,
    state: TrainingState,
    terms: LossTerms,
    dtype: torch.dtype,
    waits: GradientWaits,
) -> tuple[Networks, bool]:
    """Build the networks of a step; returns whether they are compiled, which may be impossible here.

    All processes then have the weights of the main one: another CPU may round initial weights otherwise.
    """
    compiled = config.speed.use_torch_compile
    why_not = f"--buckets {config.data.buckets} has several shapes" if config.data.buckets > 1 else None
    if config.model.module:
        why_not = f"the {config.model.class_name} of diffusers is not compiled"
    if compiled and (reason := why_not or why_not_compile(dist.device, config.speed.kernels)):
        console.info(f"--use_torch_compile: {reason}; training continues without it, only slower")
        compiled = False
    if compiled:
        for module in filter(None, (state.autoencoder, state.discriminator)):
            compile_in_place(module)
    wrapped = partial(data_parallel, processes=dist, gradient_dtype=config.speed.gradient_dtype, waits=waits)
    autoencoder = wrapped(state.autoencoder)
    discriminator = wrapped(state.discriminator) if state.discriminator else None
    if state.ema is not None:
        state.ema.load_state_dict(state.autoencoder.state_dict())
    channels_last = config.speed.channels_last
    return Networks(autoencoder, discriminator, terms, dtype, channels_last), compiled
