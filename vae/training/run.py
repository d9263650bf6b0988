"""A whole run, from top to bottom: prepare, train stage after stage, export, report the result."""

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vae.config.flags import trainer_options
from vae.config.options import PROVENANCE, flatten
from vae.device import is_out_of_memory
from vae.interop.vae_path import METRICS_NAME
from vae.memory.available import limit_memory
from vae.model.activation_scale import scale_activations
from vae.model.autoencoder import set_recompute
from vae.system import console
from vae.system.errors import EXIT_SAVED_RESUMABLE, LostProcessError, NonFiniteError, UserError
from vae.system.files import claim_folder
from vae.training.checkpoints import abandon_newer, check_newest, position_name
from vae.training.distributed import Distributed
from vae.training.early_checks import Command, check_command
from vae.training.export import (
    LATENT_IMAGES,
    check_export_folder,
    is_exported,
    latent_constants,
    write_export,
)
from vae.training.liveness import Liveness, LoadingStoppedError, StopSignals, Watchdog
from vae.training.logbook import Logbook, start_wandb, try_to_write_json
from vae.training.loop import StageEnd, TrainingLoop
from vae.training.precision import activations_of
from vae.training.report import next_command, print_remarks, print_stage, progress_line, result_lines
from vae.training.run_folder import RUN_COMMAND, FolderLock, contains_run
from vae.training.saver import CheckpointWriter, Saver, copy_fits, end_diverged
from vae.training.schedule import StageSchedule
from vae.training.setup import PreparedRun, begin_stability, prepare_run
from vae.training.stability import raise_if_diverged
from vae.training.stage_memory import OomRetry, StagePlan, memory_limit, record_memory, reset_memory_peaks
from vae.training.stages import Stage, current_stage, stages_left
from vae.training.validation import Metrics


def train(given: dict[str, Any]) -> int:
    """Train with the `given` option values; returns the exit code, raises UserError for a user's mistake."""
    return train_checked(check_command(trainer_options(given)))


def train_checked(command: Command) -> int:
    """Train as `train` does, with a command that was checked before PyTorch was imported."""
    with prepared_run(command) as (prepared, alive, lock):
        return _Run(prepared, alive, lock).train()


@contextmanager
def prepared_run(command: Command) -> Iterator[tuple[PreparedRun, Liveness, FolderLock]]:
    """Prepare the run of a checked command, in a context that joins its processes and answers signals."""
    dist = Distributed.start(command.value("device"), command.value("hang_minutes"))
    console.configure(
        is_main_process=dist.is_main,
        closed_output_remark=f"the output was closed: training continues, its records are in {METRICS_NAME}",
    )
    try:
        with StopSignals(dist.is_main) as signals, FolderLock() as lock, dist.lost_processes_named():
            folder = command.output_dir
            dist.on_main(lambda: lock.acquire(folder) if contains_run(folder) else None)
            prepared = prepare_run(command, dist)
            minutes = prepared.config.run.hang_minutes
            with Watchdog(minutes, command.resume_command, dist.rank) as watchdog:
                yield prepared, Liveness(watchdog, signals), lock
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(_out_of_memory_line(error, command)) from None
    finally:
        console.configure()
        dist.close()


def claim_run_folder(run: PreparedRun, lock: FolderLock) -> None:
    """Mark and lock the folder. The run has the id of its marker.

    UserError if another command has begun a run there since the set-up, which found and locked none.
    """
    state, folder = run.state, run.output_dir
    was_locked = lock.is_held
    marker = claim_folder(folder, RUN_COMMAND, folder_id=state.identity.id)
    state.identity = replace(state.identity, id=marker.id)
    lock.acquire(folder)
    if not was_locked and contains_run(folder):
        raise UserError(
            f"--output_dir {folder}: another command has begun a run in it meanwhile: use another folder, or "
            f"resume: {run.command.resume_command}"
        )
    check_export_folder(folder, marker.id, "start again")


def _out_of_memory_line(error: Exception, command: Command) -> str:
    """Return the line about memory that ran out outside of a step, where none of its settings helps."""
    message = str(error).strip().splitlines()
    resume = ""
    if contains_run(command.output_dir):
        resume = f", and resume with: {command.resume_command}"
    return (
        f"out of memory outside of a step{f' ({message[0]})' if message else ''}: end other programs, raise "
        f"the limits of this process, or lower --image_size or --num_workers{resume}"
    )


def _plan_key(stage: Stage) -> tuple[int, int]:
    """Return the values that decide the plan of a stage."""
    return stage.image_size, stage.batch_size


class _Run:
    """A prepared run in its folder."""

    def __init__(self, prepared: PreparedRun, alive: Liveness, lock: FolderLock) -> None:
        self.prepared = prepared
        self.alive = alive
        self.lock = lock
        self.config = prepared.config
        self.folder = prepared.output_dir
        self.state = prepared.state
        self.dist = prepared.dist

    def train(self) -> int:
        """Train stage after stage, and export; returns the exit code."""
        stage = current_stage(self.state.stages, self.state.position)
        limit = self.config.run.max_steps
        if stage is None or (limit is not None and self.state.position.step >= limit):
            return self._report_complete(stage)
        # All stages are planned before the first one starts: a run must not fail hours later.
        left = stages_left(self.state.stages, self.state.position)
        plans = {_plan_key(later): self.prepared.plan(later) for later in left}
        limit_memory(self.dist.device, memory_limit(plans.values()))
        self._create_folder()
        print_remarks(self.prepared)
        with self._logbook() as logbook, closing(self._saver()) as saver:
            try:
                end, loop = self._train_stages(stage, plans, saver, logbook)
                if end is not StageEnd.SIGNALLED:
                    loop.validate_final()
                    self.alive.signals.exports = True
                    checkpoint = self.folder / position_name(self.state.position)
                    stepper = loop.stepper
                    baselines = loop.validator.baselines if loop.validator else {}
                    self._finish(stepper.schedule, stepper.retry, logbook, baselines, checkpoint)
                    return 0
            except LoadingStoppedError:  # in the last validation: the last step is saved
                pass
            return self._report_stopped(logbook)

    def _train_stages(
        self, stage: Stage | None, plans: dict[tuple[int, int], StagePlan], saver: Saver, logbook: Logbook
    ) -> tuple[StageEnd, TrainingLoop]:
        """Train `stage` and the later ones; returns how the last one ended, and its loop."""
        provenance = self.prepared.provenance
        logbook.record("run", self.state.position.step, provenance.run_record(self.state.identity))
        saver.note_good()
        end = StageEnd.FINISHED
        while stage is not None and end is StageEnd.FINISHED:
            self.state.stage = stage
            plan = plans[_plan_key(stage)]
            loop = self.prepared.loop(plan, self.prepared.schedule(stage), saver, logbook, self.alive)
            end = self._train_stage(loop, plan)
            stage = current_stage(self.state.stages, self.state.position)
        return end, loop

    def _train_stage(self, loop: TrainingLoop, plan: StagePlan) -> StageEnd:
        """Train a stage. An error that you can fix is raised after saving, unless training has diverged."""
        saver = loop.saver
        schedule = loop.stepper.schedule
        settings = loop.stepper.retry.settings
        self.alive.watchdog.save_alone = saver.save_alone
        self.alive.beat()
        set_recompute(self.state.autoencoder, settings.recompute)
        print_stage(self.prepared, schedule, plan)
        reset_memory_peaks(self.dist.device)
        try:
            with self.dist.lost_processes_named():
                loop.begin()
                with self.prepared.loader(schedule, self.alive) as loader:
                    end = loop.train(loader)
                record_memory(loop.logbook, self.state, plan, settings)
                return end
        except NonFiniteError as error:
            self.dist.on_main(partial(end_diverged, saver, loop.logbook, str(error), schedule.peak))
            raise
        except LoadingStoppedError:
            saver.save_alone()
            return StageEnd.SIGNALLED
        except LostProcessError as error:
            # Nothing is saved: on a card, the weights wait for sums of gradients that never come
            raise LostProcessError(f"{error}; resume with: {saver.resume_command}") from error
        except UserError as error:
            saved = saver.save_alone()
            if saved is None or saver.resume_command in str(error):
                raise
            raise type(error)(f"{error}; {saved} is saved, resume with: {saver.resume_command}") from error
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                saver.save_alone()
            raise
        finally:
            settings.graph = None  # its memory is for the next stage, even if `loop` lives on

    def _finish(
        self,
        schedule: StageSchedule,
        retry: OomRetry,
        logbook: Logbook,
        baselines: dict[str, Metrics],
        checkpoint: Path,
    ) -> None:
        """Export the weights and print the result beside the `baselines` of the last stage.

        `checkpoint` is the file with these weights.
        """
        run = self.prepared
        state = self.state
        run.samples(retry, logbook, self.alive).save()
        logbook.draw_results()
        self.alive.beat()
        failure, shown = None, ""
        if not self.dist.is_main:
            self.alive.watchdog.end()  # it waits while the main process exports
        else:
            crops = self._crops
            constants = latent_constants(state.eval_model, run.networks, crops(), state.latent_constants)
            scale_activations(state.eval_model, 1.0)  # in other programs it has none
            overflows = activations_of(state.eval_model, crops()).may_overflow_fp16
            try:
                command = run.command.resume_command
                shown = write_export(self.folder, state, constants, checkpoint, command, overflows)
            except NonFiniteError as error:
                failure = str(error)
        raise_if_diverged(self.dist, failure)
        lines = [
            progress_line(state, schedule.steps),
            *result_lines(self.folder, run.config, state, baselines, shown, schedule),
            f"next    {next_command(self.folder, run.provenance.resumed_from, state)}",
        ]
        console.info("\n".join(lines))

    def _crops(self) -> Iterator[torch.Tensor]:
        """Yield training crops for the constants of the export; the watchdog waits for each."""
        for crop in self.prepared.crops(LATENT_IMAGES):
            self.alive.beat()
            yield crop

    def _report_stopped(self, logbook: Logbook) -> int:
        logbook.draw_results()
        step = self.state.position.step
        console.info(f"stopped and saved at step {step}; resume with: {self.prepared.command.resume_command}")
        return EXIT_SAVED_RESUMABLE

    def _report_complete(self, stage: Stage | None) -> int:
        """Report that training is complete; export now if the last command stopped before it exported."""
        run = self.prepared
        position = self.state.position
        in_steps = self.state.stages[-1].num_steps is not None
        length = f"{position.step} steps" if in_steps else f"{position.epoch} epochs"
        reason = f"the run is finished ({length})"
        if stage is not None:
            limit = run.config.run.max_steps
            reason = f"the run has made {position.step} of --max_steps {limit} steps: raise it to continue"
        checkpoint = run.provenance.resumed_from
        assert checkpoint is not None  # a new run has steps to make
        self.dist.on_main(partial(check_newest, self.folder, checkpoint, reason))
        is_done = self.dist.is_main and is_exported(self.folder, checkpoint)
        is_done = self.dist.all_reduce_scalars(is_done)[0] > 0
        action = "nothing to do" if is_done else "writing its vae folder"
        more = "; --new_stage begins another stage, of --num_epochs or --num_steps" if stage is None else ""
        console.info(f"{self.folder}: {reason}; {action}{more}")
        if not is_done:
            self._create_folder()
            self.alive.signals.exports = True
            with self._logbook() as logbook:
                self._finish(run.schedule(self.state.stage), run.retry(), logbook, {}, checkpoint)
        return 0

    # ---- the folder --------------------------------------------------------------------------------------

    def _create_folder(self) -> None:
        """Create and lock the output folder, with the configuration and the split of the images."""
        run = self.prepared

        def create() -> None:
            claim_run_folder(run, self.lock)
            abandon_newer(self.folder, self.state.position.step)
            validation = run.validation_set.record() if run.validation_set else []
            split = {"train": run.training_set.record(), "validation": validation}
            config = {**flatten(run.config), PROVENANCE: run.provenance.samples}
            try_to_write_json(self.folder / "config.json", config, indent=2)
            try_to_write_json(self.folder / "split.json", split, indent=1)

        self.dist.on_main(create)

    @contextmanager
    def _logbook(self) -> Iterator[Logbook]:
        """Open the records of the run; with --wandb also in W&B, whose refusal ends all processes."""
        options = self.config.run
        wandb = list[Any]()
        if options.wandb:
            arguments = self.folder, options.wandb_project, flatten(self.config)
            self.dist.on_main(lambda: wandb.append(start_wandb(*arguments)))
        logbook = Logbook(self.folder, self.state.position.step, self.dist.is_main, self.dist.rank)
        try:
            yield logbook
        finally:
            logbook.close()
            for run in wandb:
                with suppress(Exception):  # whatever it is, a logger must not end a run
                    run.finish()

    def _saver(self) -> Saver:
        run = self.prepared
        background = run.config.run.background_save and copy_fits(run.config, self.dist.device)
        writer = CheckpointWriter(background)
        resume = run.command.resume_command
        stability = begin_stability(run)
        return Saver(run.config, self.state, run.provenance, stability, writer, self.dist, resume)
