"""The training loop of a stage: the way of a batch, from the loader to the checkpoint."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from vae.config.options import Config
from vae.data.dataset import Batch
from vae.data.image_sets import accepted_bad_images
from vae.data.loading import TrainLoader
from vae.system import console
from vae.system.errors import DataError
from vae.training.liveness import Liveness, LoadingStoppedError
from vae.training.logbook import REJECTED_NAME
from vae.training.recorder import Recorder
from vae.training.saver import Saver, SaveReason
from vae.training.stability import NOT_FINITE, raise_if_diverged
from vae.training.stages import current_stage, end_stage, is_started
from vae.training.stepper import Stepper
from vae.training.validation import Metrics
from vae.training.validator import SampleGrids, Validator


class StageEnd(Enum):
    """Why the loop of a stage ended."""

    FINISHED = "the stage has ended"
    MAX_STEPS = "--max_steps is reached"
    SIGNALLED = "a signal asked to stop"


@dataclass(frozen=True)
class NoBatch:
    """This process has no batch for a step, so no process makes it."""

    reason: DataError | LoadingStoppedError


class StepCounts(NamedTuple):
    """Numbers of all processes together that decide about a step."""

    rejected: int  # unusable images
    excluded: int  # images that --exclude names
    stop: int  # processes that got a signal to stop
    save: int  # processes that got a signal to save
    no_batch: int  # processes without a batch


@dataclass
class TrainingLoop:
    """A stage of a run. Nothing else sees all of its parts."""

    config: Config
    num_images: int  # training images
    stepper: Stepper
    recorder: Recorder
    validator: Validator | None  # None: nothing is set aside for validation
    samples: SampleGrids
    saver: Saver
    alive: Liveness
    profiler: AbstractContextManager[Callable[[], None]]  # what it yields is called after every step

    def __post_init__(self) -> None:
        self.options = self.config.run
        self.state = self.stepper.state
        self.stability = self.saver.stability
        self.logbook = self.recorder.logbook

    def begin(self) -> None:
        """Measure the baselines, and the weights that the stage begins with."""
        state, position = self.state, self.state.position
        is_start = not is_started(state.stage, position)
        if is_start:
            state.history.begin_stage()
            self.stability.begin_stage()
        if self.validator:
            self.validator.measure_baselines()
        if self.validator and is_start:
            metrics = self.validator.validate("start", state.stage.first_epoch)
            state.history.add_start(metrics, self.saver.start_checkpoint())
            quick_steps = self.options.quick_val_steps
            if quick_steps and self.stepper.schedule.steps.total >= quick_steps:
                self.validator.validate_quickly()
        self.begin_phase()

    def begin_phase(self) -> None:
        """Begin or end the adversarial phase if the next step does; later weights are compared with these."""
        state, history, position = self.state, self.state.history, self.state.position
        is_adversarial = self.stepper.schedule.is_adversarial(position.step)
        if is_adversarial == history.is_adversarial:
            return
        is_best = False
        if self.validator and state.validated_step != position.step:
            when = f"{'before' if is_adversarial else 'after'} the adversarial loss"
            self.validator.validate(when, self.stepper.schedule.steps.epochs(position))
            is_best = history.add_epoch(state.last_validation)
        history.begin_phase(is_adversarial, state.last_validation)
        self.stability.begin_phase(is_adversarial)
        if is_best:
            self.saver.save(SaveReason.DUE, state.last_validation)

    def train(self, loader: TrainLoader) -> StageEnd:
        """Train the rest of the stage."""
        state, steps, end = self.state, self.stepper.schedule.steps, None
        if state.position.epoch < state.stage.first_epoch:  # the stage before has ended within an epoch
            self._begin_epoch(state.stage.first_epoch)
        with self.recorder, self.profiler as profile_step:
            while end is None and not state.stage.is_done(state.position):
                # after_step does this, unless a run was resumed after the last step or with larger ones
                if self._ends_part():
                    self.end_part()
                    continue
                batches = loader.batches(state.position.epoch, state.position.images_in_epoch // steps.images)
                while end is None and not state.stage.is_done(state.position):
                    if (batch := self._next_batch(batches)) is None:
                        break
                    step = state.position.step
                    end = self.take_step(batch)
                    self.alive.beat()
                    if state.position.step > step:
                        profile_step()
                        self.after_step(stopping=end is StageEnd.SIGNALLED)
                if end is not None:
                    self.saver.save(SaveReason.STOP)
        if end is not StageEnd.SIGNALLED:  # too late for a spike that lasts
            streak = int(state.update.nonfinite_streak)
            raise_if_diverged(self.stepper.dist, self.stability.at_end(state.position.step, streak))
        return end or StageEnd.FINISHED

    def _next_batch(self, batches: Iterator[Batch]) -> Batch | NoBatch | None:
        """Return the next batch; None after the last one."""
        started = time.perf_counter()
        try:
            batch = next(batches, None)
        except (DataError, LoadingStoppedError) as error:
            return NoBatch(error)
        self.alive.beat()
        self.recorder.add_wait(time.perf_counter() - started)
        return batch

    def take_step(self, batch: Batch | NoBatch) -> StageEnd | None:
        """Make one optimizer step from a batch; returns why training must stop after it, or None.

        If a process has no batch, all processes save and stop without a step.
        """
        state, world_size = self.state, self.stepper.dist.world_size
        started = time.perf_counter()
        counts = self._all_reduced_counts(batch)  # from here on, all processes do the same
        sync_seconds = time.perf_counter() - started
        if isinstance(batch, NoBatch) or counts.no_batch:
            return self._stop_without_batch(batch)
        self._check_rejected(counts.rejected)
        steps = self.stepper.schedule.steps
        images = steps.images - counts.rejected - counts.excluded
        update = self.stepper.step(batch, images)
        state.advance(steps.images)
        self.recorder.add(batch, update, images, sync_seconds)
        if counts.save:
            self.saver.save(SaveReason.REQUESTED)
        if counts.stop or (self.alive.signals.stop and world_size == 1):
            return StageEnd.SIGNALLED
        limit = self.options.max_steps
        return StageEnd.MAX_STEPS if limit is not None and state.position.step >= limit else None

    def after_step(self, stopping: bool) -> None:
        """Log, sample, validate and save, each if it is due after this step.

        If a signal asked to stop, this only logs: a validation could take minutes. The resumed run ends the
        epoch.
        """
        options, step = self.options, self.state.position.step
        takes_samples = options.save_samples_freq and step % options.save_samples_freq == 0
        if self.recorder.is_due():
            self._judge(self.recorder.write())
        if stopping:
            return
        if takes_samples:
            self.samples.save()
        if self.validator and options.quick_val_steps and step % options.quick_val_steps == 0:
            has_risen = self.validator.validate_quickly()
            if has_risen and not self._validation_is_due():
                self.validator.validate(f"step {step}", self.state.position.epoch)
        if self._ends_part():
            self.end_part()
        self.begin_phase()
        if options.checkpoint_steps and step % options.checkpoint_steps == 0:
            self.saver.save(SaveReason.DUE)

    def _judge(self, means: tuple[float, float]) -> None:
        """Judge a record: raise NonFiniteError if training has diverged, or note a good checkpoint."""
        state, streak = self.state, int(self.state.update.nonfinite_streak)
        is_good = self.stability.add_record(state.position.step, *means, streak)
        reason = self.stability.divergence()
        if reason is None and streak and not state.is_finite():
            reason = NOT_FINITE
        if is_good:
            self.saver.note_good()
        raise_if_diverged(self.stepper.dist, reason)

    def end_part(self) -> None:
        """Validate and save, each if due, at the end of an epoch, a stage, or the steps between validations.

        This also begins the next epoch, and ends the stage, which --early_stopping may do earlier.
        What is saved while a validation hangs belongs to the old epoch: the resumed run validates again.
        """
        state, options, history = self.state, self.options, self.state.history
        position, steps = state.position, self.stepper.schedule.steps
        epoch_is_done, is_last = steps.epoch_is_done(position), steps.are_done(position)
        epochs = position.epoch + 1 if epoch_is_done else steps.epochs(position)
        save_is_due = self.saver.is_due(epochs) or is_last
        metrics: Metrics = {}
        if self._validation_is_due():
            if self.validator:
                metrics = self.validator.validate(f"epoch {epochs}", epochs)
                save_is_due |= history.add_epoch(metrics) and options.checkpoint_freq is None
            history.planned_step = position.step
        if epoch_is_done:
            self._begin_epoch(position.epoch + 1)
        limit = options.early_stopping
        may_stop = self.stepper.schedule.may_stop_early(state.position)
        if metrics and may_stop and 0 < limit <= history.without_gain and not is_last:
            console.info(f"--early_stopping {limit}: the validation loss has stopped falling, the stage ends")
            is_last = save_is_due = True
        if is_last:
            state.stages, state.stage = end_stage(state.stages, state.stage, position)
        self.begin_phase()
        if save_is_due:
            is_last_stage = current_stage(state.stages, position) is None
            self.saver.save(SaveReason.STOP if is_last_stage else SaveReason.DUE, metrics)

    def _begin_epoch(self, epoch: int) -> None:
        state = self.state
        state.position.epoch, state.position.images_in_epoch, state.rejected = epoch, 0, 0

    def _ends_part(self) -> bool:
        """Whether an epoch, the stage, or the steps between two validations end at the position."""
        steps, position = self.stepper.schedule.steps, self.state.position
        return steps.epoch_is_done(position) or steps.are_done(position) or self._validation_is_due()

    def _validation_is_due(self) -> bool:
        """Whether all validation images are measured at the position, and have not been yet."""
        position = self.state.position
        count = self.validator.images.count if self.validator else 0
        is_due = self.stepper.schedule.steps.validation_is_due(position, self.options.val_freq, count)
        return is_due and self.state.history.planned_step != position.step

    def validate_final(self) -> None:
        """Validate the weights that will be exported, if --max_steps ended the run between validations."""
        state = self.state
        if self.validator and state.validated_step != state.position.step:
            self.validator.validate(f"step {state.position.step}", state.position.epoch)

    # ---- the other processes -----------------------------------------------------------------------------

    def _all_reduced_counts(self, batch: Batch | NoBatch) -> StepCounts:
        """Exchange what decides about the step with `batch`, once and on the host.

        The device meanwhile computes what the host has started before.
        """
        signals, no_batch = self.alive.signals, isinstance(batch, NoBatch)
        asked, signals.save = signals.save, False
        rejected, excluded = ([], 0) if isinstance(batch, NoBatch) else (batch.rejected, batch.excluded)
        for rejection in rejected:
            self.logbook.rejected(rejection.name, str(rejection))
        own = StepCounts(len(rejected), excluded, signals.stop, asked, no_batch)
        return StepCounts(*map(int, self.stepper.dist.all_reduce_scalars(*own)))

    def _stop_without_batch(self, batch: Batch | NoBatch) -> StageEnd:
        """Save and stop if a process has no batch: after a signal with a StageEnd, or else with an error."""
        reason = batch.reason if isinstance(batch, NoBatch) else None
        if not self.stepper.dist.all_reduce_scalars(isinstance(reason, DataError))[0]:
            return StageEnd.SIGNALLED
        self.saver.save(SaveReason.STOP)
        if not isinstance(reason, DataError):
            reason = DataError("another process has no images: it reports the reason")
        step = self.state.position.step
        # Starting again is worthwhile only if this start has trained.
        kind = type(reason) if step > self.state.begun_at.step else DataError
        raise kind(f"{reason}; saved at step {step}, resume with: {self.saver.resume_command}")

    def _check_rejected(self, new: int) -> None:
        """Count the unusable images of an epoch; if they are too many, save and raise DataError."""
        state, total = self.state, self.num_images
        state.rejected += new
        state.most_rejected = max(state.most_rejected, state.rejected)
        max_bad_fraction = self.config.data.max_bad_fraction
        accepted = accepted_bad_images(max_bad_fraction, total)
        if new and state.rejected > accepted:
            self.stepper.retry.free_memory()
            self.saver.save(SaveReason.STOP)
            raise DataError(
                f"{state.rejected} of {total} training images cannot be used, more than the {accepted} of "
                f"--max_bad_fraction {max_bad_fraction}: they are listed in "
                f"{self.logbook.folder / REJECTED_NAME}; remove them, or raise --max_bad_fraction"
            )
