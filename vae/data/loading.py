"""Batches from decoding processes: any epoch from any step for training, every image once for validation."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from vae.config.options import NO_JITTER, DataConfig
from vae.data.dataset import DEFAULTS, Batch, CropDataset, Images, Sample, collate
from vae.data.decoding_processes import DecodingProcesses
from vae.data.workers import start_worker
from vae.sampling.buckets import BucketOrder
from vae.sampling.order import Key, Order, StepSampler
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
                if self._has_processes:
                    _add_counts(batch, self._images.counts())
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


def _add_counts(batch: Batch, here: dict[str, int]) -> None:
    """Add what the training process itself has read to the counts of a batch."""
    for name, count in here.items():
        if name != "open_shards" or batch.counts["worker"] == 0:  # counted once
            batch.counts[name] = batch.counts.get(name, 0) + count


def load_validation(
    images: Images,
    indices: Sequence[int],
    data: DataConfig = DEFAULTS,
    *,
    image_size: int,
    batch_size: int,
    num_workers: int = 0,
    while_waiting: Callable[[], None] = lambda: None,
) -> Iterator[Batch]:
    """Centre crops of the images at `indices`, each once and in order; the last batch may be smaller.

    A batch's `rejected` lists unusable images.
    """
    data = replace(data, crop="center", horizontal_flip=False, rotate90=False, color_jitter=NO_JITTER)
    data = replace(data, prefetch_factor=2, persistent_workers=False)
    dataset = CropDataset(images, data, image_size=image_size)
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
