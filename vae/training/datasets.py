"""The training and validation images of a run: a folder, a manifest or a dataset of shards.

The processes divide the reading of all images for --exclude and --buckets.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vae.config.options import MIN_IMAGE_SIZE, Config, DataConfig
from vae.config.resolve import check_discriminator, check_image_size, check_views
from vae.data.dataset import CropDataset
from vae.data.exclude_list import Excluded, ExcludeList, read_exclude_list
from vae.data.image_files import FolderImages, ImageSet
from vae.data.image_sets import SAMPLE, NotComparedError, find_excluded, find_shared_images, probe
from vae.data.manifest import MANIFEST_NAME, image_root, manifest_of, train_and_val
from vae.images.folder import list_folders, list_images, split_names
from vae.images.formats import BadImageError
from vae.sampling.buckets import BucketOrder, Shape, aspects, bucket_shapes
from vae.sampling.order import EpochOrder, Order, StreamOrder, shards_at_once, streams_of_process
from vae.shards.dataset_json import ShardedDataset, is_dataset, read_dataset
from vae.shards.shard_cache import open_cache
from vae.shards.shard_images import ShardImages
from vae.system import console
from vae.system.addresses import public_text
from vae.system.errors import DataError, UserError
from vae.system.host import GIB
from vae.training.distributed import Distributed
from vae.training.stages import Position, Stage
from vae.training.validation import ValidationSet


@dataclass(frozen=True)
class TrainingSet:
    """The training images of a run, and their order."""

    images: ImageSet
    order: EpochOrder
    excluded: Excluded = Excluded()  # noqa: RUF009 - never modified
    aspects: np.ndarray | None = None  # of a folder, for --buckets

    @property
    def num_images(self) -> int:
        """Images of an epoch."""
        return len(self.order)

    def record(self) -> Any:
        """The entry of the images in `split.json`."""
        return self.excluded.without(self.images.record())

    def sample(self, count: int, position: Position, rank: int, world_size: int) -> Sequence[int]:
        """About `count` images, spread over all.

        If a cache has the shards: those with which this process has trained last, or begins.
        """
        order = self.order
        if not len(self.images.cached_bytes):
            return range(0, len(self.images), max(1, len(self.images) // count))
        own = len(order) // world_size
        epoch, done = position.epoch, position.images_in_epoch // world_size
        if epoch and not done:
            epoch, done = epoch - 1, own
        count = min(count, own, order.block_length(1) // world_size)
        first = max(0, min(done, own) - count)
        return order.samples(epoch, rank + first * world_size, count, world_size)

    def shapes(self, config: Config, image_size: int) -> list[Shape] | None:
        """The shapes of the crops of a stage with --buckets; None: squares."""
        count = config.data.buckets
        return bucket_shapes(image_size, config.model.downsampling, count) if count else None

    def order_of(self, config: Config, image_size: int, local_batch: int, world_size: int) -> Order:
        """The order of a stage with batches of this size in each process."""
        shapes = self.shapes(config, image_size)
        if shapes is None:
            return self.order
        return BucketOrder(self.order, self._aspects_of, shapes, local_batch, world_size)

    def _aspects_of(self, indices: np.ndarray) -> np.ndarray:
        if self.aspects is None:
            return aspects(self.images.sizes(indices))
        return self.aspects[indices]

    def crops(self, config: Config, image_size: int) -> CropDataset:
        """The dataset of training crops of `image_size` px, or of the buckets of this size."""
        return CropDataset(
            self.images,
            config.data,
            image_size=image_size,
            channels=config.model.image_channels,
            seed=config.run.seed,
            shapes=self.shapes(config, image_size),
            excluded=self.excluded,
        )


def check_cache(training_set: TrainingSet, dist: Distributed) -> None:
    """Raise UserError if the cache is too small for the shards that this machine reads at once."""
    order, images = training_set.order, training_set.images
    sizes = images.cached_bytes
    if not len(sizes):
        return
    assert isinstance(order, StreamOrder)
    assert isinstance(images, ShardImages)
    assert images.cache is not None
    cache = images.cache
    available = cache.available_bytes()
    streams = order.num_streams
    window = order.shuffle_shards // streams
    here = min(streams, dist.local_world_size * streams_of_process(streams, dist.world_size))
    wanted = float(min(sizes.sum(), shards_at_once(here, window) * sizes.mean()))
    if wanted <= available:
        if dist.rank % dist.local_world_size:  # the first process of a machine does this for all
            return
        total = cache.claim(int(wanted), images.version, int(sizes.sum()))
        if total > available:
            remedy = f"give all --cache_gib {math.ceil(total / GIB)}, or each its own --cache_dir"
            if available < cache.max_bytes:  # the disk has no more
                remedy = "free some space, or give each a --cache_dir on its own disk"
            console.warning(
                f"--cache_dir {cache.folder.parent}: the commands that share it read about "
                f"{total / GIB:.3g} GiB of shards at once, more than its {available / GIB:.3g} GiB, and "
                f"download them again: {remedy}"
            )
        return
    disk = f" ({available / GIB:.3g} on this disk)" if available < cache.max_bytes else ""
    raise UserError(
        f"--cache_gib {cache.max_bytes / GIB:.3g}{disk}: this machine reads about {wanted / GIB:.3g} GiB of "
        f"shards at once: use --cache_gib {math.ceil(wanted / GIB)}, or start a new run with less than "
        f"--data_streams {streams} --shuffle_shards {order.shuffle_shards}"
    )


def find_images(
    config: Config, num_workers: int = 0, val_split_given: bool = False
) -> tuple[TrainingSet, ValidationSet | None]:
    """The training set and the validation set; None if nothing is set aside for validation.

    `num_workers`: processes that decode validation images. `val_split_given`: by the user.
    """
    data = config.data
    datasets, val_datasets = _read_datasets(data, val_split_given)
    cache = open_cache([*datasets, *val_datasets], data.cache_dir, data.cache_gib)
    train: ImageSet
    validation: ImageSet | None = None
    if datasets:
        train = ShardImages(datasets, data.data_streams, cache)
    else:
        train, validation = _image_files(config, val_split_given)
    if val_datasets:
        validation = ShardImages(val_datasets, data.data_streams, cache)
    elif data.val_path:
        validation = FolderImages(Path(data.val_path), list_images(data.val_path, flag="--val_path"))
    if validation is not None and data.val_path:
        _refuse_same_images(train, validation, f"--val_path {public_text(data.val_path)}", data.exclude)
    elif validation is not None and len(datasets) > 1:  # one may train with an image of another one's set
        shown = f"--data_path {public_text(validation.location)}"
        _refuse_same_images(train, validation, shown, data.exclude)
    training_set = TrainingSet(train, train.order(config.run.seed, data.shuffle_shards))
    if validation is None or not len(validation):
        return training_set, None
    indices = validation.sample(data.max_val_images or len(validation)).tolist()
    channels = config.model.image_channels
    return training_set, ValidationSet(validation, indices, data, channels, num_workers)


def _read_datasets(
    data: DataConfig, val_split_given: bool
) -> tuple[list[ShardedDataset], list[ShardedDataset]]:
    """The datasets of shards for training, and those for validation; none of image files.

    For validation: --val_path, or the sets that were written with those for training.
    """
    datasets = []
    if all(map(is_dataset, data.data_path)):
        if data.fold is not None:
            raise UserError(f"--fold {data.fold} needs a manifest with folds, not shards: leave it out")
        if val_split_given:
            raise UserError(
                f"--val_split {data.val_split}: shards have a validation set: leave it out or give --val_path"
            )
        datasets = [read_dataset(path) for path in data.data_path]
    if data.val_path:
        is_sharded = is_dataset(data.val_path)
        return datasets, [read_dataset(data.val_path, flag="--val_path")] if is_sharded else []
    written = [dataset.beside(dataset.validation) for dataset in datasets if dataset.validation]
    return datasets, [read_dataset(path) for path in written]


def _refuse_same_images(train: ImageSet, images: ImageSet, shown: str, exclude: str | None) -> None:
    """DataError if validation images are training images too, unless --exclude has them."""
    try:
        shared = find_shared_images(train, images, read_exclude_list(exclude) if exclude else None)
    except NotComparedError as error:
        console.info(
            f"{shown} is not searched for copies of images of --data_path, which takes minutes: {error}"
        )
        return
    except BadImageError as error:
        raise DataError(f"{shown}: {error.detail}: copy the dataset again") from error
    if shared:
        examples = ", ".join(f"{ours} ({theirs})" for ours, theirs in shared[:2])
        raise DataError(
            f"{shown}: {len(shared)} of its {len(images)} images are training images of --data_path "
            f"{train.location} too, for example {examples}: give other images"
        )


def _image_files(config: Config, val_split_given: bool) -> tuple[FolderImages, FolderImages | None]:
    """The images of a folder or a manifest, and those of them that are set aside for validation."""
    data = config.data
    manifest = manifest_of(data.data_path)
    if manifest is not None:
        root = image_root(manifest)
        train, validation = _images_of_manifest(config, manifest, val_split_given)
    elif data.fold is not None:
        raise UserError(
            f"--fold {data.fold} needs a manifest: use --data_path {Path(data.data_path[0]) / MANIFEST_NAME}"
        )
    else:
        folder, names = list_folders(data.data_path)
        root = Path(folder)
        share = 0.0 if data.val_path else data.val_split
        train, validation = split_names(names, share, _split_seed(config))
    held_out = FolderImages(root, validation, manifest) if validation else None
    return FolderImages(root, train, manifest), held_out


def _split_seed(config: Config) -> int:
    return config.run.seed if config.data.split_seed is None else config.data.split_seed


def _images_of_manifest(config: Config, manifest: str, val_split_given: bool) -> tuple[list[str], list[str]]:
    """Training and validation names. Validation images of the manifest are never used for training."""
    data = config.data
    if data.fold is not None and data.val_path:
        raise UserError(f"--fold {data.fold} and --val_path {data.val_path} exclude each other: remove one")
    return train_and_val(
        manifest,
        fold=data.fold,
        val_split=0.0 if data.val_path else data.val_split,
        seed=_split_seed(config),
        val_split_given=val_split_given,
    )


# ---- Reading by all processes --------------------------------------------------------------------------


def with_aspects(training_set: TrainingSet, config: Config, dist: Distributed) -> TrainingSet:
    """The training set with the aspects of a folder that --buckets needs; each process reads a share."""
    images, data = training_set.images, config.data
    if not data.buckets or images.has_index:
        return training_set
    indices = np.array_split(np.arange(len(images)), dist.world_size)[dist.rank]
    measured = results_by_rank(lambda: aspects(images.sizes(indices)).tobytes(), dist)
    return replace(training_set, aspects=np.frombuffer(b"".join(measured), dtype=np.float32))


def results_by_rank(read: Callable[[], bytes], dist: Distributed) -> list[bytes]:
    """The results of `read` in each process, by rank; DataError in all of them if one fails."""
    own, failure = b"", None
    try:
        own = read()
    except UserError as error:
        failure = error
    if dist.all_reduce_scalars(failure is not None)[0]:
        raise failure or DataError("another process cannot read what it needs of the images: it says why")
    parts = dict(dist.all_gather_set({(dist.rank, own)}))
    return [parts[rank] for rank in range(dist.world_size)]


def without_excluded(
    training_set: TrainingSet, validation_set: ValidationSet | None, data: DataConfig, dist: Distributed
) -> tuple[TrainingSet, ValidationSet | None]:
    """Both sets without the images that --exclude names; DataError if one of them has no other images."""
    if data.exclude is None:
        return training_set, validation_set
    images = training_set.images
    sets: dict[str, tuple[ImageSet, Sequence[int]]] = {"training": (images, range(len(images)))}
    if validation_set is not None:
        sets["validation"] = validation_set.images, validation_set.indices

    def find(images: ImageSet, listed: ExcludeList) -> np.ndarray:
        def read_share() -> bytes:
            return images.find(listed.names, listed.keys, dist.rank, dist.world_size).tobytes()

        return np.unique(np.frombuffer(b"".join(results_by_rank(read_share, dist)), np.int64))

    training, *validation = find_excluded(data.exclude, sets, find)
    if validation_set is not None:
        validation_set = replace(validation_set, excluded=validation[0])
    return replace(training_set, excluded=training), validation_set


# ---- Checks of the stages --------------------------------------------------------------------------------


def check_stages(
    config: Config, stages: list[Stage], position: Position, training_set: TrainingSet, dist: Distributed
) -> None:
    """Raise UserError if one of these stages, which are not finished, cannot make a single step."""
    count = training_set.num_images
    streams = training_set.order.num_streams
    data_path = public_text(" ".join(config.data.data_path))
    if not count:
        raise DataError(
            f"--val_split {config.data.val_split} leaves no training image of {data_path}: lower it"
        )
    if streams and streams % dist.world_size:
        times = streams_of_process(streams, dist.world_size) * dist.world_size // streams
        console.info(
            f"note: {dist.world_size} processes do not divide the {console.counted(streams, 'stream')} of "
            f"{data_path}: the samples are the same, but {times} processes read each shard"
        )
    check_cache(training_set, dist)
    for stage in stages:
        check_stage(config, stage)
    if stages:  # an image that is usable at the largest size is usable in every stage
        sample = None
        if len(training_set.images.cached_bytes):  # others would have to be fetched for this
            sample = training_set.sample(SAMPLE, position, dist.rank, dist.world_size)
        largest = max(stage.image_size for stage in stages)
        probe(training_set.crops(config, largest), config.data.max_bad_fraction, sample)
    # after the images are checked: files that are no images would need another remedy
    images_of_steps = [s.batch_size * config.run.accumulation_steps * dist.world_size for s in stages]
    for stage, images in zip(stages, images_of_steps, strict=True):
        if count < images:
            flag = "--global_batch_size" if config.run.global_batch_size else "--batch_size"
            raise DataError(
                f"--batch_size {stage.batch_size} (x {config.run.accumulation_steps} accumulation x "
                f"{dist.world_size} processes) is more than the {count} training images: lower {flag} or add "
                "images"
            )


def check_stage(config: Config, stage: Stage) -> None:
    """Raise UserError if the crops of a stage do not suit the network, the loss or the validation."""
    size = stage.image_size
    count = config.data.buckets
    check_image_size(size, config.model)
    shapes = bucket_shapes(size, config.model.downsampling, count) if count else [(size, size)]
    shortest = min(map(min, shapes)) if shapes else 0
    if shortest < MIN_IMAGE_SIZE:
        raise UserError(
            f"--buckets {count} gives crops with a side of {shortest} px at --image_size {size}: the minimum "
            f"is {MIN_IMAGE_SIZE}: raise --image_size or use --buckets 1"
        )
    check_discriminator(shortest, config.loss)
    check_views(shortest, config.model, config.loss)
