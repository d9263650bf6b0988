"""--train_minutes: the number of epochs of a stage, from the measured speed of a few steps."""

import time
from dataclasses import replace

from vae.config.recipes import recipe_values
from vae.system import console
from vae.training.memory.stage_memory import StagePlan
from vae.training.parts import PreparedRun
from vae.training.records.duration import MINUTE, duration_text
from vae.training.recovery.watchdog import Liveness
from vae.training.stages import StageSteps, replace_stage
from vae.training.trials.trial_steps import Trial

MIN_STEPS = 100  # benchmarks/LOG.md, "The demo": shorter runs may end below their own start
MAX_EPOCHS = 1000  # only reached with few images, which the network memorizes long before
MEASURED_SECONDS = 5.0  # of steps, and at least MEASURED_STEPS of them if that takes at most MAX_SECONDS
MEASURED_STEPS = 5
MAX_SECONDS = 20.0


def choose_length(run: PreparedRun, plan: StagePlan, alive: Liveness) -> PreparedRun:
    """Choose the number of epochs of the stage that begins, and print it.

    Returns the run with this --num_epochs instead of --train_minutes; its state gets the changed stages.
    """
    options, state = run.config.run, run.state
    assert options.train_minutes is not None
    schedule = run.schedule(state.stage)
    seconds = measure_step(Trial(run, schedule, run.retry(plan), alive))
    num_epochs, limit = epochs_for(options.train_minutes * MINUTE, seconds, schedule.steps)
    changed = replace(state.stage, num_epochs=num_epochs)
    console.info(_length_line(run, run.steps(changed), seconds, limit))
    state.stages = replace_stage(state.stages, state.stage, changed)
    state.stage = changed
    options = replace(options, num_epochs=num_epochs, train_minutes=None)
    return replace(run, config=replace(run.config, run=options))


def epochs_for(seconds: float, seconds_per_step: float, steps: StageSteps) -> tuple[int, str]:
    """The number of epochs that take about `seconds`, and the limit if it is another number."""
    least = -(-MIN_STEPS // steps.per_epoch)  # rounded up
    wanted = round(seconds / (seconds_per_step * steps.per_epoch))
    if wanted < least:
        return least, f" (the minimum: {MIN_STEPS} steps and one epoch)"
    if wanted > MAX_EPOCHS:
        return MAX_EPOCHS, " (the maximum; --num_epochs may be larger)"
    return wanted, ""


def _length_line(run: PreparedRun, steps: StageSteps, seconds_per_step: float, limit: str) -> str:
    """The chosen number of epochs, with the flag that asked for it."""
    options = run.config.run
    assert options.train_minutes is not None
    flag = f"--train_minutes {options.train_minutes:g}"
    if options.profile:
        recipe = recipe_values(options.profile, has_gpu=run.dist.device.type == "cuda")
        if recipe.get("train_minutes") == options.train_minutes:
            flag = f"--profile {options.profile}"
    expected = duration_text(steps.total * seconds_per_step)
    speed = steps.images / seconds_per_step
    return f"{flag}: {steps.num_epochs} epochs{limit}, about {expected} at {speed:.1f} images/s"


def measure_step(trial: Trial) -> float:
    """Seconds per step, from the first real steps of the stage; all that they change is restored.

    The first step is not measured: it compiles kernels and allocates memory.
    """
    started, dist = 0.0, trial.dist
    with trial.batches() as batches:
        for steps, (batch, images) in enumerate(batches):
            trial.stepper.step(batch, images)
            dist.synchronize()
            now = time.perf_counter()
            if steps == 0:
                started = now
                continue
            # The processes must agree when to stop: the mean over all of them.
            seconds = dist.all_reduce_scalars(now - started)[0] / dist.world_size
            if seconds >= MAX_SECONDS or (seconds >= MEASURED_SECONDS and steps >= MEASURED_STEPS):
                break
    return seconds / steps
