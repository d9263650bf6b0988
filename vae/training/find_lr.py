"""--find_lr: the learning rate range test of Smith (2017), with real steps on a copy of everything.

The rate rises geometrically, and the loss of each batch is measured before its step. Batches differ more than
the loss falls, so each loss is divided by that of the unchanged weights for the same images, crops and noise.
Two rates are common choices: where this ratio falls fastest, and a tenth of the rate at which it is lowest.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from vae import console
from vae.config.flags import command_words
from vae.files import atomic_path, write_json
from vae.training.context import RunContext, StageContext
from vae.training.loop import update_weights
from vae.training.output.line_chart import BLUE, GREEN, GREY, ORANGE, Box, Line, draw_chart
from vae.training.state import TrainingState
from vae.training.step_log import RunningMetrics, loss_record
from vae.training.trial_steps import trial_steps

LOWEST, HIGHEST = 1e-7, 1.0
SMOOTHING = 0.9  # decay of the mean over steps
DIVERGED = 4.0  # the loss is so many times that of the unchanged weights
NAME = "find_lr"
WIDTH, HEIGHT = 1280, 800  # px, of the chart
COLOURS = (BLUE, ORANGE, GREEN, GREY)


class Curve(NamedTuple):
    """The loss of each batch before the step with its learning rate; it ends where training diverges."""

    seed: int
    rates: list[float]
    losses: list[float]
    unchanged: list[float]  # losses of the same batches with the weights before the first step

    def smoothed(self) -> np.ndarray:
        """loss / unchanged: its geometric mean up to each step, with exponentially falling weights (S,)."""
        mean, found = 0.0, []
        for step, (loss, unchanged) in enumerate(zip(self.losses, self.unchanged, strict=True), 1):
            mean = SMOOTHING * mean + (1 - SMOOTHING) * math.log(loss / unchanged)
            found.append(mean / (1 - SMOOTHING**step))
        return np.exp(found)


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


class Suggestion(NamedTuple):
    """Two usual choices of a learning rate."""

    steepest: float  # where the smoothed loss falls fastest
    tenth: float  # of the rate at which the smoothed loss is lowest


def find_learning_rate(run: RunContext, ctx: StageContext, state: TrainingState) -> None:
    """Measure a curve per seed, draw and print them; nothing else changes. `ctx` records nothing."""
    options = run.config.run
    rates, curves = np.geomspace(LOWEST, HIGHEST, options.find_lr_steps).tolist(), []
    for seed in range(options.seed, options.seed + options.find_lr_seeds):
        seeded = replace(
            run,
            config=replace(run.config, run=replace(options, seed=seed)),
            training_set=replace(run.training_set, order=run.training_set.images.order(seed)),
        )
        unchanged = _losses(seeded, ctx, state, [0.0] * len(rates), [])
        losses = _losses(seeded, ctx, state, rates, unchanged)
        curve = Curve(seed, rates[: len(losses)], losses, unchanged[: len(losses)])
        found = suggest(curve)
        curves.append(curve)
        console.info(
            f"seed {seed}: loss {losses[0]:.4g}, falls fastest at {found.steepest:.2g}, is lowest at "
            f"{10 * found.tenth:.2g} ({min(curve.smoothed()):.3f} times the first)"
        )
    _report(run, curves)


def suggest(curve: Curve) -> Suggestion:
    """The rates that a curve suggests."""
    smoothed, rates = curve.smoothed(), np.array(curve.rates)
    lowest = max(1, int(smoothed.argmin()))
    slopes = np.gradient(np.log(smoothed[: lowest + 1]))
    return Suggestion(float(rates[slopes.argmin()]), float(rates[lowest] / 10))


def _losses(
    run: RunContext, ctx: StageContext, state: TrainingState, rates: Sequence[float], limits: Sequence[float]
) -> list[float]:
    """The losses before the steps with these learning rates, up to where they diverge from `limits`."""
    found: list[float] = []
    with trial_steps(run, ctx, state) as batches:
        for rate, (batch, images) in zip(rates, batches, strict=False):
            metrics = RunningMetrics()
            sums, norms = update_weights(run, ctx, state, batch, images, learning_rate=rate)
            metrics.add(sums, images, norms)
            ctx.watchdog.beat()
            loss = loss_record(metrics.all_reduced_means(run.dist), run.config.loss)["loss"]
            if limits and not loss < DIVERGED * limits[len(found)]:  # NaN included
                break
            found.append(loss)
    return found


def _report(run: RunContext, curves: Sequence[Curve]) -> None:
    """Write the curves, and print the suggestions and the command to train."""
    if not run.dist.is_main:
        return
    found = [suggest(curve) for curve in curves]
    steepest, tenth = map(Spread.of, zip(*found, strict=True))
    folder = run.output_dir
    content = {
        "steepest": steepest._asdict(),
        "tenth_of_minimum": tenth._asdict(),
        "curves": [{**curve._asdict(), **one._asdict()} for curve, one in zip(curves, found, strict=True)],
    }
    write_json(folder / f"{NAME}.json", content, indent=1)
    _draw(folder / f"{NAME}.png", curves, steepest.middle)
    given = {k: v for k, v in run.given.items() if not k.startswith(NAME)}
    words = command_words({**given, "learning_rate": float(f"{steepest.middle:.2g}")})
    console.info(
        f"steepest descent of the loss: {steepest}; a tenth of the rate with the lowest loss: {tenth}\n"
        f"curves  {folder / NAME}.png and .json\n"
        f"train with: {console.command_line('python', 'train_vae.py', *words)}"
    )


def _draw(path: Path, curves: Sequence[Curve], chosen: float) -> None:
    """Draw the smoothed losses over the steps, with marks at powers of ten and at the chosen rate."""
    steps = max(len(curve.rates) for curve in curves)
    longest = next(curve for curve in curves if len(curve.rates) == steps)
    marks = {}
    for exponent in range(round(math.log10(LOWEST)), round(math.log10(HIGHEST)) + 1):
        at = float(np.interp(exponent, np.log10(longest.rates), np.arange(steps), left=-1, right=-1))
        if at >= 0:
            marks[at] = f"1e{exponent}"
    marks[float(np.interp(math.log10(chosen), np.log10(longest.rates), np.arange(steps)))] = ""
    lines = [
        Line(f"seed {curve.seed}", colour, list(enumerate(curve.smoothed().tolist())))
        for curve, colour in zip(curves, itertools.cycle(COLOURS))
    ]
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    # The end of a curve that diverges would flatten the rest.
    box, title = (
        Box(16, 16, WIDTH - 16, HEIGHT - 16),
        f"loss / loss of the unchanged weights, smoothed, by learning rate; steepest at {chosen:.2g}",
    )
    draw_chart(
        ImageDraw.Draw(image), box, title, lines, last_x=steps - 1, marks=marks, quantile=0.9, font_size=16
    )
    with atomic_path(path) as temporary:
        image.save(temporary, format="PNG")
