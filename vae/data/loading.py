"""Batches from decoding processes: any epoch from any step for training, every image once for validation."""

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from vae import console
from vae.config.errors import DataError
from vae.config.options import MAX_PIXELS
from vae.data.dataset import Batch, CropDataset, Images, Sample, collate
from vae.data.sampling import Key, Order, StepSampler
from vae.data.stream_buckets import StreamBuckets
from vae.data.workers import blocked_signals, start_worker
from vae.device import is_out_of_memory

POLL_SECONDS = 1.0  # a wait for a batch notices this often that the run has to stop
END_SECONDS = 5.0  # a process in a read that no signal interrupts is left behind
MAX_DEATHS = 3  # of decoding processes of one loader: at this one, training stops

_MakeLoader = Callable[[int], DataLoader[Sample]]  # with this number of workers


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
        prefetch_factor: int = 4,
        persistent_workers: bool = True,
        pin_memory: bool = False,
        while_waiting: Callable[[], None] = lambda: None,
        start_method: str | None = None,
    ):
        """`local_batch`: images of one optimizer step on one device. `pin_memory` is for GPUs.

        `order`: another one than that of the images.

        `while_waiting` is called every POLL_SECONDS of a wait for a batch, and may end it with an exception.
        """
        self._images, self._has_processes = dataset.images, num_workers > 0
        order = dataset.images.order(dataset.seed) if order is None else order
        self._sampler = StepSampler(order, local_batch, rank, world_size)
        self.steps_per_epoch = self._sampler.steps_per_epoch
        make_loader = partial(
            _open_loader,
            dataset,
            _Announced(self._sampler, self._announce),
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory=pin_memory,
            start_method=start_method,
        )
        self._decoding = _Decoding(make_loader, num_workers, while_waiting, persistent_workers)

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """The batches of `epoch` from `first_step` on; only one such iterator may be in use at a time."""
        batches = self._decoding.batches(lambda done: self._sampler.start_at(epoch, first_step + done))
        with closing(batches):
            for step, batch in enumerate(batches, first_step):
                self._announce(epoch, step)
                if self._has_processes:
                    _add_counts(batch, self._images.counts())
                yield batch

    def _announce(self, epoch: int, step: int) -> None:
        """Let the images of this step, and of later ones, be fetched."""
        sampler = self._sampler
        position = step * sampler.local_batch * sampler.world_size + sampler.rank
        order: Order = sampler.order
        if isinstance(order, StreamBuckets):
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


def _add_counts(batch: Batch, here: dict[str, int]) -> None:
    """Add what the training process itself has read to the counts of a batch."""
    for name, count in here.items():
        if name != "open_shards" or batch.counts["worker"] == 0:  # counted once
            batch.counts[name] = batch.counts.get(name, 0) + count


def load_validation(
    images: Images,
    indices: Sequence[int],
    *,
    image_size: int,
    batch_size: int,
    upscale: bool = False,
    background: str = "white",
    max_pixels: int = MAX_PIXELS,
    num_workers: int = 0,
    pin_memory: bool = False,
    while_waiting: Callable[[], None] = lambda: None,
) -> Iterator[Batch]:
    """Centre crops of the images at `indices`, each once and in order; the last batch may be smaller.

    A batch's `rejected` lists unusable images.
    """
    dataset = CropDataset(
        images,
        image_size=image_size,
        crop="center",
        horizontal_flip=False,
        upscale=upscale,
        background=background,
        max_pixels=max_pixels,
    )
    keys = [(0, index) for index in indices]
    batches = [keys[start : start + batch_size] for start in range(0, len(keys), batch_size)]
    remaining = list(batches)

    def start_at(done: int) -> None:
        remaining[:] = batches[done:]

    make_loader = partial(_open_loader, dataset, remaining, pin_memory=pin_memory)
    decoding = _Decoding(make_loader, min(num_workers, len(batches)), while_waiting, persistent=False)
    yield from decoding.batches(start_at)


class _DeadWorkerError(Exception):
    """A decoding process has died."""


class _Decoding:
    """Makes batches in processes, or in a thread of this one. If a process dies, fewer are started again."""

    def __init__(
        self, make_loader: _MakeLoader, num_workers: int, while_waiting: Callable[[], None], persistent: bool
    ) -> None:
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


class _CropBatches(Dataset[Sample]):
    """Whole batches of crops. A DataError is a result: DataLoader would add a traceback to its text."""

    def __init__(self, crops: CropDataset) -> None:
        self._crops = crops
        crops.images.counts()  # without what was read before

    def __getitems__(self, keys: Sequence[tuple[int, int] | Key]) -> Batch | DataError:
        started, cpu_started = time.perf_counter(), time.thread_time()
        try:
            batch = collate([self._crops[key] for key in keys], image_size=self._crops.image_size)
        except DataError as error:
            return error
        worker = get_worker_info()
        batch.counts = {
            **self._crops.images.counts(),
            "decode_seconds": time.thread_time() - cpu_started,
            "load_seconds": time.perf_counter() - started,
            "worker": worker.id if worker else 0,
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
    prefetch_factor: int = 2,
    persistent_workers: bool = False,
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
        prefetch_factor=prefetch_factor if has_workers else None,
        persistent_workers=persistent_workers and has_workers,
        multiprocessing_context=start_method if has_workers else None,
    )
