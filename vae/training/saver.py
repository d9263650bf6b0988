"""Save and prune the checkpoints of a run, and go back to a good one after a divergence."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map

from vae.config.options import CHECKPOINT_MINUTES, Config, flatten
from vae.device import is_out_of_memory
from vae.interop.checkpoint_file import CheckpointContent, save_checkpoint
from vae.memory.available import available_bytes
from vae.memory.plan import checkpoint_bytes
from vae.system import console
from vae.system.errors import NonFiniteError, UserError
from vae.system.files import read_json, write_json
from vae.system.host import GIB
from vae.training.checkpoints import (
    abandon_newer,
    list_checkpoints,
    position_name,
    prune,
    saved_step,
    stage_ends,
)
from vae.training.distributed import Distributed
from vae.training.logbook import Logbook
from vae.training.provenance import Provenance, write_run
from vae.training.stability import NOT_FINITE, Stability, raise_if_diverged
from vae.training.stages import Position, Stage, current_stage
from vae.training.state import TrainingState, checkpoint_content
from vae.training.validation import Metrics


def copy_fits(config: Config, device: torch.device) -> bool:
    """Whether main memory has room for the copy; on a CPU, the plan of the step includes it."""
    needed = checkpoint_bytes(config)
    available = available_bytes(torch.device("cpu"))
    if device.type == "cpu" or needed <= available:
        return True
    console.info(
        f"--background_save needs {needed / GIB:.1f} GiB of main memory, but only {available / GIB:.1f} GiB "
        "may be used: saves make training wait"
    )
    return False


def host_copy(value: Any) -> Any:
    """Copy nested data with its tensors to host memory; the copy is complete when this returns.

    Pinned memory, to which a GPU copies faster, comes from PyTorch's cache of it.
    """

    def copied(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return host.copy_(tensor.detach(), non_blocking=True)

    copy = tree_map(copied, value)
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    return copy


class CheckpointWriter:
    """Writes the checkpoints of a run, at most one at a time. The main process uses it, between steps."""

    def __init__(self, background: bool) -> None:
        """With `background`, a save only copies the state; without, it also waits for the file."""
        self._background = background
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._writing: Future[str | None] | None = None
        self._failure: str | None = None  # why the last checkpoint is not on disk

    def save(self, path: Path, content: CheckpointContent, prune: Callable[[], object]) -> None:
        """Save a checkpoint, then `prune`; waits for the previous one. A failure is printed."""
        self.finish()
        self._writing = None
        if self._background and (copy := self._copied(content)) is not None:
            self._writing = self._thread.submit(_write, path, copy, prune)
        else:
            self._failure = _write(path, content, prune)

    def _copied(self, content: CheckpointContent) -> Any:
        """Copy the content to host memory; None, reported once, if there is too little of it."""
        try:
            return host_copy(content)
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and not is_out_of_memory(error):
                raise
        console.info("--background_save: no memory for a copy of the weights: saves make training wait")
        self._background = False
        return None

    def finish(self) -> str | None:
        """Wait for the file under way; returns why the last checkpoint is not on disk."""
        if self._writing is not None:
            self._failure = self._writing.result()
        return self._failure


def _write(path: Path, content: CheckpointContent, prune: Callable[[], object]) -> str | None:
    """Write a checkpoint, then prune; returns why it is not on disk."""
    try:
        save_checkpoint(path, content)
    except OSError as error:
        console.warning(
            f"{path} is not saved: {error}; older checkpoints are unchanged, the next save tries again"
        )
        return str(error)
    try:
        prune()
    except OSError as error:
        console.warning(f"an older checkpoint cannot be removed: {error}; the next save tries again")
    return None


class SaveReason(Enum):
    """Why a checkpoint is saved."""

    DUE = auto()  # skipped while training may be diverging
    REQUESTED = auto()  # by a signal
    STOP = auto()  # the run ends with it: it must be on disk


@dataclass
class Saver:
    """Saves the state of a run in its folder."""

    config: Config
    state: TrainingState
    provenance: Provenance
    stability: Stability
    writer: CheckpointWriter
    dist: Distributed
    resume_command: str
    saved_at: float = field(default_factory=time.monotonic)  # or when it was created

    def __post_init__(self) -> None:
        self.folder = Path(self.config.run.output_dir)
        self.best_before = _best(self.state)  # the best checkpoint when the last one was saved
        self.saved: tuple[Position, Stage] | None = None  # those of the last checkpoint

    def is_due(self, epochs: float) -> bool:
        """Whether a checkpoint is due after `epochs` of the run: by steps, epochs or the time passed."""
        options, step = self.config.run, self.state.position.step
        if options.checkpoint_steps and step % options.checkpoint_steps == 0:
            return True
        if options.checkpoint_freq is not None:
            return epochs % options.checkpoint_freq == 0
        minutes = (time.monotonic() - self.saved_at) / 60
        (is_due,) = self.dist.all_reduce_scalars(self.dist.is_main and minutes >= CHECKPOINT_MINUTES)
        return bool(is_due)

    @property
    def is_saved(self) -> bool:
        """Whether the last checkpoint has the current position, and the stage as it is."""
        return self.saved == (self.state.position, self.state.stage)

    def save_alone(self) -> str | None:
        """Save without the other processes, which may hang or have ended; returns the checkpoint's name.

        The main process calls it, from any thread. Nothing is saved within a change of the weights. Nothing
        is pruned.
        """
        state = self.state
        if not self.dist.is_main or state.is_changing:
            return None
        name = position_name(state.position)
        if self.is_saved:
            return name if self.writer.finish() is None else None
        if not state.is_finite():
            console.warning(f"{self.folder / name} is not saved: {NOT_FINITE}")
            return None
        try:
            save_checkpoint(self.folder / name, self.content())
        except OSError as error:
            console.warning(f"{self.folder / name} is not saved: {error}")
            return None
        self.saved = replace(state.position), state.stage
        return name

    def save(self, reason: SaveReason, metrics: Metrics | None = None) -> None:
        """Save a checkpoint, then prune; training continues meanwhile, unless it stops with this one.

        With the `metrics` of its weights, it may become the best one; without, the same state is not saved
        again. While training may be diverging, nothing is pruned. Raises NonFiniteError if the weights are
        not finite, and UserError if the last checkpoint of the run cannot be written.
        """
        if metrics or not self.is_saved:
            self._save(reason, metrics)
        if reason is SaveReason.STOP:
            self._wait()

    def _save(self, reason: SaveReason, metrics: Metrics | None) -> None:
        state = self.state
        raise_if_diverged(self.dist, None if state.is_finite() else NOT_FINITE)
        name = position_name(state.position)
        path = self.folder / name
        doubt = self.stability.doubt(int(state.update.nonfinite_streak))
        if doubt and reason is SaveReason.DUE:
            console.info(f"{path} is not saved: {doubt}")
            return
        if self.dist.is_main and self.writer.finish() is not None:  # the last one is not on disk
            name_before, loss = self.best_before
            state.history.best_checkpoint = name_before
            state.history.best_checkpoint_loss = state.history.best_checkpoint_loss and loss
        self.best_before = _best(state)
        if metrics:
            state.history.add_checkpoint(name, metrics)
        if self.dist.is_main:
            after_write = partial(self._after_write, replace(state.position), path, prunes=not doubt)
            self.writer.save(path, self.content(), after_write)
        self.saved = replace(state.position), state.stage
        self.saved_at = time.monotonic()

    def _wait(self) -> None:
        """Wait until the last checkpoint is on disk; UserError on every process if it cannot be written."""
        failure = self.writer.finish() if self.dist.is_main else None
        if self.dist.all_reduce_scalars(failure is not None)[0]:
            reason = failure or "the main process reports the reason"
            raise UserError(f"--output_dir {self.folder}: the last checkpoint could not be written: {reason}")

    def close(self) -> None:
        """Wait for the file under way; a failure is only reported."""
        self.writer.finish()

    def _after_write(self, at: Position, path: Path, prunes: bool) -> None:
        """Let the next records judge the checkpoint of the position `at`, which is on disk, and prune.

        The best checkpoint, the one before the adversarial phase, the last one of each stage and the last
        good one stay. This may run in the writer's thread, when training is further.
        """
        self.stability.unconfirmed.append((at.step, path))
        if not prunes:
            return
        history = self.state.history
        best = {history.best_checkpoint, history.before_adversarial}
        prune(
            self.folder,
            self.config.run.keep_checkpoints,
            apart=stage_ends(self.state.stages, at) | {name for name in best if name},
            needed=self.stability.needed(),
        )

    def content(self) -> CheckpointContent:
        """Return the content of a checkpoint of the present state."""
        state, stage = self.state, self.state.stage
        config = flatten(self.config) | {
            "image_size": stage.image_size,
            "batch_size": stage.batch_size,
            **stage.length,
        }
        samples = self.provenance.samples
        next_stage = current_stage(state.stages, state.position) or stage
        topology = samples["topology"] | {"batch_size": next_stage.batch_size}
        samples = samples | {"topology": topology}
        return checkpoint_content(state, config, samples, self.provenance.begun_from)

    def start_checkpoint(self) -> str | None:
        """Return the checkpoint in the folder with the current weights, before a stage's first step."""
        state, path = self.state, self.provenance.resumed_from
        if self.saved and self.saved[0] == state.position:  # the end of the stage before
            return position_name(state.position)
        begins = state.position.step == state.begun_at.step
        return path.name if path and begins and path.parent.resolve() == self.folder.resolve() else None

    def note_good(self) -> None:
        """Store the run, and which checkpoint of its folder is good."""
        if self.dist.is_main:
            write_run(self.folder, self.state.identity, self.stability.good)


def _best(state: TrainingState) -> tuple[str | None, float | None]:
    return state.history.best_checkpoint, state.history.best_checkpoint_loss


# ---- A run that diverges -------------------------------------------------------------------------------


DIVERGED_NAME = "diverged.json"


@dataclass(frozen=True)
class Divergences:
    """The changes that divergences have made to a run, in the file DIVERGED_NAME of its folder."""

    learning_rate: float | None  # --learning_rate of the run; another one is a new attempt
    by_stage: dict[int, int] = field(default_factory=dict)  # how many, by the first epoch of a stage
    overflows_fp16: bool = False


def read_divergences(folder: Path, learning_rate: float | None) -> Divergences:
    """Read the divergences of the run in the folder with this --learning_rate."""
    try:
        content = read_json(folder / DIVERGED_NAME)
    except FileNotFoundError:
        return Divergences(learning_rate)
    if content["learning_rate"] != learning_rate:
        return Divergences(learning_rate)
    by_stage = {int(first_epoch): count for first_epoch, count in content["by_stage"].items()}
    return Divergences(learning_rate, by_stage, content["overflows_fp16"])


def end_diverged(saver: Saver, logbook: Logbook, reason: str, peak: float) -> NoReturn:
    """Raise NonFiniteError, with the last good checkpoint as the newest one; for the main process.

    If steps in fp16 were not finite, the precision changes instead of the learning rate: each of them halved
    the loss scale, so the activations overflow. `peak` is the peak learning rate of the stage.
    """
    state = saver.state
    saver.writer.finish()  # before files are moved
    good = saver.stability.good
    step = saved_step(good) if good else state.begun_at.step
    abandon_newer(saver.folder, step)
    newest = next(iter(list_checkpoints(saver.folder)), None)
    learning_rate = state.optimizers.autoencoder.param_groups[0]["lr"]
    divergence = f"step {state.position.step}, learning rate {learning_rate:g}: {reason}"
    values = {"diverged_at": state.position.step, "reason": reason, "learning_rate": learning_rate}
    logbook.record("divergence", step, {**values, "checkpoint": newest.name if newest else None})
    remedy = f"lower --learning_rate (now {peak:g})"
    if newest is None:
        raise NonFiniteError(f"{divergence}; no checkpoint is good: {remedy}, and use a new --output_dir")
    overflows = state.fp16 and saver.stability.nonfinite_streak > 0
    if not overflows:
        state.divergences_by_stage[state.stage.first_epoch] = state.divergences + 1
    state.overflows_fp16 |= overflows
    divergences = Divergences(
        saver.config.optim.learning_rate, state.divergences_by_stage, state.overflows_fp16
    )
    write_json(saver.folder / DIVERGED_NAME, asdict(divergences))
    change = "without fp16" if overflows else "with half the learning rate"
    raise NonFiniteError(
        f"{divergence}; {newest.name} is the last good checkpoint: continue it {change}: "
        f"{saver.resume_command}, or {remedy}"
    )
