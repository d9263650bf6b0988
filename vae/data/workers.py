"""How many decoding processes there are, and how each of them begins."""

import multiprocessing
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

from PIL import AvifImagePlugin

from vae.config.errors import UserError
from vae.host import decoding_processes, usable_cores

HELD_SIGNALS = {signal.SIGINT, signal.SIGTERM}


def resolve_num_workers(
    num_workers: str | int, *, processes_here: int = 1, flag: str = "--num_workers"
) -> int:
    """Number of decoding processes: `auto`, or a whole number from 0 on; raises UserError for anything else.

    `processes_here`: training processes that share this machine's cores.
    """
    text = str(num_workers).strip()
    if text == "auto":
        return decoding_processes(usable_cores() // processes_here, sys.platform == "win32")
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"{flag} {num_workers} is not a number of processes: give auto, 0, 1, 2, ...")
    return int(text)


@contextmanager
def signals_held(start_method: str | None = None) -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back while processes are started.

    Otherwise one that comes before `start_worker` has run would meet the wrong handler in the new process.
    Ours gets them when the block ends, so none is lost. Windows has no such thing.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    if (start_method or multiprocessing.get_start_method()) != "fork":
        resource_tracker.ensure_running()  # starting it lets the held signals go, so it must be there before
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_worker(_worker_id: int) -> None:
    """First act of a decoding process: signals are left to the process that started it.

    Terminals and schedulers signal the whole group. Were we to die of it, the trainer would fail for want of
    batches where it should finish its step and save; it ends us when it is done.
    """
    for number in HELD_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # DataLoader has set PyTorch to one thread already.
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # its own default is one thread per core in each process
