"""--find_lr: a learning rate range test (Smith 2017) with real steps, which are undone.

The rate rises geometrically, and the loss of each batch is measured before its step. Batches differ more than
the loss falls, so each loss is divided by that of the unchanged weights for the same images, crops and noise.
Two rates are common choices: where this ratio falls fastest, and a tenth of the rate at which it is lowest.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from vae.charts import BLUE, Line, draw_lines, mark_x, new_figure, png
from vae.config.flags import command_words
from vae.data.dataset import Batch
from vae.data.loading import TrainLoader
from vae.model.autoencoder import set_recompute
from vae.system import console
from vae.system.files import replace_bytes, write_json
from vae.training.liveness import MEASURING, Liveness
from vae.training.recorder import RunningMetrics, loss_record
from vae.training.saver import host_copy
from vae.training.schedule import StageSchedule
from vae.training.setup import PreparedRun
from vae.training.stage_memory import OomRetry, StagePlan
from vae.training.state import restore, snapshot


class Trial:
    """Steps of the stage that trains, with the weights of the run."""

    def __init__(self, run: PreparedRun, schedule: StageSchedule, retry: OomRetry, alive: Liveness) -> None:
        self.stepper = run.stepper(schedule, retry)
        self.terms = run.networks.terms
        self.alive = alive
        self.dist = run.dist
        self._run = run
        self._schedule = schedule

    @contextmanager
    def batches(self) -> Iterator[Iterator[tuple[Batch, int]]]:
        """Yield the batches of the stage without end, each with its number of images on all processes.

        The state is restored at the end of the block. A signal to stop raises KeyboardInterrupt in the
        iterator.
        """
        state, signals = self.stepper.state, self.alive.signals
        state.is_changing = True
        before = host_copy(snapshot(state))  # the device may have no room for another
        set_recompute(state.autoencoder, self.stepper.retry.settings.recompute)
        with signals.answering(MEASURING), self._run.loader(self._schedule, self.alive) as loader:
            yield self._batches(loader)
        self.stepper.retry.settings.graph = None  # its memory is for the run
        restore(state, before)
        state.is_changing = False

    def _batches(self, loader: TrainLoader) -> Iterator[tuple[Batch, int]]:
        for epoch in count(self.stepper.state.stage.first_epoch):
            for batch in loader.batches(epoch):
                size = len(batch.images)
                stop = self.alive.signals.stop
                images, stopping = self.dist.all_reduce_scalars(size, stop)
                if stopping:
                    raise KeyboardInterrupt  # nothing has been written
                yield batch, int(images)


NAME = "find_lr"
WIDTH, HEIGHT = 1280, 800  # px, of the chart

LOWEST, HIGHEST = 1e-7, 1.0  # learning rates
SMOOTHING = 0.9  # decay of the mean over steps
DIVERGED = 4.0  # the loss is so many times that of the unchanged weights


class Curve(NamedTuple):
    """The loss of each batch before the step with its learning rate; it ends where training diverges."""

    rates: list[float]
    losses: list[float]
    unchanged: list[float]  # losses of the same batches with the weights before the first step

    def smoothed(self) -> np.ndarray:
        """loss / unchanged: its geometric mean up to each step, with exponentially falling weights (S,)."""
        mean, logs = 0.0, []
        for step, (loss, unchanged) in enumerate(zip(self.losses, self.unchanged, strict=True), 1):
            mean = SMOOTHING * mean + (1 - SMOOTHING) * math.log(loss / unchanged)
            logs.append(mean / (1 - SMOOTHING**step))
        return np.exp(logs)


class Suggestion(NamedTuple):
    """Two usual choices of a learning rate."""

    steepest: float  # where the smoothed loss falls fastest, at most half of the rate at which it is lowest
    tenth: float  # of the rate at which the smoothed loss is lowest


def has_diverged(loss: float, unchanged: float) -> bool:
    """Whether the loss of a batch shows that the test is over; true for NaN."""
    return not loss < DIVERGED * unchanged


def suggest(curve: Curve) -> Suggestion:
    """The rates that a curve suggests."""
    smoothed = curve.smoothed()
    rates = np.array(curve.rates)
    lowest = max(1, int(smoothed.argmin()))
    slopes = np.gradient(np.log(smoothed[: lowest + 1]))
    safe = max(1, int((rates[:lowest] <= rates[lowest] / 2).sum()))
    return Suggestion(float(rates[slopes[:safe].argmin()]), float(rates[lowest] / 10))


def find_learning_rate(run: PreparedRun, plan: StagePlan, alive: Liveness) -> None:
    """Measure the curve, draw and print it; nothing else changes."""
    schedule = run.schedule(run.state.stage)
    trial = Trial(run, schedule, run.retry(plan), alive)
    rates = np.geomspace(LOWEST, HIGHEST, run.config.run.find_lr_steps).tolist()
    unchanged = _unchanged_losses(trial, len(rates))
    losses = _losses(trial, rates, unchanged)
    if run.dist.is_main:
        curve = Curve(rates[: len(losses)], losses, unchanged[: len(losses)])
        _report(run.output_dir, run.command.given, curve)


def _unchanged_losses(trial: Trial, steps: int) -> list[float]:
    """The losses of the first batches with the present weights."""
    with trial.batches() as batches:
        return [
            _loss(trial, trial.stepper.losses(batch, images), images)
            for _, (batch, images) in zip(range(steps), batches, strict=False)
        ]


def _losses(trial: Trial, rates: Sequence[float], unchanged: Sequence[float]) -> list[float]:
    """The losses of the same batches before the steps with these learning rates, up to where they diverge."""
    losses: list[float] = []
    with trial.batches() as batches:
        for rate, before, (batch, images) in zip(rates, unchanged, batches, strict=False):
            loss = _loss(trial, trial.stepper.step(batch, images, learning_rate=rate).losses, images)
            if has_diverged(loss, before):
                break
            losses.append(loss)
    return losses


def _loss(trial: Trial, sums: dict[str, Tensor], images: int) -> float:
    """The loss of a batch from sums over its images."""
    metrics = RunningMetrics()
    metrics.add(sums, images, [])
    trial.alive.beat()
    return loss_record(metrics.all_reduced_means(trial.dist), trial.terms)["loss"]


def _report(folder: Path, options: dict[str, Any], curve: Curve) -> None:
    """Write the curve, and print the suggestions and the command to train with these options."""
    suggestion = suggest(curve)
    write_json(folder / f"{NAME}.json", {**suggestion._asdict(), **curve._asdict()}, indent=1)
    given = {k: v for k, v in options.items() if not k.startswith(NAME)}
    words = command_words({**given, "learning_rate": float(f"{suggestion.steepest:.2g}")})
    console.info(
        f"the loss falls fastest at {suggestion.steepest:.2g}; a tenth of the rate with the lowest loss is "
        f"{suggestion.tenth:.2g}\n"
        f"curve   {folder / NAME}.png and .json\n"
        f"train with: {console.command_line('python', 'train_vae.py', *words)}"
    )
    figure, (axes,) = new_figure(WIDTH, HEIGHT)
    axes.set_title("loss / loss of the unchanged weights, smoothed", loc="left")
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    points = list(zip(curve.rates, curve.smoothed().tolist(), strict=True))
    draw_lines(axes, [Line(BLUE, points)], quantile=0.9)  # the end of a curve that diverges would flatten it
    mark_x(axes, {suggestion.steepest: f"steepest at {suggestion.steepest:.2g}"})
    replace_bytes(folder / f"{NAME}.png", png(figure))
