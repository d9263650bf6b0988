"""The training and validation images of a run: a folder, a manifest or a dataset of shards."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from vae.config.options import Config, DataConfig
from vae.data.dataset import CropDataset, FolderImages, Images
from vae.data.exclude_list import Excluded, read_exclude_list
from vae.data.image_sizes import image_sizes
from vae.data.manifest import MANIFEST_NAME, check_files, image_root, is_manifest, read_rows, train_and_val
from vae.data.shared_images import NotComparedError, find_shared_images
from vae.images.folder import list_images, split_names
from vae.images.formats import BadImageError
from vae.model.autoencoder import downsampling
from vae.prepare.near_duplicates import find_shared
from vae.sampling.buckets import BucketOrder, Buckets, assign, bucket_shapes
from vae.sampling.mixture import MixtureOrder
from vae.sampling.order import Order, ShuffledOrder
from vae.sampling.stream_buckets import StreamBuckets
from vae.sampling.streams import StreamOrder, fitting_shuffle
from vae.shards.dataset_json import is_dataset, read_dataset
from vae.shards.mixture import Mixture, MixtureImages, dataset_paths, parse_mixture
from vae.shards.remote_shards import open_images
from vae.shards.shard_cache import ShardCache, open_cache
from vae.shards.shard_images import ShardImages, streams_of
from vae.system import console
from vae.system.addresses import public_text
from vae.system.errors import DataError, UserError
from vae.system.host import GIB
from vae.training.validation.measure import ValidationSet

Mixable = StreamOrder | MixtureOrder
MAX_COMPARED = 2_000_000  # training images that are compared with those of --val_path when a run starts


@dataclass(frozen=True)
class TrainingSet:
    """The training images of a run, and their order."""

    images: Images
    order: Order
    excluded: Excluded = Excluded()  # noqa: RUF009 - never modified
    aspects: np.ndarray | None = None  # for --buckets: of all images, or of a sample (image_sizes.sampled)

    @property
    def num_images(self) -> int:
        """Images of an epoch."""
        return len(self.order)

    def fingerprint(self) -> str:
        """A hash: as long as it is the same, a run resumes in the same order."""
        return self.images.fingerprint()

    def record(self) -> Any:
        """What `split.json` says about the images."""
        return self.excluded.without(self.images.record())

    @classmethod
    def of(cls, images: Images, seed: int, data: DataConfig) -> "TrainingSet":
        """The images in the order that the seed and the options give."""
        order = images.order(seed)
        if isinstance(order, Mixable):
            order = order.mixing(data.shuffle_shards or _fitting_shuffle(images, order, data))
        return cls(images, order)

    def buckets(self, config: Config, image_size: int, global_batch: int) -> Buckets | None:
        """The shapes of a stage with global batches of this size, and the shape of each image."""
        if self.aspects is None:
            return None
        shapes = bucket_shapes(image_size, downsampling(config.model), config.data.buckets)
        return assign(self.aspects, shapes, global_batch * len(self.aspects) / len(self.images))

    def order_of(self, config: Config, image_size: int, global_batch: int) -> Order:
        """The order of a stage with global batches of this size."""
        buckets = self.buckets(config, image_size, global_batch)
        if buckets is None:
            return self.order
        if isinstance(self.order, Mixable):
            return StreamBuckets(self.order, partial(image_sizes, self.images), buckets, global_batch)
        assert isinstance(self.order, ShuffledOrder)
        return BucketOrder(self.order, buckets, global_batch)

    def crops(self, config: Config, image_size: int, global_batch: int = 0) -> CropDataset:
        """The dataset of training crops of `image_size` px, or of the buckets of this size."""
        buckets = self.buckets(config, image_size, global_batch)
        return CropDataset(
            self.images,
            config.data,
            image_size=image_size,
            seed=config.run.seed,
            buckets=buckets,
            excluded=self.excluded,
        )


def cached_shards(images: Images, data: DataConfig) -> list[np.ndarray]:
    """The sizes of the shards in bytes, of each dataset, or of all that count as one, if a cache has them."""
    parts = images.parts if isinstance(images, MixtureImages) else [images]
    datasets = [part.dataset for part in parts if isinstance(part, ShardImages)]
    sizes = [
        dataset.shards.bytes for dataset in datasets if data.cache_gib and (data.cache_dir or dataset.store)
    ]
    has_weights = isinstance(images, MixtureImages) and images.weights
    return sizes if has_weights or not sizes else [np.concatenate(sizes)]


def _fitting_shuffle(images: Images, order: Mixable, data: DataConfig) -> int | None:
    """The default of --shuffle_shards that fits into the cache of one machine with all streams."""
    sizes = cached_shards(images, data)
    room = data.cache_gib * GIB
    if sum(size.sum() for size in sizes) <= room:
        return None
    return fitting_shuffle(order.num_streams, float(sum(size.mean() for size in sizes)), room)


def find_images(
    config: Config, num_workers: int = 0, val_split_given: bool = False
) -> tuple[TrainingSet, ValidationSet | None]:
    """The training set and the validation set; None if nothing is set aside for validation.

    `num_workers`: processes that decode validation images. `val_split_given`: by the user.
    """
    data = config.data
    cache = open_cache((*dataset_paths(data.data_path), data.val_path), data.cache_dir, data.cache_gib)
    if mixture := parse_mixture(data.data_path):
        train, validation = _images_of_mixture(config, val_split_given, cache, mixture)
    elif is_dataset(data.data_path):
        train, validation = _images_of_dataset(config, val_split_given, cache)
    else:
        train, validation = _image_files(config, val_split_given)
    if data.val_path:
        validation = _validation_images(config, train, cache)
    count = len(validation) if validation is not None else 0
    count = min(count, data.max_val_images or count)
    training_set = TrainingSet.of(train, config.run.seed, config.data)
    if validation is None or not count:
        return training_set, None
    labels = _labels(data, validation, count)
    return training_set, ValidationSet(validation, count, data, num_workers, label=labels)


def _labels(data: DataConfig, images: Images, count: int) -> Callable[[int], str | None]:
    """The labels of the first validation images, read when needed: of shards, or of the manifest."""
    if isinstance(images, ShardImages | MixtureImages):
        return partial(_shard_label, images)
    if data.val_path or not is_manifest(data.data_path):
        return lambda _index: None
    wanted = {images.name(index): index for index in range(count)}

    @lru_cache
    def read() -> dict[int, str]:
        rows = ((wanted.get(row["path"]), row.get("label")) for row in read_rows(data.data_path))
        return {index: str(label) for index, label in rows if index is not None and label is not None}

    return lambda index: read().get(index)


def _shard_label(images: ShardImages | MixtureImages, index: int) -> str | None:
    try:
        label = images.metadata(index).get("label")
    except BadImageError:  # the validation reports it
        return None
    return None if label is None else str(label)


def _images_of_dataset(
    config: Config, val_split_given: bool, cache: ShardCache | None
) -> tuple[Images, Images | None]:
    """The images of a dataset of shards, and those of the validation set that was written with it."""
    data = config.data
    if data.fold is not None:
        raise UserError(f"--fold {data.fold} needs a manifest with folds, not shards: leave it out")
    if val_split_given:
        raise UserError(
            f"--val_split {data.val_split}: shards have a validation set: leave it out or give --val_path"
        )
    dataset = read_dataset(data.data_path)
    validation = None
    if dataset.validation and not data.val_path:
        held_out = read_dataset(dataset.beside(dataset.validation))
        validation = open_images(held_out, data.data_streams, cache)
    return open_images(dataset, data.data_streams, cache), validation


def _images_of_mixture(
    config: Config, val_split_given: bool, cache: ShardCache | None, mixture: Mixture
) -> tuple[Images, Images | None]:
    """The images of several datasets, and those of their validation sets.

    DataError if one of them trains with an image that another validates with.
    """
    data = config.data
    train: list[ShardImages] = []
    held_out: dict[int, ShardImages] = {}
    for number, (path, _) in enumerate(mixture):
        single = replace(config, data=replace(data, data_path=path))
        images, validation = _images_of_dataset(single, val_split_given, cache)
        assert isinstance(images, ShardImages)
        train.append(images)
        if isinstance(validation, ShardImages):
            held_out[number] = validation
    weights = [weight for _, weight in mixture if weight is not None]
    fewest = min(images.num_streams for images in train)
    default = fewest if weights else streams_of([images.dataset for images in train])
    streams = data.data_streams or default  # as a resumed run has them
    for images in (*train, *held_out.values()):
        images.num_streams = streams
    for number, validation in held_out.items():
        for other in range(len(train)):
            if other != number:
                shown = f"--data_path {public_text(validation.location)}"
                _refuse_shared(train[other], validation, shown, data.exclude)
    shown = public_text(data.data_path)
    everything = MixtureImages(train, weights or None, shown)
    if not held_out:
        return everything, None
    own = [weights[number] for number in held_out] if weights else None
    return everything, MixtureImages(list(held_out.values()), own, shown, data.max_val_images)


def _validation_images(config: Config, train: Images, cache: ShardCache | None) -> Images:
    """The images of --val_path; DataError if images of the training set are among them."""
    path = config.data.val_path
    assert path is not None
    images: FolderImages | ShardImages = (
        open_images(read_dataset(path, flag="--val_path"), config.data.data_streams, cache)
        if is_dataset(path)
        else FolderImages(Path(path), list_images(path, flag="--val_path"))
    )
    shown = f"--val_path {public_text(path)}"
    for part in train.parts if isinstance(train, MixtureImages) else [train]:
        if isinstance(part, ShardImages) and isinstance(images, ShardImages):
            _refuse_shared(part, images, shown, config.data.exclude)
        else:
            _refuse_same_files(part, images, shown, config.data.exclude)
    return images


def _refuse_same_files(
    train: FolderImages | ShardImages, images: FolderImages | ShardImages, shown: str, exclude: str | None
) -> None:
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
        examples = ", ".join(f"{ours} ({theirs})" for ours, theirs in shared[:3])
        raise DataError(
            f"{shown}: {len(shared)} of its {len(images)} images are training images of --data_path "
            f"{train.location} too, for example {examples}: move them out of one of the two folders; "
            "without --val_path, --val_split sets images aside"
        )


def _refuse_shared(train: ShardImages, images: ShardImages, shown: str, exclude: str | None) -> None:
    """DataError if validation images are in the training set, or look like one of its images.

    Unless --exclude has the key of one of both.
    """
    if len(train) > MAX_COMPARED:
        console.info(f"{shown} is not compared with the {len(train)} training images, which takes minutes")
        return
    try:
        shared = find_shared(train, images)
    except BadImageError as error:
        raise DataError(f"{shown}: {error.detail}: copy the dataset again") from error
    if exclude and shared:
        pairs = np.array([(image.key, image.training_key) for image in shared], "S32")
        numbers = read_exclude_list(exclude).numbers(pairs.reshape(-1)).reshape(-1, 2)
        shared = [shared[place] for place in np.flatnonzero((numbers < 0).all(axis=1))]
    if shared:
        equal = sum(image.is_equal for image in shared)
        examples = ", ".join(f"{image.key} ({image.training_key})" for image in shared[:3])
        raise DataError(
            f"{shown}: {equal} of its images are training images too and {len(shared) - equal} "
            f"look like one, for example {examples}: give other images"
        )


def _image_files(config: Config, val_split_given: bool) -> tuple[Images, Images | None]:
    """The images of a folder or a manifest, and those of them that are set aside for validation."""
    data = config.data
    if is_manifest(data.data_path):
        train, validation = _images_of_manifest(config, val_split_given)
    elif data.fold is not None:
        raise UserError(
            f"--fold {data.fold} needs a manifest: use --data_path {Path(data.data_path) / MANIFEST_NAME}"
        )
    else:
        share = 0.0 if data.val_path else data.val_split
        train, validation = split_names(list_images(data.data_path), share, _split_seed(config))
    root = Path(image_root(data.data_path))
    return FolderImages(root, train), FolderImages(root, validation) if validation else None


def _split_seed(config: Config) -> int:
    return config.run.seed if config.data.split_seed is None else config.data.split_seed


def _images_of_manifest(config: Config, val_split_given: bool) -> tuple[list[str], list[str]]:
    """Training and validation names. Validation images of the manifest are never used for training."""
    data = config.data
    if data.fold is not None and data.val_path:
        raise UserError(f"--fold {data.fold} and --val_path {data.val_path} exclude each other: remove one")
    train, validation = train_and_val(
        data.data_path,
        fold=data.fold,
        val_split=0.0 if data.val_path else data.val_split,
        seed=_split_seed(config),
        val_split_given=val_split_given,
    )
    check_files(data.data_path, sorted(train + validation))
    return train, validation
