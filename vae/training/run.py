"""A whole run, from top to bottom: prepare, train stage after stage, export, report the result."""

from functools import partial
from pathlib import Path
from typing import Any

from vae.config.options import CONTRACT, Config, flatten
from vae.device import is_out_of_memory
from vae.memory.available import limit_memory
from vae.model.recompute import set_recompute
from vae.system import console
from vae.system.errors import EXIT_SAVED_RESUMABLE, NonFiniteError, UserError
from vae.training.between_steps import begin_stage, validate_final
from vae.training.checkpoints.saving import save_alone
from vae.training.checkpoints.writer import CheckpointWriter, copy_fits
from vae.training.context import RunContext, StageContext
from vae.training.datasets import store_aspects
from vae.training.distributed import Distributed
from vae.training.export import finish
from vae.training.loop import Outcome, train_stage
from vae.training.memory.stage_memory import StagePlan, memory_limit, plan_stage, reset_memory_peaks
from vae.training.output.appending import write_json
from vae.training.output.folder_lock import FolderLock
from vae.training.output.logbook import Logbook
from vae.training.output.run_folder import METRICS_NAME, resume_command
from vae.training.output.wandb_run import WandbRun
from vae.training.precheck import contains_run, output_folder
from vae.training.records.stage_report import print_remarks, print_stage, record_memory
from vae.training.recovery.rollback import begin_run, roll_back
from vae.training.recovery.signals import EXPORT, LoadingStoppedError, StopSignals
from vae.training.recovery.watchdog import Watchdog
from vae.training.setup import prepare_run
from vae.training.stages import Stage, current_stage
from vae.training.state import TrainingState
from vae.training.trials.find_lr import find_learning_rate
from vae.training.trials.stage_length import choose_length


def train(given: dict[str, Any]) -> int:
    """Train with the `given` option values; returns the exit code, raises UserError for a user's mistake."""
    options = Config().run
    dist = Distributed.start(given.get("device", "auto"), given.get("hang_minutes", options.hang_minutes))
    console.configure(
        is_main_process=dist.is_main,
        closed_output_remark=f"the output was closed: training continues, its records are in {METRICS_NAME}",
    )
    try:
        with StopSignals(dist.is_main) as signals, FolderLock() as lock, dist.lost_processes_named():
            _lock_folder(lock, output_folder(given), dist, only_run=True)
            run, state = prepare_run(given, dist)
            with Watchdog(run.config.run.hang_minutes, run.output_dir, dist.rank) as watchdog:
                return _train_stages(run, state, signals, lock, watchdog)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(_out_of_memory_line(error, output_folder(given))) from None
    finally:
        console.configure()
        dist.close()


def _out_of_memory_line(error: Exception, folder: Path) -> str:
    """The line about memory that ran out outside of a step, where no setting of the step helps."""
    said = str(error).strip().splitlines()
    resume = f", and resume with: {resume_command(folder)}" if contains_run(folder) else ""
    return (
        f"out of memory outside of a step{f' ({said[0]})' if said else ''}: end other programs, raise the "
        f"limits of this process, or lower --image_size or --num_workers{resume}"
    )


def _lock_folder(lock: FolderLock, folder: Path, dist: Distributed, only_run: bool = False) -> None:
    """Lock the output folder on the main process; with `only_run`, only a folder that contains a run."""
    refusal = None
    if dist.is_main and (contains_run(folder) or not only_run):
        try:
            lock.acquire(folder)
        except UserError as error:
            refusal = error
    if dist.all_reduce_scalars(refusal is not None)[0]:
        raise refusal or UserError(f"--output_dir {folder} is in use: the main process names its user")


def _train_stages(
    run: RunContext, state: TrainingState, signals: StopSignals, lock: FolderLock, watchdog: Watchdog
) -> int:
    stage = current_stage(state.stages, state.position.epoch)
    reason = _why_complete(run, state, stage)
    if stage is None or reason:
        return _report_complete(run, state, reason, lock, watchdog)
    # All stages are planned before the first one starts: a run must not fail hours later.
    plans = {s: _plan(run, s) for s in state.stages[state.stages.index(stage) :]}
    limit_memory(run.dist.device, memory_limit(plans.values()))
    if run.config.run.find_lr or run.config.run.train_minutes is not None:
        logbook = Logbook(run.output_dir, state.position.step, active=False)  # nothing is recorded or saved
        writer = CheckpointWriter(background=False)
        ctx = _stage_context(run, stage, plans[stage], logbook, writer, signals, watchdog)
        if run.config.run.find_lr:
            find_learning_rate(run, ctx, state)
            return 0
        run, stage = _choose_length(run, ctx, state, plans)
    _create_folder(run, lock)
    print_remarks(run, state)
    logbook = Logbook(run.output_dir, state.position.step, run.dist.is_main, _start_wandb(run))
    begin_run(run, state, logbook, state.stability.good, run.resume)
    writer = CheckpointWriter(run.config.run.background_save and copy_fits(run.config, run.dist.device))
    try:
        outcome = Outcome.FINISHED
        while stage is not None and outcome is Outcome.FINISHED:
            plan = plans.get(stage) or _plan(run, stage)  # early stopping moves the later stages
            ctx = _stage_context(run, stage, plan, logbook, writer, signals, watchdog)
            outcome = _run_stage(run, ctx, state)
            stage = current_stage(state.stages, state.position.epoch)
        if outcome is Outcome.SIGNALLED:
            return _report_stopped(run, state, logbook)
        signals.answer = EXPORT
        validate_final(run, ctx, state)
        finish(run, state, ctx.stage, logbook, ctx.baselines, watchdog)
    except LoadingStoppedError:  # in the last validation: the last step is saved
        return _report_stopped(run, state, logbook)
    finally:
        writer.finish()
        logbook.close()
    return 0


def _report_stopped(run: RunContext, state: TrainingState, logbook: Logbook) -> int:
    logbook.draw_results()
    console.info(f"stopped and saved at step {state.position.step}; resume with: {run.resume_command}")
    return EXIT_SAVED_RESUMABLE


def _run_stage(run: RunContext, ctx: StageContext, state: TrainingState) -> Outcome:
    """Train a stage; if it diverges, go back. An error that you can fix is raised after saving."""
    ctx.watchdog.save_alone = partial(save_alone, run, ctx, state)
    ctx.watchdog.beat()
    set_recompute(state.autoencoder, ctx.settings.recompute)
    print_stage(run, ctx, state)
    reset_memory_peaks(run.dist.device)
    diverged, outcome = None, Outcome.FINISHED
    try:
        with run.dist.lost_processes_named():
            begin_stage(run, ctx, state)
            outcome = train_stage(run, ctx, state)
            record_memory(run, ctx, state)
    except NonFiniteError as error:
        diverged = str(error)
    except LoadingStoppedError:
        save_alone(run, ctx, state)
        outcome = Outcome.SIGNALLED
    except UserError as error:
        saved = save_alone(run, ctx, state)
        if saved is None or run.resume_command in str(error):
            raise
        raise type(error)(f"{error}; {saved} is saved, resume with: {run.resume_command}") from error
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            save_alone(run, ctx, state)
        raise
    # Not within the except clause: there, the exception keeps the tensors of the step alive.
    if diverged:
        roll_back(run, ctx, state, diverged)
    return outcome


def _choose_length(
    run: RunContext, ctx: StageContext, state: TrainingState, plans: dict[Stage, StagePlan]
) -> tuple[RunContext, Stage]:
    """The run and its first stage with the number of epochs that --train_minutes means on this machine."""
    index = state.stages.index(ctx.stage)
    run = choose_length(run, ctx, state)
    plans[state.stages[index]] = ctx.plan
    return run, state.stages[index]


def _start_wandb(run: RunContext) -> WandbRun | None:
    """The run in Weights & Biases, for --wandb on the main process."""
    options = run.config.run
    if not (options.wandb and run.dist.is_main):
        return None
    return WandbRun(run.output_dir, options.wandb_project, flatten(run.config))


def _plan(run: RunContext, stage: Stage) -> StagePlan:
    return plan_stage(run.config, stage, run.networks.dtype, run.dist)


def _stage_context(
    run: RunContext,
    stage: Stage,
    plan: StagePlan,
    logbook: Logbook,
    writer: CheckpointWriter,
    signals: StopSignals,
    watchdog: Watchdog,
) -> StageContext:
    settings = plan.step_settings(run.config.speed)
    steps, peak = run.steps_of(stage), run.peak_of(stage)
    return StageContext(stage, steps, peak, plan, settings, logbook, writer, signals, watchdog)


def _why_complete(run: RunContext, state: TrainingState, stage: Stage | None) -> str | None:
    """Why no step remains, or None if one does."""
    position, limit = state.position, run.config.run.max_steps
    if stage is None:
        return f"the run is finished ({position.epoch} epochs)"
    if limit is not None and position.step >= limit:
        return f"the run has made {position.step} of --max_steps {limit} steps: raise it to continue"
    return None


def _report_complete(
    run: RunContext, state: TrainingState, reason: str | None, lock: FolderLock, watchdog: Watchdog
) -> int:
    """Report that training is complete; export now if the last command stopped before it exported."""
    exported, checkpoint = run.output_dir / "vae" / "config.json", run.resumed_from
    assert checkpoint is not None  # a new run has steps to make
    is_newer = exported.exists() and exported.stat().st_mtime >= checkpoint.stat().st_mtime
    is_exported = (
        run.dist.all_reduce_scalars(is_newer and run.dist.is_main)[0] > 0
    )  # the main process decides
    console.info(
        f"{run.output_dir}: {reason}; {'nothing to do' if is_exported else 'writing its vae folder'}"
    )
    if not is_exported:
        stage = current_stage(state.stages, state.position.epoch) or state.stages[-1]
        _create_folder(run, lock)
        logbook = Logbook(run.output_dir, state.position.step, run.dist.is_main)
        try:
            finish(run, state, stage, logbook, {}, watchdog)
        finally:
            logbook.close()
    return 0


def _create_folder(run: RunContext, lock: FolderLock) -> None:
    """Create and lock the output folder, with the configuration and the split of the images."""
    folder = run.output_dir
    if run.dist.is_main:
        folder.mkdir(parents=True, exist_ok=True)
    _lock_folder(lock, folder, run.dist)
    if run.dist.is_main:
        split = {"train": run.training_set.images.record(), "validation": []}
        if run.validation_set:
            split["validation"] = run.validation_set.record()
        write_json(folder / "config.json", {**flatten(run.config), CONTRACT: run.contract}, indent=2)
        write_json(folder / "split.json", split, indent=1)
        store_aspects(folder, run.training_set)
    run.dist.barrier()
