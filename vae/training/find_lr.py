"""--find_lr: a learning rate range test (Smith 2017) with real steps, which are undone.

The rate rises geometrically, and the loss of each batch is measured before its step. Batches differ more than
the loss falls, so each loss is divided by that of the unchanged weights for the same images, crops and noise.
Two rates are common choices: where this ratio falls fastest, and a tenth of the rate at which it is lowest.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from vae.charts import BLUE, GREEN, GREY, ORANGE, Line, draw_lines, mark_x, new_figure, png
from vae.config.flags import command_words
from vae.data.dataset import Batch
from vae.data.loading import TrainLoader
from vae.model.autoencoder import set_recompute
from vae.system import console
from vae.system.files import replace_bytes, write_json
from vae.training.datasets import TrainingSet
from vae.training.liveness import MEASURING, Liveness
from vae.training.recorder import RunningMetrics, loss_record
from vae.training.saver import HostCopy
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
        before = HostCopy().of(snapshot(state))  # the device may have no room for another
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
COLOURS = (BLUE, ORANGE, GREEN, GREY)

LOWEST, HIGHEST = 1e-7, 1.0  # learning rates
SMOOTHING = 0.9  # decay of the mean over steps
DIVERGED = 4.0  # the loss is so many times that of the unchanged weights


class Curve(NamedTuple):
    """The loss of each batch before the step with its learning rate; it ends where training diverges."""

    seed: int
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


class Spread(NamedTuple):
    """A rate of several seeds."""

    middle: float  # median of the logarithms
    least: float
    most: float

    @classmethod
    def of(cls, rates: Sequence[float]) -> "Spread":
        """Median and range."""
        return cls(float(np.exp(np.median(np.log(rates)))), min(rates), max(rates))

    def __str__(self) -> str:
        return f"{self.middle:.2g} ({self.least:.2g} to {self.most:.2g})"


def find_learning_rate(run: PreparedRun, plan: StagePlan, alive: Liveness) -> None:
    """Measure a curve per seed, draw and print them; nothing else changes."""
    options = run.config.run
    schedule = run.schedule(run.state.stage)
    rates = np.geomspace(LOWEST, HIGHEST, options.find_lr_steps).tolist()
    curves = []
    retry = run.retry(plan)
    for seed in range(options.seed, options.seed + options.find_lr_seeds):
        order = TrainingSet.of(run.training_set.images, seed, run.config.data).order
        seeded = replace(
            run,
            config=replace(run.config, run=replace(options, seed=seed)),
            training_set=replace(run.training_set, order=order),
        )
        trial = Trial(seeded, schedule, retry, alive)
        unchanged = _unchanged_losses(trial, len(rates))
        losses = _losses(trial, rates, unchanged)
        curve = Curve(seed, rates[: len(losses)], losses, unchanged[: len(losses)])
        suggestion = suggest(curve)
        curves.append(curve)
        console.info(
            f"seed {seed}: loss {losses[0]:.4g}, falls fastest at {suggestion.steepest:.2g}, is lowest at "
            f"{10 * suggestion.tenth:.2g} ({min(curve.smoothed()):.3f} times the first)"
        )
    if run.dist.is_main:
        _report(run.output_dir, run.command.given, curves)


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


def _report(folder: Path, options: dict[str, Any], curves: Sequence[Curve]) -> None:
    """Write the curves, and print the suggestions and the command to train with these options."""
    suggestions = [suggest(curve) for curve in curves]
    steepest, tenth = map(Spread.of, zip(*suggestions, strict=True))
    content = {
        "steepest": steepest._asdict(),
        "tenth_of_minimum": tenth._asdict(),
        "curves": [
            {**curve._asdict(), **suggestion._asdict()}
            for curve, suggestion in zip(curves, suggestions, strict=True)
        ],
    }
    write_json(folder / f"{NAME}.json", content, indent=1)
    given = {k: v for k, v in options.items() if not k.startswith(NAME)}
    words = command_words({**given, "learning_rate": float(f"{steepest.middle:.2g}")})
    console.info(
        f"steepest descent of the loss: {steepest}; a tenth of the rate with the lowest loss: {tenth}\n"
        f"curves  {folder / NAME}.png and .json\n"
        f"train with: {console.command_line('python', 'train_vae.py', *words)}"
    )
    _draw(folder / f"{NAME}.png", curves, steepest.middle)


def _draw(path: Path, curves: Sequence[Curve], chosen: float) -> None:
    """Draw the smoothed losses over the learning rates, with a mark at the chosen rate."""
    figure, (axes,) = new_figure(WIDTH, HEIGHT)
    axes.set_title("loss / loss of the unchanged weights, smoothed", loc="left")
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    lines = [
        Line(colour, list(zip(curve.rates, curve.smoothed().tolist(), strict=False)), f"seed {curve.seed}")
        for curve, colour in zip(curves, itertools.cycle(COLOURS))
    ]
    draw_lines(axes, lines, quantile=0.9)  # the end of a curve that diverges would flatten the rest
    mark_x(axes, {chosen: f"steepest at {chosen:.2g}"})
    replace_bytes(path, png(figure))
