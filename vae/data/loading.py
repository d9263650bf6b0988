"""Batches from decoding processes: any epoch from any step for training, every image once for validation."""

import multiprocessing
import queue
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
from vae.data.dataset import DEFAULTS, Batch, CropDataset, Sample, collate
from vae.data.image_files import ImageSet
from vae.data.workers import cause_of_failure, start_worker, starting_processes
from vae.sampling.buckets import BucketOrder
from vae.sampling.order import Key, Order, StepSampler
from vae.system.errors import DataError, UserError, WorkerError


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
            num_workers,
            pin_memory=pin_memory,
            start_method=start_method,
        )
        self._decoding = DecodingProcesses(make_loader, while_waiting)

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """The batches of `epoch` from `first_step` on; only one such iterator may be in use at a time."""
        self._sampler.start_at(epoch, first_step)
        with closing(self._decoding.batches()) as batches:
            for step, batch in enumerate(batches, first_step):
                self._announce(epoch, step)
                if self._has_processes:  # the training process itself reads shards ahead
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
    images: ImageSet,
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
    make_loader = partial(_open_loader, dataset, batches, min(num_workers, len(batches)), pin_memory=False)
    yield from DecodingProcesses(make_loader, while_waiting).batches()


class _CropBatches(Dataset[Sample]):
    """Whole batches of crops. A DataError is a result: DataLoader would add a traceback to its text."""

    def __init__(self, crops: CropDataset) -> None:
        self._crops = crops
        crops.images.counts()  # forget what was read before

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


class DecodingProcesses:
    """The batches of a DataLoader, for one epoch or for all. A thread waits for them.

    A process that is stopped, or a disk that hangs, may block the thread for ever. Only the thread keeps the
    DataLoader's iterator, so the processes are ended there when it drops the iterator.
    """

    def __init__(
        self, make_loader: Callable[[], DataLoader[Sample]], while_waiting: Callable[[], None]
    ) -> None:
        """`while_waiting` is called every POLL_SECONDS of a wait."""
        self._make_loader = make_loader
        self._while_waiting = while_waiting
        self._processes: list[Any] = []
        self._thread: threading.Thread | None = None

    def batches(self) -> Generator[Batch, None, None]:
        """All batches that the loader makes now; WorkerError with cause and remedy if a process fails."""
        finished, begin_again = False, self._thread is not None
        try:
            if not begin_again:
                self._start()
            batch = self._next(begin_again)
            while batch is not None:
                yield batch
                batch = self._next()
            finished = True
        except GeneratorExit:  # the caller stops within the epoch, and may start another one
            finished = True
            raise
        finally:
            if not (finished and self._persistent):
                self.end(kill=not finished)

    def end(self, kill: bool = False) -> None:
        """End the processes and wait for them; with `kill`, they do not finish their batches."""
        if self._thread is None:
            return
        self._wanted.put(None)
        if kill:
            self._kill()
        if not self._is_waiting:  # otherwise, the thread soon notices that the processes were killed
            self._thread.join(END_SECONDS)
        self._kill()  # those that hang
        for process in self._processes:
            if self._closes and process.exitcode is not None and not self._thread.is_alive():
                process.close()  # its pipes: Python collects them as garbage only much later
        self._thread = None

    def _start(self) -> None:
        loader = self._make_loader()
        self._persistent = loader.persistent_workers
        # DataLoader of torch before 2.14 asks at exit whether the processes of such a loader are alive.
        self._closes = not (loader.pin_memory and loader.persistent_workers)
        before = multiprocessing.active_children()
        try:
            with starting_processes(loader.multiprocessing_context, loader.num_workers):
                iterator, failure = iter(loader), None
        except (OSError, RuntimeError) as error:
            traceback.clear_frames(error.__traceback__)  # they keep what was started
            iterator, failure = None, error
        self._processes = [child for child in multiprocessing.active_children() if child not in before]
        if failure is not None:
            self._kill()
            raise self._meaning(failure)
        self._is_waiting = False
        self._wanted = queue.SimpleQueue[bool | None]()
        # No SimpleQueue: its timed `get` may wait for ever if a signal's handler runs past the deadline.
        self._made = queue.Queue[Batch | Exception | None]()
        arguments = loader, iterator, self._wanted, self._made
        self._thread = threading.Thread(target=_make_batches, args=arguments, daemon=True)
        self._thread.start()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(END_SECONDS)

    def _next(self, begin_again: bool = False) -> Batch | None:
        """The next batch, or None at the end."""
        self._wanted.put(begin_again)
        self._is_waiting = True
        while True:
            try:
                made = self._made.get(timeout=POLL_SECONDS)
                break
            except queue.Empty:
                self._while_waiting()
        self._is_waiting = False
        if isinstance(made, Exception):
            raise self._meaning(made)
        return made

    def _meaning(self, error: Exception) -> Exception:
        """WorkerError if a process has died, or the system refused something to it."""
        if isinstance(error, UserError):
            return error
        # The system may take a moment to end a process.
        wait([process.sentinel for process in self._processes], timeout=1.0)
        codes = [process.exitcode for process in self._processes if process.exitcode is not None]
        cause = cause_of_failure(error, codes, ", or use --num_workers 0")
        return error if cause is None else WorkerError(f"decoding processes failed: {cause}")


def _make_batches(
    loader: DataLoader[Sample],
    iterator: Any,
    wanted: "queue.SimpleQueue[bool | None]",
    made: "queue.Queue[Batch | Exception | None]",
) -> None:
    """Make a batch whenever one is wanted; True: the first one of what the loader makes now."""
    for begin_again in iter(wanted.get, None):
        try:
            if begin_again:
                iterator = iter(loader)
            made.put(next(iterator, None))
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they keep the iterator
            made.put(error)
    del loader, iterator  # an error that somebody keeps also keeps this frame
