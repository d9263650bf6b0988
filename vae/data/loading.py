"""Batches from decoding processes: any epoch from any step for training, every image once for validation."""

import errno
import multiprocessing
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from vae.config.options import NO_JITTER, DataConfig
from vae.data.dataset import DEFAULTS, Batch, CropDataset, Images, Sample, collate
from vae.data.workers import blocked_signals, start_worker
from vae.device import is_out_of_memory
from vae.sampling.buckets import BucketOrder
from vae.sampling.order import Key, Order, StepSampler
from vae.system import console
from vae.system.errors import DataError


class TrainLoader:
    """Training batches of one rank; neither the number of workers nor resuming changes them."""

    def __init__(
        self,
        dataset: CropDataset,
        *,
        local_batch: int,
        order: Order | None = None,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
        while_waiting: Callable[[], None] = lambda: None,
        start_method: str | None = None,
    ):
        """`local_batch`: images of one optimizer step on one device. `pin_memory` is for GPUs.

        `order`: another one than that of the images.

        `while_waiting` is called about once per second of a wait for a batch; it may raise an exception.
        """
        self._images = dataset.images
        self._has_processes = num_workers > 0
        order = dataset.images.order(dataset.seed) if order is None else order
        self._sampler = StepSampler(order, local_batch, rank, world_size)
        self.steps_per_epoch = self._sampler.steps_per_epoch
        make_loader = partial(
            _open_loader,
            dataset,
            _Announced(self._sampler, self._announce),
            pin_memory=pin_memory,
            start_method=start_method,
        )
        self._decoding = DecodingProcesses(
            make_loader, num_workers, while_waiting, dataset.data.persistent_workers
        )

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """The batches of `epoch` from `first_step` on; only one such iterator may be in use at a time."""
        batches = self._decoding.batches(lambda done: self._sampler.start_at(epoch, first_step + done))
        with closing(batches):
            for step, batch in enumerate(batches, first_step):
                self._announce(epoch, step)
                if self._has_processes:  # what the training process itself has read
                    for name, count in self._images.counts().items():
                        batch.counts[name] = batch.counts.get(name, 0) + count
                yield batch

    def _announce(self, epoch: int, step: int) -> None:
        """Let the images of this step, and of later ones, be fetched."""
        sampler = self._sampler
        position = step * sampler.local_batch * sampler.world_size + sampler.rank
        order: Order = sampler.order
        if isinstance(order, BucketOrder):
            position = order.base_position(position) + sampler.rank
            order = order.base
        self._images.expect(order, epoch, position, sampler.world_size)

    def close(self) -> None:
        """End the decoding processes and wait for them."""
        self._decoding.end()

    def __enter__(self) -> "TrainLoader":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


class _Announced:
    """The batches of a sampler; its position is announced first, when the decoding processes exist."""

    def __init__(self, sampler: StepSampler, announce: Callable[[int, int], None]) -> None:
        self._sampler, self._announce = sampler, announce

    def __iter__(self) -> Iterator[list[Key]]:
        self._announce(self._sampler.epoch, self._sampler.first_step)
        yield from self._sampler


def load_validation(
    images: Images,
    indices: Sequence[int],
    data: DataConfig = DEFAULTS,
    *,
    image_size: int,
    batch_size: int,
    channels: int = 3,
    num_workers: int = 0,
    while_waiting: Callable[[], None] = lambda: None,
) -> Iterator[Batch]:
    """Centre crops of the images at `indices`, each once and in order; the last batch may be smaller.

    A batch's `rejected` lists unusable images.
    """
    data = replace(data, crop="center", horizontal_flip=False, rotate90=False, color_jitter=NO_JITTER)
    data = replace(data, prefetch_factor=2, persistent_workers=False)
    dataset = CropDataset(images, data, image_size=image_size, channels=channels)
    keys = [(0, index) for index in indices]
    batches = [keys[start : start + batch_size] for start in range(0, len(keys), batch_size)]
    remaining = list(batches)

    def start_at(done: int) -> None:
        remaining[:] = batches[done:]

    make_loader = partial(_open_loader, dataset, remaining, pin_memory=False)
    decoding = DecodingProcesses(make_loader, min(num_workers, len(batches)), while_waiting, persistent=False)
    yield from decoding.batches(start_at)


class _CropBatches(Dataset[Sample]):
    """Whole batches of crops. A DataError is a result: DataLoader would add a traceback to its text."""

    def __init__(self, crops: CropDataset) -> None:
        self._crops = crops
        crops.images.counts()  # without what was read before

    def __getitems__(self, keys: Sequence[tuple[int, int] | Key]) -> Batch | DataError:
        started, cpu_started = time.perf_counter(), time.thread_time()
        try:
            crops = self._crops
            samples = [crops[key] for key in keys]
            batch = collate(samples, image_size=crops.image_size, channels=crops.channels)
        except DataError as error:
            return error
        batch.counts = {
            **self._crops.images.counts(),
            "decode_seconds": time.thread_time() - cpu_started,
            "load_seconds": time.perf_counter() - started,
        }
        return batch


def _as_is(batch: Any) -> Any:
    return batch


def _open_loader(
    dataset: CropDataset,
    batches: Iterable[list[Any]],
    num_workers: int,
    *,
    pin_memory: bool,
    start_method: str | None = None,
) -> DataLoader[Sample]:
    has_workers = num_workers > 0  # without workers, DataLoader refuses the options that are for them
    return DataLoader(
        _CropBatches(dataset),
        batch_sampler=batches,
        num_workers=num_workers,
        collate_fn=_as_is,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # otherwise each epoch would draw from the training's random state
        worker_init_fn=start_worker,
        prefetch_factor=dataset.data.prefetch_factor if has_workers else None,
        persistent_workers=dataset.data.persistent_workers and has_workers,
        multiprocessing_context=start_method if has_workers else None,
    )


# ---- Decoding processes ------------------------------------------------------------------------------------

POLL_SECONDS = 1.0  # a wait for a batch notices this often that the run has to stop
END_SECONDS = 5.0  # a process in a read that no signal interrupts is left behind
MAX_FAILURES = 3  # of the decoding processes of one loader: at this one, training stops
NO_FILES = ("Too many open files", "ancdata")  # of the system, and of Python if a file could not be passed on
NO_PAGING_FILE = 1455  # Windows' ERROR_COMMITMENT_LIMIT


class WorkerError(Exception):
    """A decoding process has died, or lacks memory or files: the cause and its remedy."""


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
        self._failures = 0
        self._batches: _Batches | None = None

    def batches(self, start_at: Callable[[int], None]) -> Generator[Batch, None, None]:
        """All batches; `start_at(n)` is called before they are made from the nth on.

        Raises DataError with cause and remedy if processes fail repeatedly.
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
                except WorkerError as error:
                    self._restart(error)
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

    def _restart(self, why: WorkerError) -> None:
        self._failures += 1
        self.end(kill=True)
        if self._failures == MAX_FAILURES:
            raise DataError(f"decoding processes failed {MAX_FAILURES} times: {why}")
        self._num_workers = max(1, self._num_workers // 2)
        workers = console.counted(self._num_workers, "worker")
        line = f"a decoding process failed: {why}. Continuing with {workers}; the batches are the same"
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
        failure, iterator = None, None
        try:
            with blocked_signals(context.get_start_method() if context else None):
                iterator = iter(loader)
        except OSError as error:
            failure = error
        self._processes = [child for child in multiprocessing.active_children() if child not in before]
        if failure is not None:
            self._kill()
            raise WorkerError(_cause(failure, []))
        # DataLoader of torch before 2.14 asks at exit whether the processes of such a loader are alive.
        self._closes = not (loader.pin_memory and loader.persistent_workers)
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
            if self._closes and process.exitcode is not None and not self._thread.is_alive():
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
                self._made.put(self._meaning(error))
        del iterator  # an error that somebody keeps also keeps this frame

    def _meaning(self, error: Exception) -> Exception:
        """WorkerError if a process has died, also while it passed on a batch, or has no memory or files."""
        if not self._processes:
            return error
        is_lost = isinstance(error, ConnectionError | EOFError | FileNotFoundError)
        # The system may take a moment to end the process.
        wait([process.sentinel for process in self._processes], timeout=1.0 if is_lost else 0.0)
        codes = [process.exitcode for process in self._processes if process.exitcode is not None]
        is_dead = isinstance(error, RuntimeError) and codes
        lacks = is_out_of_memory(error) or any(text in str(error) for text in NO_FILES)
        return WorkerError(_cause(error, codes)) if is_lost or is_dead or lacks else error


def _cause(error: Exception, exit_codes: list[int]) -> str:
    """Why processes failed, by an error and the exit codes of those that ended, and the remedy."""
    text = (str(error).strip().splitlines() or ["no message"])[-1]  # the others are a process's traceback
    signals = {signal.Signals(-code).name for code in exit_codes if -code in set(signal.Signals)}
    if errno.ENOSPC in exit_codes or "SIGBUS" in signals or os.strerror(errno.ENOSPC) in text:
        return "shared memory is full: give a container more with --shm-size 8g, or use --num_workers 0"
    if errno.EMFILE in exit_codes or any(part in text for part in NO_FILES):
        return "too many files are open: raise the limit with ulimit -n 4096, or use --num_workers 0"
    if NO_PAGING_FILE in exit_codes or f"WinError {NO_PAGING_FILE}" in text:
        return "the paging file of Windows is too small (error 1455): enlarge it, or use --num_workers 0"
    if errno.ENOMEM in exit_codes or is_out_of_memory(error):
        return "memory ran out: lower --num_workers"
    if "SIGKILL" in signals:
        return "it was killed (SIGKILL), usually by the system because memory ran out: lower --num_workers"
    how = ", ".join(sorted(signals)) or ", ".join(f"code {code}" for code in exit_codes) or text
    return f"it ended ({how}): prepare_data.py --mode validate finds images that crash a decoder"
