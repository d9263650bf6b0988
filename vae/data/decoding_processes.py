"""The processes that decode images: their batches, and a new start with fewer of them if one dies."""

import queue
import threading
from collections.abc import Callable, Generator
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

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
        self._loader = make_loader(num_workers)
        self._iterator: _Batches | None = None

    def batches(self, start_at: Callable[[int], None]) -> Generator[Batch, None, None]:
        """All batches; `start_at(n)` is called before they are made from the nth on.

        Raises DataError with a remedy if processes die repeatedly.
        """
        done, finished = 0, False
        try:
            while not finished:
                start_at(done)
                try:
                    self._begin()
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
        if self._iterator is not None:
            self._iterator.end(kill)
        self._iterator = None

    def _begin(self) -> None:
        if self._iterator is None:
            self._iterator = _Batches(self._loader)
        else:
            self._iterator.begin_again(self._loader)  # keeps the same worker processes

    def _next(self) -> Batch | None:
        """The next batch, or None at the end."""
        assert self._iterator is not None
        while True:
            try:
                return self._iterator.next()
            except TimeoutError:
                self._while_waiting()

    def _restart(self) -> None:
        self._deaths += 1
        self.end(kill=True)
        why = "usually because memory or /dev/shm ran out"
        if self._deaths == MAX_DEATHS:
            raise DataError(f"a decoding process died {MAX_DEATHS} times, {why}: lower --num_workers")
        self._num_workers = max(1, self._num_workers // 2)
        self._loader = self._make_loader(self._num_workers)
        workers = console.counted(self._num_workers, "worker")
        line = f"a decoding process died, {why}: continuing with {workers}; the batches are the same"
        console.error_from_signal_handler(line)


class _Batches:
    """The batches of a DataLoader. A thread waits for them, so that this one can do something else meanwhile.

    A process that is stopped, or a disk that hangs, may block the thread for ever.
    """

    def __init__(self, loader: DataLoader[Sample]) -> None:
        context = loader.multiprocessing_context
        with blocked_signals(context.get_start_method() if context else None):
            self._iterator = iter(loader)
        self._wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._made: queue.SimpleQueue[Batch | Exception | None] = queue.SimpleQueue()
        self._loader: DataLoader[Sample] | None = None  # to begin with
        self._is_waiting = False
        threading.Thread(target=self._run, name="loading", daemon=True).start()

    def begin_again(self, loader: DataLoader[Sample]) -> None:
        """Begin with the batches that `loader` makes now, in the same processes."""
        self._loader = loader

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
        if not isinstance(made, Exception):
            return made
        if _means_death(made) and isinstance(self._iterator, _MultiProcessingDataLoaderIter):
            raise _DeadWorkerError from made
        raise made

    def end(self, kill: bool) -> None:
        """End the processes and the thread; with `kill`, they do not finish their batches."""
        self._wanted.put(False)
        # No public method ends the processes immediately. DataLoader's own __del__ also calls this one.
        iterator = self._iterator
        if not isinstance(iterator, _MultiProcessingDataLoaderIter):
            return
        if kill:
            _kill(iterator)
            if self._is_waiting:  # the thread is using the iterator, and soon notices that the processes died
                return
            # The shared event needs a lock, with which a process may have died.
            iterator._workers_done_event = threading.Event()  # type: ignore[assignment]
        iterator._shutdown_workers()
        _kill(iterator)  # what hangs
        _close_pipes(iterator)

    def _run(self) -> None:
        while self._wanted.get():
            try:
                if self._loader is not None:
                    self._iterator, self._loader = iter(self._loader), None
                self._made.put(next(self._iterator, None))
            except Exception as error:  # `next` raises it
                self._made.put(error)


def _means_death(error: Exception) -> bool:
    """Whether a decoding process has died, also while it passed on a batch, or has no memory."""
    if isinstance(error, ConnectionError | EOFError | FileNotFoundError) or is_out_of_memory(error):
        return True
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid")


def _kill(iterator: _MultiProcessingDataLoaderIter) -> None:
    for process in iterator._workers:
        if process.is_alive():
            process.kill()
    for process in iterator._workers:
        process.join(END_SECONDS)


def _close_pipes(iterator: _MultiProcessingDataLoaderIter) -> None:
    """Close the pipes to processes that have ended: Python collects them as garbage only much later."""
    for process in iterator._workers:
        if process.exitcode is not None:
            process.close()
    results: Any = iterator._worker_result_queue  # without public names for its pipe
    if results._thread is None:  # with pinned memory, a thread writes to it, and then closes it
        results._reader.close()
        results._writer.close()
