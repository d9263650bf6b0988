"""The numbers of the steps of a stage become records, a progress bar and lines on the console."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tqdm import tqdm

from vae.config.options import RunConfig
from vae.data.dataset import Batch
from vae.losses.adversarial import adaptive_weight
from vae.losses.terms import LossTerms
from vae.system import console
from vae.system.errors import DataError, HangError
from vae.training.data_parallel import GradientWaits
from vae.training.distributed import Distributed
from vae.training.memory.oom_retry import OomRetry
from vae.training.memory.stage_memory import low_memory_warning, memory_peaks
from vae.training.output.logbook import Logbook
from vae.training.records.running_metrics import RunningMetrics, loss_record
from vae.training.recovery.signals import LoadingStoppedError
from vae.training.schedule import StageSchedule
from vae.training.state import TrainingState
from vae.training.stepper import Update


class Means(NamedTuple):
    """Means over the steps of a record."""

    loss: float
    mse: float


@dataclass
class Recorder:
    """Collects what the steps of a stage measure. A context, within which the progress bar is shown."""

    state: TrainingState
    schedule: StageSchedule
    terms: LossTerms
    retry: OomRetry
    dist: Distributed
    logbook: Logbook
    options: RunConfig
    gradient_waits: GradientWaits
    planned_bytes: int = 0  # GPU memory that the stage needs
    _metrics: RunningMetrics = field(default_factory=RunningMetrics)

    def __enter__(self) -> "Recorder":
        self._metrics = RunningMetrics()
        self._bar = tqdm(
            total=self.schedule.steps.total,
            initial=self.schedule.steps.done(self.state.position),
            desc=f"{self.state.stage.image_size} px",
            unit="step",
            dynamic_ncols=True,
            disable=None if self.dist.is_main else True,  # None: on a terminal only, never in a file
        )
        return self

    def __exit__(self, *_exception: object) -> None:
        self._bar.close()

    def timed(self, batches: Iterator[Batch]) -> Iterator[Batch | Exception]:
        """The batches; waits for them are measured, and the time of validations and saves is left out.

        If one cannot be loaded, the reason comes last: the other processes must be notified.
        """
        while True:
            started = time.perf_counter()
            try:
                batch = next(batches, None)
            except (DataError, HangError, LoadingStoppedError) as error:
                yield error
                return
            if batch is None:
                return
            self._metrics.wait_seconds += time.perf_counter() - started
            yield batch
            self._metrics.exclude_pause()

    def add(self, batch: Batch, update: Update, total_images: int, sync_seconds: float) -> None:
        """Add a step. `sync_seconds`: of it, waiting for the other processes."""
        self._metrics.add(update.sums, total_images, update.norms)
        self._metrics.health.add(batch, sync_seconds)
        self._bar.update()

    def is_due(self) -> bool:
        """Whether a record is due: of `log_freq` steps; the last one has half to 1.5 times as many."""
        log_freq = self.options.log_freq
        left = self._steps_left()
        done = self.schedule.steps.done(self.state.position)
        return left <= 0 or (done % log_freq == 0 and 2 * left >= log_freq)

    def _steps_left(self) -> int:
        """Steps until the stage ends, or the run by --max_steps."""
        left = self.schedule.steps.total - self.schedule.steps.done(self.state.position)
        limit = self.options.max_steps
        return left if limit is None else min(left, limit - self.state.position.step)

    def write(self) -> Means:
        """Write the records of the steps since the last one. Only this synchronizes the device in a step."""
        state = self.state
        metrics = self._metrics
        dist = self.dist
        means = metrics.all_reduced_means(dist)
        record = {
            "epoch": state.position.epoch + 1,  # the current epoch, counted from 1
            **loss_record(means, self.terms),
            "learning_rate": state.optimizers[0].param_groups[0]["lr"],
            "gradient_norm": float(metrics.norms[0]),
            **metrics.speed(),
            "nonfinite_steps": int(state.update.nonfinite_total),
            **memory_peaks(dist.device),
        }
        if "adversarial" in means:
            record["disc_learning_rate"] = state.optimizers[1].param_groups[0]["lr"]
            reconstruction, adversarial = state.running_sq_norms
            ratio = adaptive_weight(reconstruction, adversarial, self.schedule.loss.disc_max_weight)
            record["adversarial_ratio"] = float(ratio)
        if state.fp16:
            record["loss_scale"] = float(state.update.loss_scale)
        self.logbook.record("train", state.position.step, record)
        self._write_health(record["data_wait_share"])
        self._show(record)
        self._warn_of_low_memory()
        self._metrics = RunningMetrics(health=metrics.health.restarted())
        return Means(record["loss"], means["mse"])

    def _write_health(self, wait_share: float) -> None:
        """Write the records of the data and of the trainer: one exchange between the processes."""
        metrics = self._metrics
        retry = self.retry
        step = self.state.position.step
        allreduce = self.gradient_waits.seconds()
        exhausted = retry.settings.out_of_memory
        gathered = metrics.health.gathered(self.dist, metrics.seconds(), wait_share, allreduce, exhausted)
        self.logbook.record("data", step, gathered.data())
        trainer = {"restarts": self.state.identity.restarts, "out_of_memory": gathered.out_of_memory()}
        self.logbook.record("trainer", step, {**trainer, **gathered.comparison()})

    def _warn_of_low_memory(self) -> None:
        """Warn once if other programs take the memory of the plan, while its settings are used."""
        state = self.state
        if state.low_memory_reported or self.retry.settings.out_of_memory:
            return
        if warning := low_memory_warning(self.dist.device, self.planned_bytes):
            state.low_memory_reported = True
            console.warning(warning)

    def _show(self, record: dict[str, float]) -> None:
        shown = (
            f"{record['images_per_second']:.2f} images/s, loss {record['loss']:.4f}, "
            f"PSNR {record['psnr']:.2f}"
        )
        self._bar.set_postfix_str(shown)
        if self._bar.disable:  # no terminal: a log file gets lines instead of a progress bar
            seconds = self._steps_left() * self.schedule.steps.images / record["images_per_second"]
            left = tqdm.format_interval(round(seconds))
            console.info(f"step {self.state.position.step}: {shown}, {left} left")
