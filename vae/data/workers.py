"""The number of decoding processes, and their start."""

import ctypes
import errno
import multiprocessing
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.queues import Queue
from typing import Any

from PIL import AvifImagePlugin

from vae.system.host import decoding_processes, usable_cores

# SIGHUP: the terminal was closed. Windows has none.
STOP_SIGNALS = {getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)}
# Parameters of glibc's mallopt (malloc.h), and the largest threshold that it accepts.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MALLOC_BYTES = 32 * 2**20


def resolve_num_workers(num_workers: str, *, processes_here: int = 1) -> int:
    """The number of decoding processes of an option --num_workers, a whole number or `auto`.

    `processes_here`: number of training processes on this machine, which share its cores.
    """
    if num_workers == "auto":
        return decoding_processes(usable_cores() // processes_here, sys.platform == "win32")
    return int(num_workers)


class StartError(OSError):
    """Processes cannot be started: the system refuses locks."""


@contextmanager
def starting_processes(context: Any = None, count: int = 1) -> Iterator[None]:
    """Start `count` processes: block the stop signals, and remove DataLoader's handler of SIGCHLD.

    Otherwise a new process would handle a signal with the wrong handler until it has run `start_worker`.
    This process receives blocked signals when the block ends, so none is lost. No effect on Windows.
    DataLoader's handler raises an error wherever this process is when a worker dies, also within a step.

    Raises StartError if the system has no shared memory for the locks of processes.
    """
    if not count:
        yield
        return
    context = context or multiprocessing
    try:
        context.Lock()
    except OSError as error:
        raise StartError(f"no shared memory: {error}") from None
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    method = context.get_start_method()
    if method != "fork":
        resource_tracker.ensure_running()  # starting it unblocks the signals, so start it first
    of_children = signal.getsignal(signal.SIGCHLD)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        if method == "forkserver":  # not on Windows
            from multiprocessing import forkserver

            # It keeps what is blocked now, and needs SIGCHLD to notice that one of its processes has ended.
            forkserver.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        yield
    finally:
        if signal.getsignal(signal.SIGCHLD) is not of_children:
            signal.signal(signal.SIGCHLD, of_children)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_worker(_worker_id: int) -> None:
    """Initialize a decoding process: ignore the signals that stop the training process.

    Terminals and schedulers signal the whole process group. If a worker stopped at once, the trainer would
    fail without batches instead of finishing its step and saving. The trainer ends its workers afterwards.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # DataLoader has already set PyTorch to one thread.
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # the default is one thread per core in each process
    _keep_freed_memory()
    Queue._on_queue_feeder_error = _send_error  # type: ignore[attr-defined]


class UnsentBatchError(Exception):
    """A worker process cannot pass on a batch."""


def _send_error(self: Any, error: BaseException, result: tuple[int, Any]) -> None:
    """Pass on why a batch cannot be passed on: Python would print it, and the trainer would wait."""
    self.put((result[0], UnsentBatchError(str(error))))


def _keep_freed_memory() -> None:
    """Let malloc use the memory of one image for the next one, instead of returning it to the system (glibc).

    Otherwise the system clears every page again for each image: a tenth of the time of decoding a photograph.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MALLOC_BYTES)
        mallopt(M_TRIM_THRESHOLD, 2 * MALLOC_BYTES)


# ---- Why processes fail ----------------------------------------------------------------------------------

# What the system refuses, by its error: the cause, and the setting that helps.
_REFUSALS = (
    ("AF_UNIX path too long", "the path of TMPDIR is too long for a socket: set TMPDIR to a shorter folder"),
    ("No usable temporary directory", "no temporary folder can be written: set TMPDIR to one that can"),
    ("EMFILE|ENFILE|ancdata|Too many open files", "too many files are open: raise it with ulimit -n 4096"),
    ("EAGAIN|can't start new thread", "the system starts no more processes: raise the limit with ulimit -u"),
    ("1455", "the paging file of Windows is too small (error 1455): enlarge it"),
    ("ENOSPC", "shared memory is full: give a container more with --shm-size 8g"),
    ("workers expired", "one ended as it started, by the error above"),  # pebble's words
    ("shared memory", "{text}: mount a folder at /dev/shm that can be written"),
)
_CRASH = "usually in a decoder: prepare_data.py --mode validate finds images that crash one"
# The usual reason why a signal ends a process; the system does not say which one it was.
_SIGNALS = {
    "SIGKILL": "usually because memory ran out: lower --num_workers",
    "SIGBUS": "usually because shared memory is full: give a container more with --shm-size 8g, or use "
    "--num_workers 0",
    **dict.fromkeys(("SIGSEGV", "SIGABRT", "SIGFPE", "SIGILL"), _CRASH),
}
_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")
NTSTATUS_ERROR = 0xC0000000  # Windows' codes of crashes are at least this


def signal_name(exit_code: int) -> str | None:
    """The name of the signal that ended a process."""
    return signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else None


def is_crash(exit_code: int) -> bool:
    """Whether a process ended by a signal that a decoder causes, or by Windows' form of it."""
    return signal_name(exit_code) in _CRASHES or exit_code >= NTSTATUS_ERROR


def _usual_reason(exit_code: int) -> str | None:
    return _CRASH if exit_code >= NTSTATUS_ERROR else _SIGNALS.get(signal_name(exit_code) or "")


def cause_of_failure(
    error: BaseException | None, exit_codes: Sequence[int] = (), alternative: str = ""
) -> str | None:
    """Why processes failed, by an error and the exit codes of those that ended, and the remedy.

    `alternative`: another remedy if the system refuses something. None: neither the system nor the end of a
    process caused the error.
    """
    text = (str(error or "").strip().splitlines() or [""])[-1]  # the others are a process's traceback
    numbers = re.findall(r"Errno (\d+)\]|\((\d+)\)$", text)  # of Python; of PyTorch: "... on device (28)"
    names = [errno.errorcode.get(int(first or second), "") for first, second in numbers]
    facts = " ".join([text, *names])
    from vae.device import is_out_of_memory  # imports PyTorch, which mistakes are reported without

    is_about_file = re.search(r"Errno \d+\] .*: '", text)
    for pattern, line in _REFUSALS:
        if re.search(pattern, facts) and not (is_about_file and "shared memory" in line):
            return line.format(text=text) + alternative
    if "ENOMEM" in facts or "MemoryError" in facts or (error and is_out_of_memory(error)):
        return "memory ran out: lower --num_workers"
    if exit_codes:
        ends = sorted({signal_name(code) or f"code {code}" for code in exit_codes})
        reasons = filter(None, map(_usual_reason, exit_codes))
        reason = next(reasons, f"its own output is above{alternative}")
        return f"one ended ({', '.join(ends)}), {reason}"
    return text + alternative if isinstance(error, OSError | EOFError | UnsentBatchError) else None
