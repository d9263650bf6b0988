"""The number of decoding processes, and their start."""

import ctypes
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.queues import Queue

from PIL import AvifImagePlugin

from vae.system.errors import UserError
from vae.system.host import decoding_processes, usable_cores

# SIGHUP: the terminal was closed. Windows has none.
STOP_SIGNALS = {getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)}
# Parameters of glibc's mallopt (malloc.h), and the largest threshold that it accepts.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MALLOC_BYTES = 32 * 2**20


def resolve_num_workers(
    num_workers: str | int, *, processes_here: int = 1, flag: str = "--num_workers"
) -> int:
    """Number of decoding processes from `auto` or an integer of at least 0; UserError for anything else.

    `processes_here`: number of training processes on this machine, which share its cores.
    """
    text = str(num_workers).strip()
    if text == "auto":
        return decoding_processes(usable_cores() // processes_here, sys.platform == "win32")
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"{flag} {num_workers} is not a number of processes: give auto, 0, 1, 2, ...")
    return int(text)


@contextmanager
def blocked_signals(start_method: str | None = None) -> Iterator[None]:
    """Block the stop signals while processes are started, and remove DataLoader's handler of SIGCHLD.

    Otherwise a new process would handle a signal with the wrong handler until it has run `start_worker`.
    This process receives blocked signals when the block ends, so none is lost. No effect on Windows.
    DataLoader's handler raises an error wherever this process is when a worker dies, also within a step.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    method = start_method or multiprocessing.get_start_method()
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
    Queue._on_queue_feeder_error = staticmethod(_end_process)  # type: ignore[attr-defined]


def _end_process(error: BaseException, _batch: object) -> None:
    """End this process if it cannot pass on a batch; its exit code is the number of the system's error.

    The queue's thread would print the error and lose the batch, and the trainer would wait for it.
    """
    number = re.search(r"[(<](\d+)[)>]", str(error))  # PyTorch: "... No space left on device (28)"
    os._exit(getattr(error, "errno", None) or (int(number[1]) if number else 1))


def _keep_freed_memory() -> None:
    """Let malloc use the memory of one image for the next one, instead of returning it to the system (glibc).

    Otherwise the system clears every page again for each image: a tenth of the time of decoding a photograph.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MALLOC_BYTES)
        mallopt(M_TRIM_THRESHOLD, 2 * MALLOC_BYTES)
