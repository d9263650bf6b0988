"""Worker processes for untrusted files: a crash, a hang or a decompression bomb costs one item, not the run.

The standard library's pools stop permanently when one of their processes dies. This module therefore starts,
feeds, watches and replaces its own processes.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, NamedTuple, TypeVar

from vae.data.workers import blocked_signals, resolve_num_workers, start_worker
from vae.system.errors import UserError
from vae.system.host import GIB, usable_cores

Item = TypeVar("Item")
Answer = TypeVar("Answer")

# Items that a process has at once: it works on the first, and the next one needs no wait.
ITEMS_PER_PROCESS = 2
START_SECONDS = 600.0  # a process reads PyTorch first: minutes on a loaded machine or a network disk


class Limits(NamedTuple):
    """Limits of one item; memory is counted on top of what the process uses before its first item."""

    seconds: float = 60.0
    memory_gib: float | None = None  # None: no limit; ignored on Windows, which has no such setting


class Failure(NamedTuple):
    """An item without a result: a reason code such as crashed, hung or out_of_memory, and its detail."""

    reason: str
    detail: str


def count_workers(num_workers: str | int, *, flag: str = "--num_workers") -> int:
    """Number of processes, at least 1 so that decoding is isolated; `auto`: one per usable core."""
    if str(num_workers).strip() == "auto":
        return usable_cores()
    return max(1, resolve_num_workers(num_workers, flag=flag))


def run_each(
    function: Callable[[Item], Answer],
    items: Iterable[Item],
    *,
    num_workers: int,
    limits: Limits,
) -> Generator[tuple[Item, Answer | Failure], None, None]:
    """Yield (item, function(item)) for each item in the order of completion, or (item, Failure).

    Items are read from the iterable as they are needed, so it may be endless. `function` and the items must
    be picklable. An exception from `function` is raised here and ends the processes. Wrap the generator in
    contextlib.closing, so that the processes end at once if the loop over the results raises.
    """
    pool = Pool(function, num_workers, limits)
    try:
        yield from pool.run(iter(items))
        pool.finish()
    finally:
        pool.kill()


class _Worker(Generic[Item]):
    """One process, its pipe and the items sent to it; it works on the first of them."""

    def __init__(self, function: Callable[[Item], Any], limits: Limits):
        context = multiprocessing.get_context("spawn")  # as on Windows; forking with threads can deadlock
        self.pipe, child_end = context.Pipe()
        self.process = context.Process(target=_serve, args=(child_end, function, limits), daemon=True)
        with blocked_signals("spawn"):
            self.process.start()
        child_end.close()
        self.items: deque[Item] = deque()
        self.deadline = time.monotonic() + START_SECONDS
        self.ready = False

    def give(self, item: Item, seconds: float) -> None:
        if not self.items and self.ready:
            self.deadline = time.monotonic() + seconds
        self.items.append(item)
        with suppress(ConnectionError):  # the process has ended: its sentinel reports that
            self.pipe.send(item)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Pool(Generic[Item, Answer]):
    """Worker processes, which stay from one `run` to the next."""

    def __init__(self, function: Callable[[Item], Answer], num_workers: int, limits: Limits):
        self.function, self.limits = function, limits
        self.num_workers = num_workers
        self.workers: list[_Worker[Item]] = []
        self.returned: deque[Item] = deque()  # items that a dead process had not started

    def run(self, items: Iterator[Item]) -> Iterator[tuple[Item, Answer | Failure]]:
        """As `run_each`. After an exception, only `kill` may be called."""
        while True:
            while self._has_free_slot():
                try:
                    item = self.returned.popleft() if self.returned else next(items)
                except StopIteration:
                    break
                self._next_free().give(item, self.limits.seconds)
            busy = [worker for worker in self.workers if worker.items]
            if not busy:
                return
            yield from self._collect(busy)

    def _has_free_slot(self) -> bool:
        return sum(len(worker.items) for worker in self.workers) < self.num_workers * ITEMS_PER_PROCESS

    def _next_free(self) -> _Worker[Item]:
        """An idle process, else a new one if the limit allows it, else the one with the fewest items."""
        idle = min(self.workers, key=lambda worker: len(worker.items), default=None)
        if idle is not None and (not idle.items or len(self.workers) == self.num_workers):
            return idle
        self.workers.append(_Worker(self.function, self.limits))
        return self.workers[-1]

    def _collect(self, busy: list[_Worker[Item]]) -> Iterator[tuple[Item, Answer | Failure]]:
        """Wait for answers, dead processes or deadlines; yield the items that they complete."""
        timeout = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
        ready = wait([end for worker in busy for end in (worker.pipe, worker.process.sentinel)], timeout)
        now = time.monotonic()
        for worker in busy:
            if worker.pipe in ready:
                yield from self._answers(worker)
            elif worker.process.sentinel in ready:
                yield from self._discard(worker, _cause_of_exit(worker.process))
            elif now >= worker.deadline:
                seconds = self.limits.seconds if worker.ready else START_SECONDS
                yield from self._discard(worker, Failure("hung", f"took longer than {seconds:g} s"))

    def _answers(self, worker: _Worker[Item]) -> Iterator[tuple[Item, Answer | Failure]]:
        try:
            kind, value = worker.pipe.recv()
        except (EOFError, ConnectionError):
            worker.process.join()
            yield from self._discard(worker, _cause_of_exit(worker.process))
            return
        worker.deadline = time.monotonic() + self.limits.seconds
        if kind == "ready":
            worker.ready = True
        elif kind == "raised":
            raise value
        else:
            yield worker.items.popleft(), value

    def _discard(self, worker: _Worker[Item], failure: Failure) -> Iterator[tuple[Item, Answer | Failure]]:
        """End a process that failed; report the item it failed on, and give its others to another process."""
        self.workers.remove(worker)
        worker.kill()
        if not worker.ready:
            raise UserError(
                f"a worker process does not start: {failure.detail}: lower --num_workers {self.num_workers}, "
                "end other programs, or put the Python environment on a faster disk"
            )
        failed_item = worker.items.popleft()
        self.returned.extend(worker.items)
        yield failed_item, failure

    def finish(self) -> None:
        """Close the pipes, so that idle processes exit by themselves."""
        for worker in self.workers:
            worker.pipe.close()
        for worker in self.workers:
            worker.process.join(5)

    def kill(self) -> None:
        """End all processes."""
        for worker in self.workers:
            worker.kill()
        self.workers.clear()


def _cause_of_exit(process: multiprocessing.process.BaseProcess) -> Failure:
    process.join()
    code = process.exitcode or 0
    if code >= 0:
        return Failure("crashed", f"the decoding process ended with code {code}")
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    if name == "SIGKILL":  # not from us: the system sends it when memory runs out
        return Failure("out_of_memory", "the system ended the decoding process (SIGKILL)")
    if name == "SIGALRM":
        return Failure("hung", "the decoding process ended itself at its time limit")
    return Failure("crashed", f"the decoding process ended by {name}")


def _serve(pipe: Connection, function: Callable[[Any], Any], limits: Limits) -> None:
    """Main function of a worker process: answer items until the pipe is closed."""
    start_worker(0)
    _end_with_parent()
    with open(os.devnull, "w") as null:  # C libraries print their messages to stderr, between our lines
        os.dup2(null.fileno(), 2)
    _limit_memory(limits.memory_gib)
    with suppress(EOFError, ConnectionError):  # the pipe is closed: no item is left
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
    """Start a thread that ends this process when its parent process ends, also if the parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a child process only"

    def wait_for_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_for_parent, daemon=True).start()


def _set_alarm(seconds: float) -> None:
    """Let the system end this process some time after the limit, in case its parent cannot."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds * 1.5 + 5 if seconds else 0)


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
    with suppress(ValueError, OSError):  # macOS refuses: only the limit of pixels remains
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
