"""Work on untrusted files in processes of their own: a crash, a hang or a bomb costs one item, not the run.

The standard library's pools stop for good when one of their processes dies, so the few lines that start,
feed, watch and replace processes are here.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from vae.data.workers import resolve_num_workers, signals_held, start_worker
from vae.host import GIB, usable_cores

# Items given to a process ahead: while one is worked on, the next is there already.
DEPTH = 2
START_SECONDS = 60  # a process that has to read its libraries from a slow disk first


class Limits(NamedTuple):
    """What one item may take; memory counts on top of what the process holds before its first item."""

    seconds: float = 60.0
    memory_gib: float | None = None  # None: no limit; never one on Windows, which has no such setting


class Failure(NamedTuple):
    """An item that was not survived: `reason` is crashed, hung or out_of_memory."""

    reason: str
    detail: str


def count_workers(num_workers: str | int, *, flag: str = "--num_workers") -> int:
    """Number of processes: `auto` takes every usable core; there is at least one, for safety's sake."""
    if str(num_workers).strip() == "auto":
        return usable_cores()
    return max(1, resolve_num_workers(num_workers, flag=flag))


def run_each(
    function: Callable[[Any], Any],
    items: Iterable[Any],
    *,
    num_workers: int,
    limits: Limits,
) -> Iterator[tuple[Any, Any]]:
    """Yield (item, function(item)) for each item in the order of completion, or (item, Failure).

    Items are taken from the iterable as they are needed, so it may be endless. `function` and the items must
    be picklable. What `function` raises is raised here and ends the processes. Use contextlib.closing around
    it, so that they end at once when the loop over the results raises.
    """
    pool = _Pool(function, num_workers, limits)
    try:
        yield from pool.run(iter(items))
        pool.finish()
    finally:
        pool.kill()


class _Worker:
    """One process, its pipe and the items it holds, the one it works on first."""

    def __init__(self, function: Callable[[Any], Any], limits: Limits):
        context = multiprocessing.get_context("spawn")  # as on Windows; forking beside threads may lock up
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, function, limits), daemon=True)
        with signals_held("spawn"):
            self.process.start()
        theirs.close()
        self.items: deque[Any] = deque()
        self.deadline = time.monotonic() + START_SECONDS
        self.ready = False

    def give(self, item: Any, seconds: float) -> None:
        if not self.items and self.ready:
            self.deadline = time.monotonic() + seconds
        self.items.append(item)
        with suppress(ConnectionError):  # it has died: its sentinel tells
            self.pipe.send(item)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class _Pool:
    def __init__(self, function: Callable[[Any], Any], num_workers: int, limits: Limits):
        self.function, self.limits = function, limits
        self.num_workers = num_workers
        self.workers: list[_Worker] = []
        self.again: deque[Any] = deque()  # items a dead process had not begun

    def run(self, items: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        while True:
            while self._has_room():
                try:
                    item = self.again.popleft() if self.again else next(items)
                except StopIteration:
                    break
                self._next_free().give(item, self.limits.seconds)
            busy = [worker for worker in self.workers if worker.items]
            if not busy:
                return
            yield from self._collect(busy)

    def _has_room(self) -> bool:
        return sum(len(worker.items) for worker in self.workers) < self.num_workers * DEPTH

    def _next_free(self) -> _Worker:
        """An idle process, a new one where there may be another, or the one with the fewest items."""
        idle = min(self.workers, key=lambda worker: len(worker.items), default=None)
        if idle is not None and (not idle.items or len(self.workers) == self.num_workers):
            return idle
        self.workers.append(_Worker(self.function, self.limits))
        return self.workers[-1]

    def _collect(self, busy: list[_Worker]) -> Iterator[tuple[Any, Any]]:
        """Wait for the next answers, deaths or deadlines and yield what they settle."""
        patience = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
        signs = wait([sign for worker in busy for sign in (worker.pipe, worker.process.sentinel)], patience)
        now = time.monotonic()
        for worker in busy:
            if worker.pipe in signs:
                yield from self._answers(worker)
            elif worker.process.sentinel in signs:
                yield from self._bury(worker, _cause_of_death(worker.process))
            elif now >= worker.deadline:
                yield from self._bury(worker, Failure("hung", f"took longer than {self.limits.seconds:g} s"))

    def _answers(self, worker: _Worker) -> Iterator[tuple[Any, Any]]:
        try:
            kind, value = worker.pipe.recv()
        except (EOFError, ConnectionError):
            worker.process.join()
            yield from self._bury(worker, _cause_of_death(worker.process))
            return
        worker.deadline = time.monotonic() + self.limits.seconds
        if kind == "ready":
            worker.ready = True
        elif kind == "raised":
            raise value
        else:
            yield worker.items.popleft(), value

    def _bury(self, worker: _Worker, failure: Failure) -> Iterator[tuple[Any, Any]]:
        """Give up the item a process has failed on; the others it holds go to another process."""
        self.workers.remove(worker)
        worker.kill()
        if not worker.ready:
            raise RuntimeError(f"a working process does not start: {failure.detail}")
        lost = worker.items.popleft()
        self.again.extend(worker.items)
        yield lost, failure

    def finish(self) -> None:
        """Let idle processes end by themselves."""
        for worker in self.workers:
            worker.pipe.close()
        for worker in self.workers:
            worker.process.join(5)

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.workers.clear()


def _cause_of_death(process: multiprocessing.process.BaseProcess) -> Failure:
    process.join()
    code = process.exitcode or 0
    if code >= 0:
        return Failure("crashed", f"the decoding process ended with code {code}")
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    if name == "SIGKILL":  # not by us: the system does this where memory runs out
        return Failure("out_of_memory", "the system ended the decoding process (SIGKILL)")
    if name == "SIGALRM":
        return Failure("hung", "the decoding process ended itself after its time")
    return Failure("crashed", f"the decoding process ended by {name}")


def _serve(pipe: Connection, function: Callable[[Any], Any], limits: Limits) -> None:
    """The life of a process: items come, answers go, until the pipe is closed."""
    start_worker(0)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with open(os.devnull, "w") as nowhere:  # C libraries write their complaints there, in between our lines
        os.dup2(nowhere.fileno(), 2)
    _limit_memory(limits.memory_gib)
    with suppress(EOFError, ConnectionError):  # the pipe is closed: there is no more to do
        pipe.send(("ready", None))
        while True:
            item = pipe.recv()
            _set_alarm(limits.seconds)
            answer = _answer(function, item, limits)
            _set_alarm(0)
            pipe.send(answer)


def _answer(function: Callable[[Any], Any], item: Any, limits: Limits) -> tuple[str, Any]:
    try:
        return "done", function(item)
    except MemoryError:
        return "done", Failure("out_of_memory", f"needs more than {limits.memory_gib or 0:.3g} GiB")
    except Exception as error:
        return "raised", error


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()  # returns when it was killed, too
    os._exit(1)


def _set_alarm(seconds: float) -> None:
    """Have the system end this process some time after its limit, should nobody be left to do it."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds * 1.5 + 5 if seconds else 0)


def _limit_memory(memory_gib: float | None) -> None:
    if memory_gib is None or sys.platform == "win32":
        return
    import resource

    held = 0
    if os.path.exists("/proc/self/statm"):  # pages of address space: libraries take much and use little
        with open("/proc/self/statm") as file:
            held = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limit = held + int(memory_gib * GIB)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    with suppress(ValueError, OSError):  # macOS refuses: there remains the limit of pixels
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
