"""The validations of a stage: of all validation images, and quick ones of a few of them in between."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from vae.config.options import RunConfig
from vae.data.dataset import Batch
from vae.device import is_out_of_memory
from vae.evaluation.metrics import Sums
from vae.ops.kernel_check import DTYPE_NAMES
from vae.step import Networks
from vae.system import console
from vae.system.errors import DataError, UserError
from vae.training.distributed import Distributed
from vae.training.memory.oom_retry import OomRetry
from vae.training.output.logbook import Logbook
from vae.training.recovery.signals import LAST_VALIDATION, VALIDATION, LoadingStoppedError
from vae.training.recovery.watchdog import Liveness
from vae.training.run_folder import resume_command
from vae.training.schedule import StageSchedule
from vae.training.state import TrainingState
from vae.training.validation.measure import (
    NOISE_IMAGES,
    BaselineMeter,
    Metrics,
    NoiseCurveMeter,
    ReconstructionMeter,
    ValidationSet,
    validation_line,
)
from vae.training.validation.slices import Slices, slice_record, slice_text

# A channel with this noise carries at most 0.5 * log2(1 + 1 / 0.5**2) = 1.2 bit per value (Shannon 1948).
MAX_SIGMA_OVER_STD = 0.5
Source = Callable[[], Iterator[Batch]]  # batches from the first one on; called again if memory runs out


@dataclass
class Validator:
    """Validates the weights of a stage, writes records and prints what they mean."""

    images: ValidationSet
    state: TrainingState
    networks: Networks
    dist: Distributed
    retry: OomRetry
    schedule: StageSchedule
    logbook: Logbook
    alive: Liveness
    options: RunConfig
    baselines: dict[str, Metrics] = field(default_factory=dict)  # by name
    _batch_size: int | None = None  # if memory ran out with the micro-batch
    _slices: Slices | None = None  # from the first validation on
    # One image each, on the CPU: this process's share of so many.
    _crops: dict[int, list[Batch]] = field(default_factory=dict)

    def measure_baselines(self) -> None:
        """Measure both baselines on all validation images, and write their records."""
        meter = BaselineMeter(self.networks, self.state.autoencoder.downsampling)
        with self.alive.signals.answering(VALIDATION):
            self.baselines = meter.metrics(self._sums(meter, self._batches), self.dist)
        val_path = self.images.data.val_path
        if val_path and not any(metrics["images"] for metrics in self.baselines.values()):
            raise DataError(f"--val_path {val_path}: none of its images can be used, see above: give others")
        values = {"image_size": self.state.stage.image_size}
        for name, metrics in self.baselines.items():
            self.logbook.record("baseline", self.state.position.step, {"codec": name, **values, **metrics})

    def validate(self, when: str, epoch: int, ends_run: bool = False) -> Metrics:
        """Validate the weights, write a record and print a line; warn if training has made them worse."""
        state = self.state
        started = time.perf_counter()
        with self.alive.signals.answering(LAST_VALIDATION if ends_run else VALIDATION):
            meter = ReconstructionMeter(state.eval_model, self.networks, self._all_slices())
            measured, by_label = meter.metrics(self._sums(meter, self._batches), self.dist)
            speed = _speed(measured, started)
            of_slices = slice_record(by_label)
            if meter.channel_std is not None:
                curve = NoiseCurveMeter(state.eval_model, self.networks.eval_dtype, meter.channel_std)
                measured |= curve.metrics(
                    self._sums(curve, partial(self._few_batches, NOISE_IMAGES)), self.dist
                )
            metrics = {"epoch": epoch, "image_size": state.stage.image_size, **measured}
            state.last_validation = metrics
            state.validated_step = state.position.step
            state.history.last_psnr = metrics.get("psnr")
            precision = DTYPE_NAMES[self.networks.eval_dtype]
            values = {**metrics, "precision": precision, **speed, **of_slices}
            self.logbook.record("validation", state.position.step, values)
            self.logbook.draw_results()
            baseline = self.baselines.get("bicubic", {})
            line = validation_line(when, metrics, precision, baseline, state.autoencoder.downsampling)
            console.info(line + slice_text(of_slices))
            self._warn(metrics)
        return metrics

    def _warn(self, metrics: Metrics) -> None:
        """Warn that the posterior's noise hides the latents, or that PSNR is below the stage's start."""
        state = self.state
        loss = self.schedule.loss
        ratio = metrics.get("sigma_over_std", 0.0)
        can_change = self.schedule.optim.train_part != "decoder"
        if ratio > MAX_SIGMA_OVER_STD and can_change and not state.noise_reported:
            state.noise_reported = True
            flag = "variance_target" if loss.variance_weight > 0 else "kl_weight"
            console.warning(
                f"the noise of the latents is {ratio:.2f} times as large as their spread (more than "
                f"{MAX_SIGMA_OVER_STD}), so they lose what the image contains: lower --{flag} (now "
                f"{getattr(loss, flag):g})"
            )
        last_weight = self.schedule.adversarial_weight(state.position.step - 1)
        if "psnr" in metrics and not last_weight:  # the adversarial term may lower PSNR
            warning = state.history.decrease_warning(metrics["psnr"], self.schedule.remedy)
            if warning:
                console.warning(warning)

    def validate_quickly(self) -> bool:
        """Measure a few images and write a record; whether their PSNR has just fallen: then it warns.

        Their crops stay in main memory from the first time on: decoding would cost more than measuring.
        """
        state = self.state
        started = time.perf_counter()
        meter = ReconstructionMeter(state.eval_model, self.networks, Slices())
        with self.alive.signals.answering(VALIDATION):
            few = partial(self._few_batches, self.options.quick_val_images)
            measured, _ = meter.metrics(self._sums(meter, few), self.dist)
        metrics = {"image_size": state.stage.image_size, **measured}
        values = {**metrics, **_speed(measured, started)}
        self.logbook.record("quick_validation", state.position.step, values)
        warning = state.history.regression_warning(metrics, self.options.regression_psnr)
        if warning:
            console.warning(f"step {state.position.step}: {warning}")
        return warning is not None

    def _all_slices(self) -> Slices:
        """The slices of the validation set, whose labels are read once in a stage."""
        if self._slices is None:
            labels = {index: self.images.label(index) for index in self.images.share(self.dist)}
            self._slices = Slices.of(labels, self.dist)
        return self._slices

    def _batches(self) -> Iterator[Batch]:
        size = self.state.stage.image_size
        check = self.alive.check
        for batch in self.images.batches(size, self._size(), self.dist, check):
            self.alive.beat()
            yield self._on_device(batch)

    def _few_batches(self, count: int) -> Iterator[Batch]:
        if count not in self._crops:
            crops = []
            size = self.state.stage.image_size
            check = self.alive.check
            for crop in self.images.spread(count).batches(size, 1, self.dist, check):
                self.alive.beat()
                crops.append(crop)
            self._crops[count] = crops
        for first in range(0, len(self._crops[count]), self._size()):
            crops = self._crops[count][first : first + self._size()]
            images, epochs, indices = (
                torch.cat([getattr(crop, name) for crop in crops]) for name in ("images", "epochs", "indices")
            )
            self.alive.beat()
            yield self._on_device(Batch(images, epochs, indices))

    def _on_device(self, batch: Batch) -> Batch:
        return replace(batch, images=batch.images.to(self.dist.device, non_blocking=True))

    def _size(self) -> int:
        return self._batch_size or self.retry.settings.micro_batch

    def _sums(
        self, meter: ReconstructionMeter | BaselineMeter | NoiseCurveMeter, source: Source
    ) -> dict[str, Sums]:
        """The sums over this process's validation batches, smaller ones if memory runs out.

        If that fails on one process, all of them raise an error.
        """
        failure = None
        sums = None
        while sums is None and failure is None:
            try:
                self.retry.end_graph()
                sums = meter.sums(source())
                continue
            except (UserError, LoadingStoppedError) as error:
                failure = error
                continue
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            # Not within the except clause: there, the exception keeps the tensors of the batch alive.
            failure = self._reduce_memory()
        if self.dist.all_reduce_scalars(failure is not None)[0] or sums is None:
            raise failure or UserError("validation failed on another process, which reports the reason")
        return sums

    def _reduce_memory(self) -> UserError | None:
        """Halve the batch after memory ran out; the error if it has one image."""
        retry = self.retry
        size = self._size()
        retry.settings.out_of_memory += 1
        if size == 1:
            image_size = self.state.stage.image_size
            command = resume_command(self.logbook.folder)
            line = f"out of memory in a validation with one image of {image_size} px"
            return UserError(f"{line}: lower --image_size, and resume with: {command}")
        self._batch_size = size // 2
        retry.free_memory()
        console.info(f"out of memory: validation batch lowered to {size // 2}; same metrics")
        return None


def _speed(measured: Metrics, started: float) -> dict[str, float]:
    """The throughput of a validation that began at `started`, with decoding and all processes."""
    return {"images_per_second": measured["images"] / max(1e-9, time.perf_counter() - started)}
