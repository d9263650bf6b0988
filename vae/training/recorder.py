"""Turn measurements of steps into records, a progress bar and lines; profile steps."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from vae.config.options import RunConfig
from vae.data.dataset import Batch
from vae.losses.adversarial import adaptive_weight
from vae.losses.terms import LossTerms
from vae.system import console
from vae.system.files import atomic_path, replace_text
from vae.system.host import MIB
from vae.training.distributed import Distributed, GradientWaits
from vae.training.logbook import Logbook
from vae.training.stage_memory import low_memory_warning, memory_peaks
from vae.training.stepper import Stepper, Update

# What each process counts since the last record; an all-gather of them makes two records.
COUNTS = (
    "seconds",
    "sync_seconds",  # of them: waiting for the other processes on the host
    "allreduce_seconds",  # waiting for the sums of the gradients
    "out_of_memory",  # how often memory ran out, since the stage began
    "steps",
    "images",
    "rejected",
    "decode_seconds",
    "load_seconds",
    "disk_bytes",
    "remote_bytes",
    "hits",
    "misses",
)
Counts = Mapping[str, float]


def data_record(processes: Sequence[Counts]) -> dict[str, float]:
    """Return the record `data`: the cost of reading and decoding the images of all processes."""
    total = {name: sum(process[name] for process in processes) for name in COUNTS}
    seconds = processes[0]["seconds"]
    decoded = max(1.0, total["images"] + total["rejected"])
    values = {
        "decode_ms": 1000 * total["decode_seconds"] / decoded,
        "load_ms": 1000 * total["load_seconds"] / decoded,
        "disk_mib_per_second": total["disk_bytes"] / MIB / seconds,
        "bad_share": total["rejected"] / decoded,
    }
    if asked := total["hits"] + total["misses"]:
        values["remote_mib_per_second"] = total["remote_bytes"] / MIB / seconds
        values["cache_hit_rate"] = total["hits"] / asked
    return values


def comparison(processes: Sequence[Counts]) -> dict[str, float | list[float]]:
    """Compare the speeds of several processes; with one, there is nothing to compare.

    All wait for the slowest one. Even the process with the shortest waits waits for the network.
    """
    if len(processes) == 1:
        return {}
    waited = [process["sync_seconds"] + process["allreduce_seconds"] for process in processes]
    own = [max(0.0, process["seconds"] - wait) for process, wait in zip(processes, waited, strict=True)]
    shares = [min(1.0, wait / process["seconds"]) for process, wait in zip(processes, waited, strict=True)]
    rates = [  # 0: not known
        process["images"] / seconds if seconds else 0.0
        for process, seconds in zip(processes, own, strict=True)
    ]
    return {
        "images_per_second_by_rank": [round(rate, 3) for rate in rates],
        "skew_share": statistics.fmean(shares) - min(shares),
        "slowest_rank": own.index(max(own)),
        "slowest_to_median": max(own) / max(1e-9, statistics.median(own)),
        "network_share": min(shares),
    }


SQUARED_RANGE = 4.0  # of values in [-1, 1], for PSNR from the mean squared error


@dataclass
class RunningMetrics:
    """Sums over the steps since the last record. Tensors stay on the device until the record is written."""

    started: float = field(default_factory=time.perf_counter)
    counted_until: float = field(default_factory=time.perf_counter)  # end of the last step or wait
    wait_seconds: float = 0.0  # for batches
    pause_seconds: float = 0.0  # for validations, samples and checkpoints
    images: float = 0.0  # of all processes
    sums: dict[str, torch.Tensor] = field(default_factory=dict)  # over the images of this process
    norms: list[torch.Tensor] = field(default_factory=list)  # gradient norms of the last step
    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0.0))  # of this process

    def add(self, sums: dict[str, torch.Tensor], images: float, norms: list[torch.Tensor]) -> None:
        """Add one step's sums over images."""
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.images += images
        self.norms = norms
        self.counted_until = time.perf_counter()

    def add_wait(self, seconds: float) -> None:
        """Add a wait for a batch that ends now; between the last step and it were validations and saves."""
        self.wait_seconds += seconds
        self.pause_seconds += time.perf_counter() - seconds - self.counted_until
        self.counted_until = time.perf_counter()  # no step follows the last wait of an epoch

    def all_reduced_means(self, dist: Distributed) -> dict[str, float]:
        """The mean of each sum over the images of all processes, NaN without one. Synchronizes the device."""
        names = sorted(self.sums)
        stacked = dist.all_reduce(torch.stack([self.sums[name] for name in names]))
        return dict(zip(names, (stacked / self.images).tolist(), strict=True))

    def seconds(self) -> float:
        """Return the seconds of training since the last record."""
        return max(1e-9, time.perf_counter() - self.started - self.pause_seconds)

    def speed(self) -> dict[str, float]:
        """Return images_per_second of all processes, and the share of the time spent waiting for data."""
        seconds = self.seconds()
        return {"images_per_second": self.images / seconds, "data_wait_share": self.wait_seconds / seconds}


def loss_record(means: dict[str, float], terms: LossTerms) -> dict[str, float]:
    """Return the weighted loss, its terms and the PSNR of the mean squared error, from means of steps."""
    mse = means["mse"]
    psnr = 10 * math.log10(SQUARED_RANGE / mse) if 0 < mse < math.inf else math.nan
    hidden = {"mse"}.difference(term.name for term in terms.image)
    shown = {name: value for name, value in means.items() if name not in hidden}
    return {"loss": terms.weighted_sum(means), **shown, "psnr": psnr}


@dataclass
class Recorder:
    """Collects what the steps of a stage measure. A context, within which the progress bar is shown."""

    stepper: Stepper
    logbook: Logbook
    options: RunConfig
    gradient_waits: GradientWaits
    planned_bytes: int = 0  # GPU memory that the stage needs
    _metrics: RunningMetrics = field(default_factory=RunningMetrics)
    _low_memory_reported: bool = False

    def __post_init__(self) -> None:
        self.state = self.stepper.state
        self.schedule = self.stepper.schedule
        self.retry = self.stepper.retry
        self.dist = self.stepper.dist

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

    def add_wait(self, seconds: float) -> None:
        """Add a wait for a batch. What has passed between the last step and this wait is no training time."""
        self._metrics.add_wait(seconds)

    def add(self, batch: Batch, update: Update, total_images: int, sync_seconds: float) -> None:
        """Add a step. `sync_seconds`: of it, waiting for the other processes."""
        self._metrics.add(update.losses, total_images, update.norms)
        own = {"images": len(batch.images), "rejected": len(batch.rejected), "sync_seconds": sync_seconds}
        for name, value in {**batch.counts, **own, "steps": 1}.items():
            self._metrics.counts[name] += value
        self._bar.update()

    def is_due(self) -> bool:
        """Whether a record is due: of `log_freq` steps; the last one has half to 1.5 times as many."""
        log_freq = self.options.log_freq
        left = self._steps_left()
        done = self.schedule.steps.done(self.state.position)
        return left <= 0 or (done % log_freq == 0 and 2 * left >= log_freq)

    def _steps_left(self) -> int:
        """Return the steps until the stage ends, or the run by --max_steps."""
        left = self.schedule.steps.total - self.schedule.steps.done(self.state.position)
        limit = self.options.max_steps
        return left if limit is None else min(left, limit - self.state.position.step)

    def write(self) -> tuple[float, float]:
        """Write the records of the steps since the last one; returns their loss and mean squared error.

        Only this synchronizes the device in a step.
        """
        state = self.state
        metrics = self._metrics
        dist = self.dist
        means = metrics.all_reduced_means(dist)
        record = {
            "epoch": state.position.epoch + 1,  # the current epoch, counted from 1
            **loss_record(means, self.retry.networks.terms),
            "learning_rate": state.optimizers.autoencoder.param_groups[0]["lr"],
            "gradient_norm": float(metrics.norms[0]),
            **metrics.speed(),
            "nonfinite_steps": int(state.update.nonfinite_total),
            **memory_peaks(dist.device),
        }
        if "adversarial" in means and state.optimizers.discriminator is not None:
            record["disc_learning_rate"] = state.optimizers.discriminator.param_groups[0]["lr"]
            reconstruction, adversarial = state.running_sq_norms
            ratio = adaptive_weight(reconstruction, adversarial, self.schedule.loss.disc_max_weight)
            record["adversarial_ratio"] = float(ratio)
        if state.fp16:
            record["loss_scale"] = float(state.update.loss_scale)
        self.logbook.record("train", state.position.step, record)
        self._write_health()
        self._show(record)
        self._warn_of_low_memory()
        self._metrics = RunningMetrics()
        return record["loss"], means["mse"]

    def _write_health(self) -> None:
        """Write the records of the data and of the trainer: one exchange between the processes."""
        step = self.state.position.step
        counts = self._metrics.counts
        counts["seconds"] = self._metrics.seconds()
        counts["allreduce_seconds"] = self.gradient_waits.seconds() * counts["steps"]
        counts["out_of_memory"] = self.retry.settings.out_of_memory
        rows = self.dist.all_gather_scalars(*(counts[name] for name in COUNTS))
        processes = [dict(zip(COUNTS, row, strict=True)) for row in rows]
        self.logbook.record("data", step, data_record(processes))
        trainer = {
            "restarts": self.state.identity.restarts,
            "out_of_memory": int(sum(process["out_of_memory"] for process in processes)),
        }
        self.logbook.record("trainer", step, {**trainer, **comparison(processes)})

    def _warn_of_low_memory(self) -> None:
        """Warn once if other programs take the memory of the plan, while its settings are used."""
        if self._low_memory_reported or self.retry.settings.out_of_memory:
            return
        if warning := low_memory_warning(self.dist.device, self.planned_bytes):
            self._low_memory_reported = True
            console.warning(warning)

    def _show(self, record: dict[str, float]) -> None:
        shown = (
            f"{record['images_per_second']:.2f} images/s, loss {record['loss']:.4f}, "
            f"PSNR {record['psnr']:.2f}"
        )
        self._bar.set_postfix_str(shown)
        if self._bar.disable:  # no terminal: a log file gets lines instead of a progress bar
            if rate := record["images_per_second"]:  # else none was usable
                seconds = self._steps_left() * self.schedule.steps.images / rate
                shown += f", {tqdm.format_interval(round(seconds))} left"
            console.info(f"step {self.state.position.step}: {shown}")


# ---- Profiling -----------------------------------------------------------------------------------------


WARMUP_STEPS = 3  # leaves out compilation, algorithm search and the first allocations
TABLE_ROWS = 30


@contextmanager
def step_profiler(steps: int, folder: Path) -> Iterator[Callable[[], None]]:
    """Profile `steps` steps after WARMUP_STEPS others (--profile_steps), and write the result to `folder`.

    Yields what is called after every training step. With `steps` 0 it does nothing.
    """
    if not steps:
        yield lambda: None
        return

    def write(profiler: torch.profiler.profile) -> None:
        with atomic_path(folder / "trace.json") as temporary:
            profiler.export_chrome_trace(str(temporary))
        key = "cuda_time_total" if torch.cuda.is_available() else "cpu_time_total"
        table = profiler.key_averages().table(sort_by=key, row_limit=TABLE_ROWS)
        replace_text(folder / "table.txt", table + "\n")
        console.info(f"profile written to {folder}")

    schedule = torch.profiler.schedule(wait=0, warmup=WARMUP_STEPS, active=steps, repeat=1)
    with torch.profiler.profile(
        schedule=schedule, on_trace_ready=write, profile_memory=True, record_shapes=True
    ) as profiler:
        yield profiler.step
