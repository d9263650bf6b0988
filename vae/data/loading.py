"""Batches from decoding processes: any epoch from any step for training, every image once for validation."""

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from vae.config.errors import DataError
from vae.config.options import MAX_PIXELS
from vae.data.dataset import Batch, FolderDataset, Sample, collate
from vae.data.sampling import StepSampler, steps_per_epoch
from vae.data.workers import blocked_signals, start_worker

# A batch that takes longer counts as a hang. A large batch from a slow network share must not reach it.
TIMEOUT_SECONDS = 600


class TrainLoader:
    """Training batches of one rank; neither the number of workers nor resuming changes them."""

    def __init__(
        self,
        dataset: FolderDataset,
        *,
        local_batch: int,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        prefetch_factor: int = 4,
        persistent_workers: bool = True,
        pin_memory: bool = False,
        timeout_seconds: float = TIMEOUT_SECONDS,
        start_method: str | None = None,
    ):
        """`local_batch`: images of one optimizer step on one device. `pin_memory` is for GPUs."""
        self.steps_per_epoch = steps_per_epoch(len(dataset), local_batch, world_size)
        self._sampler = StepSampler(len(dataset), local_batch, rank, world_size, dataset.seed)
        self._persistent = persistent_workers
        self._iterator: Iterator[Batch] | None = None
        self._loader: DataLoader[Sample] | None = _open_loader(
            dataset,
            self._sampler,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory=pin_memory,
            timeout_seconds=timeout_seconds,
            start_method=start_method,
        )

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """The batches of `epoch` from `first_step` on; only one such iterator may be in use at a time."""
        assert self._loader is not None, "the loader is closed"
        self._sampler.start_at(epoch, first_step)
        if self._iterator is None:
            self._iterator = _start(self._loader)
        else:
            self._iterator = iter(self._loader)  # keeps the same worker processes
        finished = False
        try:
            yield from _translate_errors(self._iterator)
            finished = True
        except GeneratorExit:  # the caller stops within the epoch, and may start another one
            finished = True
            raise
        finally:
            if not finished:
                self.close()
            elif not self._persistent:
                self._end_workers()

    def close(self) -> None:
        """End the decoding processes and wait for them."""
        self._end_workers()
        self._loader = None

    def __enter__(self) -> "TrainLoader":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _end_workers(self) -> None:
        _end_workers(self._iterator)
        self._iterator = None


def load_validation(
    root: str | os.PathLike[str],
    names: Sequence[str],
    *,
    image_size: int,
    batch_size: int,
    upscale: bool = False,
    background: str = "white",
    max_pixels: int = MAX_PIXELS,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[Batch]:
    """Centre crops of all `names`, each once and in order; the last batch may be smaller.

    A batch's `indices` are positions in `names`; its `rejected` lists unusable images.
    """
    dataset = FolderDataset(
        root,
        names,
        image_size=image_size,
        crop="center",
        horizontal_flip=False,
        upscale=upscale,
        background=background,
        max_pixels=max_pixels,
    )
    keys = [(0, index) for index in range(len(names))]
    batches = [keys[start : start + batch_size] for start in range(0, len(keys), batch_size)]
    workers = min(num_workers, len(batches))
    iterator = _start(_open_loader(dataset, batches, num_workers=workers, pin_memory=pin_memory))
    try:
        yield from _translate_errors(iterator)
    finally:
        _end_workers(iterator)


def _open_loader(
    dataset: FolderDataset,
    batches: Iterable[list[tuple[int, int]]],
    *,
    num_workers: int,
    pin_memory: bool,
    prefetch_factor: int = 2,
    persistent_workers: bool = False,
    timeout_seconds: float = TIMEOUT_SECONDS,
    start_method: str | None = None,
) -> DataLoader[Sample]:
    has_workers = num_workers > 0  # without workers, DataLoader refuses the options that are for them
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=num_workers,
        collate_fn=partial(collate, image_size=dataset.image_size),
        pin_memory=pin_memory,
        generator=torch.Generator(),  # otherwise each epoch would draw from the training's random state
        worker_init_fn=start_worker,
        prefetch_factor=prefetch_factor if has_workers else None,
        persistent_workers=persistent_workers and has_workers,
        timeout=timeout_seconds if has_workers else 0,
        multiprocessing_context=start_method if has_workers else None,
    )


def _start(loader: DataLoader[Sample]) -> Iterator[Batch]:
    context = loader.multiprocessing_context
    with blocked_signals(context.get_start_method() if context else None):
        return iter(loader)


def _translate_errors(iterator: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the batches; raise DataError with a remedy if a decoding process hangs or dies."""
    try:
        yield from iterator
    except RuntimeError as error:
        text = str(error)
        if "timed out" in text:
            raise DataError(
                "a decoding process hangs: check the disk or share of --data_path, or use --num_workers 0"
            ) from error
        if "exited unexpectedly" in text or "killed by signal" in text:
            raise DataError(
                "a decoding process died, usually because memory or /dev/shm ran out: lower --num_workers"
            ) from error
        raise


def _end_workers(iterator: Iterator[Batch] | None) -> None:
    # No public method ends the processes immediately. DataLoader's own __del__ also calls this one.
    if not isinstance(iterator, _MultiProcessingDataLoaderIter):
        return
    processes = iterator._workers
    iterator._shutdown_workers()
    for process in processes:
        if process.is_alive():  # it hangs
            process.kill()
        process.join()
