"""train_vae.py --find_lr: a learning rate range test (Smith 2017) with real steps, which are undone.

The rate rises geometrically, and the loss of each batch is measured before its step. Batches differ more than
the loss falls, so each loss is divided by that of the unchanged weights for the same images, crops and noise.
Two rates are common choices: where this ratio falls fastest, and a tenth of the rate at which it is lowest.
"""

import math
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vae.charts import BLUE, Line, draw_lines, mark_x, new_figure, png, write_chart
from vae.config.flags import command_words
from vae.memory.available import limit_memory
from vae.model.autoencoder import set_recompute
from vae.system import console
from vae.system.files import write_json
from vae.training.early_checks import Command
from vae.training.liveness import Liveness
from vae.training.recorder import RunningMetrics, loss_record
from vae.training.run import claim_run_folder, prepared_run
from vae.training.saver import host_copy
from vae.training.setup import PreparedRun
from vae.training.stage_memory import StagePlan, memory_limit
from vae.training.state import restore, snapshot

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
        """Return the geometric mean of loss / unchanged up to each step, with exponential weights (S,)."""
        mean, logs = 0.0, []
        for step, (loss, unchanged) in enumerate(zip(self.losses, self.unchanged, strict=True), 1):
            mean = SMOOTHING * mean + (1 - SMOOTHING) * math.log(loss / unchanged)
            logs.append(mean / (1 - SMOOTHING**step))
        return np.exp(logs)


class Suggestion(NamedTuple):
    """Two usual choices of a learning rate."""

    steepest: float  # where the smoothed loss falls fastest, at most half of the rate at which it is lowest
    tenth: float  # of the rate at which the smoothed loss is lowest


def suggest(curve: Curve) -> Suggestion:
    """Return the rates that a curve suggests."""
    smoothed = curve.smoothed()
    rates = np.array(curve.rates)
    lowest = max(1, int(smoothed.argmin()))
    slopes = np.gradient(np.log(smoothed[: lowest + 1]))
    safe = max(1, int((rates[:lowest] <= rates[lowest] / 2).sum()))
    return Suggestion(float(rates[slopes[:safe].argmin()]), float(rates[lowest] / 10))


def find_lr(command: Command) -> int:
    """Find a learning rate for the first stage of a command that was checked; returns the exit code."""
    with prepared_run(command) as (run, alive, lock):
        plan = run.plan(run.state.stage)
        limit_memory(run.dist.device, memory_limit([plan]))
        run.dist.on_main(lambda: claim_run_folder(run, lock))
        find_learning_rate(run, plan, alive)
    return 0


def find_learning_rate(run: PreparedRun, plan: StagePlan, alive: Liveness) -> None:
    """Measure the curve, draw and print it; nothing else changes."""
    rates = np.geomspace(LOWEST, HIGHEST, run.config.run.find_lr_steps).tolist()
    unchanged = losses_before_steps(run, plan, alive, [0.0] * len(rates))
    losses = losses_before_steps(run, plan, alive, rates, [DIVERGED * loss for loss in unchanged])
    if run.dist.is_main:
        curve = Curve(rates[: len(losses)], losses, unchanged[: len(losses)])
        _report(run.output_dir, run.command.given, curve)


def losses_before_steps(
    run: PreparedRun, plan: StagePlan, alive: Liveness, rates: Sequence[float], limits: Sequence[float] = ()
) -> list[float]:
    """Measure the losses of the first batches before steps with these learning rates, and undo the steps.

    They end where a loss is not below its limit. A signal to stop raises KeyboardInterrupt.
    """
    schedule, state = run.schedule(run.state.stage), run.state
    stepper = run.stepper(plan, schedule)
    settings = stepper.retry.settings
    losses: list[float] = []
    state.is_changing = True
    before = host_copy(snapshot(state))  # the device may have no room for another
    set_recompute(state.autoencoder, settings.recompute)
    with run.loader(schedule, alive) as loader:
        batches = chain.from_iterable(loader.batches(epoch) for epoch in count(state.stage.first_epoch))
        for rate, batch in zip(rates, batches, strict=False):
            images, stopping = run.dist.all_reduce_scalars(len(batch.images), alive.signals.stop)
            if stopping:
                raise KeyboardInterrupt  # nothing has been written
            metrics = RunningMetrics()
            metrics.add(stepper.step(batch, int(images), learning_rate=rate).losses, images, [])
            loss = loss_record(metrics.all_reduced_means(run.dist), run.networks.terms)["loss"]
            alive.beat()
            if limits and not loss < limits[len(losses)]:  # also if it is NaN
                break
            losses.append(loss)
    settings.graph = None  # its memory is for the run
    restore(state, before)
    state.is_changing = False
    return losses


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
    write_chart(folder / f"{NAME}.png", lambda: _draw(curve, suggestion))


def _draw(curve: Curve, suggestion: Suggestion) -> bytes:
    figure, (axes,) = new_figure(WIDTH, HEIGHT)
    axes.set_title("loss / loss of the unchanged weights, smoothed", loc="left")
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    points = list(zip(curve.rates, curve.smoothed().tolist(), strict=True))
    draw_lines(axes, [Line(BLUE, points)], quantile=0.9)  # the end of a curve that diverges would flatten it
    mark_x(axes, {suggestion.steepest: f"steepest at {suggestion.steepest:.2g}"})
    return png(figure)
