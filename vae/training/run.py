"""A whole run, top to bottom: prepare, train stage after stage, ship, say what came out."""

import json
from typing import Any

from vae.config.errors import EXIT_SAVED_RESUMABLE
from vae.config.options import flatten
from vae.training.checkpoints import latest_command
from vae.training.distributed import Processes
from vae.training.export import LATENT_IMAGES, ship
from vae.training.logbook import Logbook, say
from vae.training.loop import Outcome, train_stage
from vae.training.milestones import measure_start, save_samples, validate_end
from vae.training.setup import Run, prepare_run
from vae.training.signals import StopSignals
from vae.training.stage_memory import begin_measuring, plan_stage, record_measured
from vae.training.stages import Stage, current_stage
from vae.training.summary import after_run, before_stage


def train(given: dict[str, Any]) -> int:
    """Train as the `given` option values say; returns the exit code, raises UserError for a mistake."""
    processes = Processes.start(given.get("device", "auto"))
    try:
        with StopSignals() as signals:
            run = prepare_run(given, processes)
            return _train_stages(run, signals)
    finally:
        processes.close()


def _train_stages(run: Run, signals: StopSignals) -> int:
    stage = current_stage(run.stages, run.state.position.epoch)
    done = _why_done(run, stage)
    if done:
        return _already_done(run, done)
    plans = {later: plan_stage(run, later) for later in run.stages[run.stages.index(stage) :]}
    _open_folder(run)
    logbook = Logbook(run.output_dir, run.state.position.step, run.processes.is_main)
    try:
        outcome = Outcome.FINISHED
        while stage is not None and outcome is Outcome.FINISHED:
            plan = plans.get(stage) or plan_stage(run, stage)
            run.use(plan.memory.recompute, plan.memory.micro_batch)
            if run.processes.is_main:
                say(before_stage(run, stage, plan))
            begin_measuring(run.processes.device)
            measure_start(run, stage, logbook)
            outcome = train_stage(run, stage, logbook, signals)
            record_measured(run, stage, plan, logbook)
            last = stage
            stage = current_stage(run.stages, run.state.position.epoch)
        if outcome is Outcome.SIGNALLED:
            if run.processes.is_main:
                step, command = run.state.position.step, latest_command(run.output_dir)
                say(f"stopped and saved at step {step}; go on with: {command}")
            return EXIT_SAVED_RESUMABLE
        validate_end(run, last, logbook)
        _finish(run, last, logbook)
    finally:
        logbook.close()
    return 0


def _why_done(run: Run, stage: Stage | None) -> str | None:
    """Why there is no step to make; None where there is one."""
    position, limit = run.state.position, run.config.run.max_steps
    if stage is None:
        return f"the run is finished ({position.epoch} epochs)"
    if limit is not None and position.step >= limit:
        return f"the run has made {position.step} steps, which --max_steps {limit} allows: raise it to go on"
    return None


def _already_done(run: Run, reason: str) -> int:
    """Say so; only where the run was stopped after its last step, before it shipped, it ships now."""
    record, checkpoint = run.output_dir / "vae" / "config.json", run.resumed_from
    here = record.exists() and record.stat().st_mtime >= checkpoint.stat().st_mtime
    shipped = run.processes.sum_numbers(here and run.processes.is_main)[0] > 0  # the first process sees it
    if run.processes.is_main:
        say(f"{run.output_dir}: {reason}; {'nothing to do' if shipped else 'writing its vae folder'}")
    if not shipped:
        _open_folder(run)
        logbook = Logbook(run.output_dir, run.state.position.step, run.processes.is_main)
        try:
            _finish(run, current_stage(run.stages, run.state.position.epoch) or run.stages[-1], logbook)
        finally:
            logbook.close()
    return 0


def _open_folder(run: Run) -> None:
    """Make the output folder and write down what the run is about."""
    if run.processes.is_main:
        folder = run.output_dir
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(
            json.dumps(flatten(run.config), indent=2) + "\n", encoding="utf-8"
        )
        held = run.held.names if run.held else []
        split = {"train": run.train_names, "validation": held}
        (folder / "split.json").write_text(json.dumps(split, indent=1) + "\n", encoding="utf-8")
    run.processes.wait()


def _finish(run: Run, stage: Stage, logbook: Logbook) -> None:
    """Ship the weights and say what came out."""
    save_samples(run, stage, logbook)
    if run.processes.is_main:
        dataset = run.train_dataset(stage)
        stride = max(1, len(dataset) // LATENT_IMAGES)  # over all folders, not the first one alone
        crops = (dataset[0, index].image for index in range(0, len(dataset), stride))
        batches = (crop[None].to(run.processes.device) for crop in crops if crop is not None)
        state = run.state
        shipped = ship(
            run.output_dir / "vae",
            state.shipped,
            run.networks,
            batches,
            stage.image_size,
            state.latent_scaling,
        )
        say(after_run(run, shipped))
    run.processes.wait()
