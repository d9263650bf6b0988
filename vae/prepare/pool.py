"""Worker processes for untrusted files: a crash, a hang or a bomb costs one item, not the run.

`pebble` replaces a process that ends. At the time limit of an image, the system ends its process, whatever
the decoder does meanwhile.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from concurrent.futures import TimeoutError as FutureTimeoutError  # Python 3.10 has two
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, TypeVar

from vae.data.workers import (
    StartError,
    cause_of_failure,
    is_crash,
    resolve_num_workers,
    signal_name,
    start_worker,
    starting_processes,
)
from vae.system.errors import LostProcessError
from vae.system.host import GIB, usable_cores

Task = TypeVar("Task")
_TOO_LONG = "it took longer than --time_limit"
TASKS_PER_PROCESS = 2  # a process works on the first; the next one is ready
HUNG_CODE = 1  # exit code of a process that `time_limit` ends on Windows


class Limits(NamedTuple):
    """Limits of a process; memory is counted on top of what it uses before its first item."""

    seconds: float | None = None  # limit of a whole task; None: the task sets its own with `time_limit`
    memory_gib: float | None = None  # None: no limit; ignored on Windows, which has no such setting


class Failure(NamedTuple):
    """A task or an image without a result: a reason code such as crashed or hung, and its detail."""

    reason: str
    detail: str


def count_workers(num_workers: str) -> int:
    """Number of processes, at least 1 so that decoding is isolated; `auto`: one per usable core."""
    if num_workers == "auto":
        return usable_cores()
    return max(1, resolve_num_workers(num_workers))


def run_tasks(
    function: Callable[[Any], Any], tasks: Iterable[Task], num_workers: int, limits: Limits
) -> Generator[tuple[Task, Any], None, None]:
    """Yield (task, function(task)) in the order of completion, or (task, Failure) if its process ended.

    Tasks are read as they are needed. An exception of `function` is raised here, and a UserError if the
    system starts or keeps no processes. Wrap the generator in contextlib.closing.
    """
    from pebble import ProcessExpired, ProcessPool

    context = multiprocessing.get_context("spawn")  # the way of Windows; forking with threads can deadlock
    rest = iter(tasks)
    pending = dict[Any, Task]()
    pool = ProcessPool(
        num_workers,
        initializer=_begin_worker,
        initargs=(limits.memory_gib, function),  # its modules are imported before memory is limited
        context=context,
    )

    def submit(task: Task) -> None:
        with starting_processes(context):
            pending[pool.schedule(function, (task,), timeout=limits.seconds)] = task

    try:
        while True:
            while len(pending) < num_workers * TASKS_PER_PROCESS and (task := next(rest, None)) is not None:
                submit(task)
            if not pending:
                break
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                task = pending.pop(future)
                try:
                    answer = future.result()
                except ProcessExpired as error:
                    answer = _failure(error.exitcode or 0)
                except FutureTimeoutError:
                    answer = Failure("hung", f"took longer than {limits.seconds:g} s")
                yield task, answer
    except (StartError, BrokenProcessPool) as error:
        reason = error.__cause__ or error
        raise LostProcessError(f"processes failed: {cause_of_failure(reason) or reason}") from None
    finally:
        _end(pool)


def _end(pool: Any) -> None:
    """End all processes of a pool.

    Those that are still starting read their semaphores and pipes from this process, so they end before
    pebble closes these. Otherwise they end with a traceback on the terminal.
    """
    pool.stop()
    if pool._pool_manager_loop is not None:
        pool._pool_manager_loop.join()  # the thread that replaces processes
    for child in multiprocessing.active_children():
        if child.name == "pebble_pool_worker":
            child.kill()
            child.join()
    pool.join()


def _failure(code: int) -> Failure:
    """Return why a task has failed, by the exit code of its process; UserError if no image is the cause."""
    name = signal_name(code)
    if name == "SIGTERM":  # a scheduler ends the whole group
        raise KeyboardInterrupt
    if name == "SIGALRM" or (code == HUNG_CODE and sys.platform == "win32"):
        return Failure("hung", _TOO_LONG)
    if name == "SIGKILL":  # not from us: the system sends it when memory runs out
        return Failure("out_of_memory", "the system ended the decoding process (SIGKILL)")
    if is_crash(code):
        return Failure("crashed", f"the decoding process ended by {name or f'code {code:#x}'}")
    refused = OSError(code, os.strerror(code)) if code > HUNG_CODE else None  # pebble exits with the error
    raise LostProcessError(f"processes failed: {cause_of_failure(refused, [code])}")


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """End this process if the block takes longer; no effect in the main process, and without a limit."""
    if seconds is None or multiprocessing.parent_process() is None:
        yield
        return
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)
    else:  # Windows
        faulthandler.dump_traceback_later(seconds, exit=True, file=_null())
    try:
        yield
    finally:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        else:
            faulthandler.cancel_dump_traceback_later()


@cache
def _null() -> Any:
    return open(os.devnull, "w")  # it stays open until the process ends


def _begin_worker(memory_gib: float | None, _function: Callable[[Any], Any]) -> None:
    start_worker(0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the pool ends it with this signal
    _end_with_parent()
    os.dup2(_null().fileno(), 2)  # C libraries print their messages to stderr, between our lines
    _limit_memory(memory_gib)


def _end_with_parent() -> None:
    """Start a thread that ends this process when its parent process ends, also if the parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a child process only"

    def wait_for_parent() -> None:
        parent.join()
        os._exit(2)

    threading.Thread(target=wait_for_parent, daemon=True).start()


def _limit_memory(memory_gib: float | None) -> None:
    if memory_gib is None or sys.platform == "win32":
        return
    import resource

    used = 0
    if os.path.exists("/proc/self/statm"):  # address space in pages: libraries reserve much and use little
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limit = used + int(memory_gib * GIB)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses: only the limit of pixels remains
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
