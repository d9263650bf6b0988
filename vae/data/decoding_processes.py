"""The processes that decode images: their batches, and a new start with fewer of them if one dies."""

import multiprocessing
import queue
import threading
import traceback
from collections.abc import Callable, Generator
from multiprocessing.connection import wait
from typing import Any

from torch.utils.data import DataLoader

from vae.data.dataset import Batch, Sample
from vae.data.workers import blocked_signals
from vae.device import is_out_of_memory
from vae.system import console
from vae.system.errors import DataError

POLL_SECONDS = 1.0  # a wait for a batch notices this often that the run has to stop
END_SECONDS = 5.0  # a process in a read that no signal interrupts is left behind
MAX_DEATHS = 3  # of decoding processes of one loader: at this one, training stops


class _DeadWorkerError(Exception):
    """A decoding process has died."""


class DecodingProcesses:
    """Makes batches in processes, or in a thread of this one. If a process dies, fewer are started again."""

    def __init__(
        self,
        make_loader: Callable[[int], DataLoader[Sample]],
        num_workers: int,
        while_waiting: Callable[[], None],
        persistent: bool,
    ) -> None:
        """`make_loader` gets a number of processes; `while_waiting` is called every POLL_SECONDS."""
        self._make_loader = make_loader
        self._num_workers = num_workers
        self._while_waiting = while_waiting
        self._persistent = persistent
        self._deaths = 0
        self._batches: _Batches | None = None

    def batches(self, start_at: Callable[[int], None]) -> Generator[Batch, None, None]:
        """All batches; `start_at(n)` is called before they are made from the nth on.

        Raises DataError with a remedy if processes die repeatedly.
        """
        done, finished = 0, False
        try:
            while not finished:
                start_at(done)
                try:
                    if self._batches is None:
                        self._batches = _Batches(self._make_loader(self._num_workers))
                    else:
                        self._batches.begin_again()
                    while (batch := self._next()) is not None:
                        done += 1
                        yield batch
                    finished = True
                except _DeadWorkerError:
                    self._restart()
        except GeneratorExit:  # the caller stops within the epoch, and may start another one
            finished = True
            raise
        finally:
            if not finished:
                self.end(kill=True)
            elif not self._persistent:
                self.end()

    def end(self, kill: bool = False) -> None:
        """End the processes and wait for them; with `kill`, they do not finish their batches."""
        if self._batches is not None:
            self._batches.end(kill)
        self._batches = None

    def _next(self) -> Batch | None:
        """The next batch, or None at the end."""
        assert self._batches is not None
        while True:
            try:
                return self._batches.next()
            except TimeoutError:
                self._while_waiting()

    def _restart(self) -> None:
        self._deaths += 1
        self.end(kill=True)
        why = "usually because memory or /dev/shm ran out"
        if self._deaths == MAX_DEATHS:
            raise DataError(f"a decoding process died {MAX_DEATHS} times, {why}: lower --num_workers")
        self._num_workers = max(1, self._num_workers // 2)
        workers = console.counted(self._num_workers, "worker")
        line = f"a decoding process died, {why}: continuing with {workers}; the batches are the same"
        console.error_from_signal_handler(line)


class _Batches:
    """The batches of a DataLoader. A thread waits for them, so that this one can do something else meanwhile.

    A process that is stopped, or a disk that hangs, may block the thread for ever. Only the thread keeps the
    DataLoader's iterator, so the processes are ended there when it drops the iterator.
    """

    def __init__(self, loader: DataLoader[Sample]) -> None:
        self._wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()
        # No SimpleQueue: its timed `get` may wait for ever if a signal's handler runs past the deadline.
        self._made: queue.Queue[Batch | Exception | None] = queue.Queue()
        self._again = self._is_waiting = False
        context = loader.multiprocessing_context
        before = multiprocessing.active_children()
        with blocked_signals(context.get_start_method() if context else None):
            iterator = iter(loader)
        self._processes = [child for child in multiprocessing.active_children() if child not in before]
        self._thread = threading.Thread(target=self._run, args=(loader, iterator), daemon=True)
        self._thread.start()

    def begin_again(self) -> None:
        """Begin with the batches that the loader makes now, in the same processes."""
        self._again = True

    def next(self) -> Batch | None:
        """The next batch, None at the end; TimeoutError after POLL_SECONDS, then call it again."""
        if not self._is_waiting:
            self._wanted.put(True)
        self._is_waiting = True
        try:
            made = self._made.get(timeout=POLL_SECONDS)
        except queue.Empty:
            raise TimeoutError from None
        self._is_waiting = False
        if isinstance(made, Exception):
            raise made
        return made

    def end(self, kill: bool) -> None:
        """End the processes and the thread; with `kill`, they do not finish their batches."""
        self._wanted.put(False)
        if kill:
            self._kill()
        if not self._is_waiting:  # otherwise, the thread soon notices that the processes were killed
            self._thread.join(END_SECONDS)
        self._kill()  # what hangs
        for process in self._processes:
            if process.exitcode is not None and not self._thread.is_alive():
                process.close()  # its pipes: Python collects them as garbage only much later

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(END_SECONDS)

    def _run(self, loader: DataLoader[Sample], iterator: Any) -> None:
        while self._wanted.get():
            try:
                if self._again:
                    iterator = iter(loader)
                    self._again = False
                self._made.put(next(iterator, None))
            except Exception as error:  # `next` raises it
                traceback.clear_frames(error.__traceback__)  # they keep the iterator
                self._made.put(_DeadWorkerError() if self._means_death(error) else error)

    def _means_death(self, error: Exception) -> bool:
        """Whether a decoding process has died, also while it passed on a batch, or has no memory."""
        if not self._processes:
            return False
        if isinstance(error, ConnectionError | EOFError | FileNotFoundError) or is_out_of_memory(error):
            return True
        ended = wait([process.sentinel for process in self._processes], timeout=0)
        return isinstance(error, RuntimeError) and bool(ended)
