"""Faults on purpose: what goes wrong at which point of a run, in this process or in one of its own.

A fault is an action at a point. The points of a save are the operations that a save makes, in their order.
tests/harness/faulty_train.py is train_vae.py with faults; the product itself contains no such code.
"""

import errno
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.harness.steps import before_steps
from vae.interop import checkpoint_file
from vae.model.autoencoder import AutoencoderKL
from vae.system.script import exit_code
from vae.training.loop import TrainingLoop
from vae.training.run import train
from vae.training.state import TrainingState

VARIABLE = "VAE_TEST_FAULTS"  # read by faulty_train.py only

KILL = signal.SIGTERM if os.name == "nt" else signal.SIGKILL  # on Windows, it is TerminateProcess
KILLED = signal.SIGTERM if os.name == "nt" else -signal.SIGKILL  # exit code of a killed process

SCRATCH = r"\.vae-scratch-\w+"  # folders of files that are not complete yet

# Operations on files by the name of a point: an event and the path of its file. Each point is *before* its
# operation, so the point after it is the next one.
FILE_POINTS = {
    "save.open": ("open", rf"{SCRATCH}/checkpoint_\w+\.pt$"),
    "save.write": ("write", rf"{SCRATCH}/checkpoint_\w+\.pt$"),  # as many as the file has parts
    "save.flush": ("fsync", rf"{SCRATCH}/checkpoint_\w+\.pt$"),
    "save.record": ("open", rf"{SCRATCH}/checkpoint_\w+\.pt\.sha256$"),
    "save.flush_record": ("fsync", rf"{SCRATCH}/checkpoint_\w+\.pt\.sha256$"),
    "save.remove_old_record": ("remove", r"checkpoint_\w+\.pt\.sha256$"),
    "save.rename": ("rename", rf"{SCRATCH}/checkpoint_\w+\.pt$"),
    "save.rename_record": ("rename", rf"{SCRATCH}/checkpoint_\w+\.pt\.sha256$"),
    "save.flush_folder": ("fsync", r"/(?!\.vae)[^/.]*$"),  # the only flushed path without a point
    "save.prune": ("remove", rf"^(?!.*{SCRATCH}).*checkpoint_\w+\.pt$"),
}
# Windows flushes names together with their files.
SAVE_POINTS = tuple(point for point in FILE_POINTS if os.name != "nt" or point != "save.flush_folder")
POINTS = (*FILE_POINTS, "step", "update", "train_pass", "eval_pass")
ACTIONS = ("kill", "fail", "slow", "signal", "nan", "scale_weights", "full_disk", "free_disk")
ACTIONS += ("stop_workers", "kill_workers")


@dataclass(frozen=True)
class Fault:
    """`action` at the nth to the (nth + times - 1)th time that `point` is reached, on one rank or on all.

    `point`: one of POINTS, or EVENT:REGEX with an event of FILE_POINTS and a pattern of paths, for example
    "open:metrics.jsonl". "step" is before an optimizer step, and `nth` is then the number of that step.
    "update" is within the change of the weights.
    `value`: seconds (slow), number (signal), factor (scale_weights).
    """

    action: str
    point: str
    nth: int = 1
    times: int = 1
    rank: int | None = None
    value: float = 0.0

    def __post_init__(self) -> None:
        assert self.action in ACTIONS, self.action
        assert self.point in POINTS or ":" in self.point, self.point

    def is_due(self, point: str, count: int) -> bool:
        """Whether this fault happens now, at the `count`th time."""
        here = self.rank is None or self.rank == int(os.environ.get("RANK", 0))
        return here and self.point == point and self.nth <= count < self.nth + self.times


class _Injector:
    """Counts how often each point is reached, and performs the faults that are due."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self.faults = faults
        self.counts: dict[str, int] = {}
        self.poisoned_step = False
        self.has_hook = False
        self.files: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # points by event
        for name in {fault.point for fault in faults}:
            event, pattern = FILE_POINTS.get(name) or (name.split(":", 1) if ":" in name else ("", ""))
            self.files.setdefault(event, []).append((name, re.compile(pattern)))

    def file_event(self, event: str, path: object) -> None:
        """Handle an operation on the file at `path`."""
        text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        text = text.replace(os.sep, "/")
        for name, pattern in self.files.get(event, ()):
            if pattern.search(text):
                self.reach(name)

    def reach(self, point: str, count: int | None = None, state: Any = None) -> None:
        """Perform the faults that are due at this point."""
        self.counts[point] = self.counts.get(point, 0) + 1
        for fault in self.faults:
            if fault.is_due(point, count or self.counts[point]):
                self._perform(fault, state)

    def _perform(self, fault: Fault, state: Any) -> None:
        if fault.action == "kill":
            os.kill(os.getpid(), KILL)
        elif fault.action == "signal":
            if os.name == "nt":  # os.kill would end the process
                signal.raise_signal(int(fault.value))
            else:
                os.kill(os.getpid(), int(fault.value))
        elif fault.action == "fail":
            if fault.point.endswith("_pass"):
                raise torch.OutOfMemoryError("injected")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"injected at {fault.point}")
        elif fault.action == "slow":
            time.sleep(fault.value)
        elif fault.action == "nan":
            self._poison(state)
        elif fault.action == "scale_weights":
            with torch.no_grad():
                torch._foreach_mul_(list(state.autoencoder.parameters()), fault.value)
        elif fault.action in ("full_disk", "free_disk"):
            limit_file_size(0 if fault.action == "full_disk" else None)
        elif fault.action in ("stop_workers", "kill_workers"):
            number = signal.SIGSTOP if fault.action == "stop_workers" else KILL
            for pid in child_processes(os.getpid()):
                os.kill(pid, number)

    def _poison(self, state: Any) -> None:
        """Make a gradient of this step NaN on this rank, before the gradients are reduced."""
        self.poisoned_step = True
        if not self.has_hook:
            self.has_hook = True
            state.autoencoder.decoder.conv_out.weight.register_hook(
                lambda gradient: gradient * math.nan if self.poisoned_step else None
            )


_active: list[_Injector] = []
_audit_hook: list[Callable] = []


def _on_audit_event(event: str, args: tuple[Any, ...]) -> None:
    """File operations of all modules, C code included; an audit hook cannot be removed."""
    if not _active or event not in ("open", "os.rename", "os.remove"):
        return
    for injector in _active:
        injector.file_event(event.removeprefix("os."), args[0])


@contextmanager
def injected(*faults: Fault) -> Iterator[None]:
    """Within this context, the faults happen in this process."""
    injector = _Injector(faults)
    if not _audit_hook:
        _audit_hook.append(_on_audit_event)
        sys.addaudithook(_on_audit_event)
    fsync, write, update_ema = os.fsync, checkpoint_file._HashedFile.write, TrainingState.update_ema
    forward = AutoencoderKL.forward

    def watched_fsync(handle: int) -> None:
        injector.file_event("fsync", path_of(handle))
        fsync(handle)

    def watched_write(self: Any, data: bytes) -> int:
        injector.file_event("write", self._file.name)
        return write(self, data)

    def reach_step(loop: TrainingLoop, _batch: object) -> None:
        injector.poisoned_step = False
        injector.reach("step", loop.state.position.step + 1, loop.state)

    def watched_update(self: TrainingState, decay: float) -> None:
        injector.reach("update")
        update_ema(self, decay)

    def watched_forward(self: AutoencoderKL, images: torch.Tensor, *rest: Any) -> Any:
        if images.device.type != "meta":  # the memory plan
            injector.reach("train_pass" if torch.is_grad_enabled() else "eval_pass")
        return forward(self, images, *rest)

    with ExitStack() as stack:
        stack.enter_context(patch.object(os, "fsync", watched_fsync))
        stack.enter_context(patch.object(checkpoint_file._HashedFile, "write", watched_write))
        stack.enter_context(before_steps(reach_step))
        stack.enter_context(patch.object(TrainingState, "update_ema", watched_update))
        stack.enter_context(patch.object(AutoencoderKL, "forward", watched_forward))
        _active.append(injector)
        stack.callback(_active.remove, injector)
        stack.callback(limit_file_size, None)
        yield


def path_of(handle: int) -> str:
    """The path of an open file; "" if the system does not tell."""
    if sys.platform == "linux":
        return os.readlink(f"/proc/self/fd/{handle}")
    if sys.platform != "win32":
        return ""
    import msvcrt
    from ctypes import create_unicode_buffer, windll, wintypes

    text = create_unicode_buffer(2**15)
    windll.kernel32.GetFinalPathNameByHandleW(
        wintypes.HANDLE(msvcrt.get_osfhandle(handle)), text, len(text), 0
    )
    return text.value


def limit_file_size(limit: int | None) -> None:
    """Every write beyond `limit` bytes of a file fails in this process, as on a full disk; None: no limit."""
    if sys.platform == "win32":
        return
    import resource

    _soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if limit is None else limit, hard))


def child_processes(pid: int) -> list[int]:
    """Children of a process that run or are stopped (Linux)."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(entry))
    return found


# ---- in processes of their own -------------------------------------------------------------------------


def run_forked(
    given: dict[str, Any], *faults: Fault, processes: int = 1, log: Path | None = None
) -> list[int]:
    """Train in forked processes, which need no import of PyTorch; returns their exit codes, such as KILLED.

    Windows has no fork: the processes are new, and without what a test has replaced. If one is killed, the
    others are killed too, as torchrun does. `log`: file for their output.
    """
    return wait_for(start_forked(given, *faults, processes=processes, log=log))


def start_forked(
    given: dict[str, Any],
    *faults: Fault,
    processes: int = 1,
    log: Path | None = None,
    error_log: Path | None = None,
    before: str = "",
) -> list[Any]:
    """Start training in forked processes, which run the code `before` first; the result is for `wait_for`."""
    context = multiprocessing.get_context("spawn" if os.name == "nt" else "fork")
    port = _free_port()
    environs = [{"RANK": str(r), "WORLD_SIZE": str(processes), "MASTER_PORT": port} for r in range(processes)]
    rest = (log, error_log, before)
    started = [context.Process(target=train_forked, args=(given, faults, e, *rest)) for e in environs]
    for process in started:
        process.start()
    return started


def wait_for(started: list[Any]) -> list[int]:
    """Wait until all processes have ended; kill the others if one fails."""
    remaining = list(started)
    while remaining:
        multiprocessing.connection.wait([process.sentinel for process in remaining])
        remaining = [process for process in remaining if process.is_alive()]
        if any(process.exitcode for process in started):
            for process in remaining:
                process.kill()
    return [process.exitcode for process in started]


def train_forked(
    given: dict[str, Any],
    faults: tuple[Fault, ...],
    environ: dict[str, str],
    log: Path | None,
    error_log: Path | None = None,
    before: str = "",
) -> None:
    """Train in this process, which was started for it, as one of several; then end it."""
    os.environ |= {**environ, "MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": environ["WORLD_SIZE"]}
    for stream, path in ((1, log), (2, error_log or log)):
        os.dup2(os.open(path or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", encoding="utf-8") for n in (1, 2))  # pytest has replaced them
    torch.set_num_threads(1)
    exec(before, {})
    with injected(*faults):
        code = exit_code("train_vae.py", lambda _: train(given), [])
    sys.stdout.flush()
    os._exit(code)  # without the clean-up of pytest


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


faults_from = partial(json.loads, object_hook=lambda values: Fault(**values))
