"""Aspect buckets: shapes, batches of one shape from every image, crops that cover it."""

import math
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from vae.config.options import DataConfig
from vae.data.dataset import CropDataset
from vae.data.image_files import FolderImages
from vae.data.loading import TrainLoader
from vae.sampling.buckets import BucketOrder, aspects, bucket_shapes, nearest
from vae.sampling.order import ShuffledOrder, StepSampler, StreamOrder

COUNT, BATCH = 5000, 16
SHAPES = bucket_shapes(256, 8, 5)


@pytest.mark.parametrize(("size", "factor", "count"), [(512, 8, 9), (1024, 16, 20), (256, 8, 1), (32, 2, 3)])
def test_shapes_have_about_the_pixels_of_the_square(size, factor, count):
    shapes = bucket_shapes(size, factor, count)
    assert 1 <= len(shapes) <= count + 1
    for height, width in shapes:
        assert height % factor == width % factor == 0
        assert 1 - 2 * factor / size < height * width / size**2 <= 1  # never more: the plan is for the square
        assert 0.5 <= height / width <= 2
    assert (size, size) in shapes
    assert shapes == [(width, height) for height, width in reversed(shapes)]
    ratios = [width / height for height, width in shapes]
    assert ratios == sorted(ratios)


def test_each_image_has_the_nearest_shape():
    sizes = np.array([[300, 100], [100, 100], [90, 100], [100, 160], [0, 0]])
    codes = nearest(aspects(sizes), SHAPES)
    assert SHAPES[codes[0]] == SHAPES[-1]
    assert SHAPES[codes[4]] == (256, 256)  # unknown
    logarithms = [math.log(width / height) for height, width in SHAPES]
    for code, (width, height) in zip(codes[:4], sizes, strict=False):
        distances = [abs(one - math.log(width / height)) for one in logarithms]
        assert distances[code] == min(distances)


@pytest.fixture(scope="module")
def drawn():
    """The aspects of COUNT images."""
    return np.random.default_rng(0).normal(0.1, 0.35, COUNT).astype(np.float32)


def of_folder(drawn, processes=1) -> BucketOrder:
    return BucketOrder(
        ShuffledOrder(COUNT, 3), lambda images: drawn[images], SHAPES, BATCH // processes, processes
    )


def of_streams(drawn, processes=1, images_of_a_shard=50, num_streams=8) -> BucketOrder:
    """With 50 images in a shard, an epoch has four blocks."""
    shards = COUNT // images_of_a_shard
    base = StreamOrder([images_of_a_shard] * shards, num_streams, seed=3, shuffle_shards=4 * num_streams)
    return BucketOrder(base, lambda images: drawn[images], SHAPES, BATCH // processes, processes)


def keys_of(order, processes: int, rank: int, epoch: int, step: int = 0) -> list:
    """The keys of each further step of a process."""
    sampler = StepSampler(order, BATCH // processes, rank, processes)
    sampler.start_at(epoch, step)
    return list(sampler)


@pytest.mark.parametrize("make", [of_folder, of_streams])
@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_each_batch_has_one_shape_and_almost_every_image_comes_once(drawn, make, processes):
    ranks = [keys_of(make(drawn, processes), processes, rank, 1) for rank in range(processes)]
    assert len({len(batches) for batches in ranks}) == 1
    assert all(len({shape for _, _, shape in batch}) == 1 for batches in ranks for batch in batches)
    keys = [key for batches in ranks for batch in batches for key in batch]
    images = {index for _, index, _ in keys}
    assert len(images) == len(keys) == len(ranks[0]) * BATCH == len(make(drawn, processes))
    assert COUNT - len(images) < 4 * BATCH  # of each block, fewer than a batch
    own = [shape == SHAPES[nearest(drawn[[index]], SHAPES)[0]] for _, index, shape in keys]
    assert np.mean(own) > (0.97 if make is of_folder else 0.9)  # but for the last batches of a block
    changes = [one[0][2] != other[0][2] for one, other in pairwise(ranks[0])]
    assert np.mean(changes) > 0.5  # shapes alternate


@pytest.mark.parametrize("make", [of_folder, of_streams])
@pytest.mark.parametrize("processes", [1, 4])
def test_resuming_with_as_many_processes_is_exact(drawn, make, processes):
    for rank in range(processes):
        whole = keys_of(make(drawn, processes), processes, rank, 1)
        for step in (7, len(whole) // 2, len(whole) - 1, len(whole)):
            assert keys_of(make(drawn, processes), processes, rank, 1, step) == whole[step:]
        assert keys_of(make(drawn, processes), processes, rank, 2) != whole


@pytest.mark.parametrize("processes", [2, 4, 6, 8])  # 6 do not divide the streams
def test_a_process_reads_its_own_positions_of_open_windows_only(drawn, processes):
    """Of the shards that are announced."""
    base = of_streams(drawn).base
    place = {image: position for position, image in enumerate(base.samples(2, 0, len(base)))}
    block = base.window_length * base.num_streams
    rank = processes - 1
    read = []
    order = BucketOrder(base, lambda images: read.extend(images) or drawn[images], SHAPES, 3, processes)
    announced = []
    for step in range(len(order) // (3 * processes)):
        position = step * 3 * processes + rank
        announced.append(order.base_position(position))
        for index in order.samples(2, position, 3, processes):
            assert place[index] % processes == rank
            assert place[index] // block == announced[-1] // block
    assert announced == sorted(announced)
    assert len(read) == len(set(read))  # each size once


def test_many_samples_are_those_that_are_taken_one_by_one():
    order = StreamOrder([37, 50, 41, 29, 60, 45, 33, 52], 6, seed=3, shuffle_shards=6)
    for first, count, step in ((0, 342, 1), (5, 57, 6), (3, 80, 4), (100, 1, 7), (17, 0, 2)):
        assert order.take(1, first, count, step).tolist() == order.samples(1, first, count, step)


@pytest.mark.parametrize("size", [512, 1024, 2048])
@pytest.mark.parametrize("count", [2, 3, 9, 20])
def test_no_image_is_smaller_than_the_shape_of_its_batch(size, count):
    """As prepared images are: the short side is that of training."""
    ratios = np.exp(np.random.default_rng(0).normal(0, 0.5, 500))
    ratios[:50] = 1
    sizes = np.stack([size * np.maximum(ratios, 1), size * np.maximum(1 / ratios, 1)], 1).round()
    of_images = aspects(sizes)
    order = BucketOrder(
        ShuffledOrder(500, 0), lambda some: of_images[some], bucket_shapes(size, 8, count), 8, 1
    )
    for batch in StepSampler(order, 8):
        for _, index, (height, width) in batch:
            assert width <= sizes[index][0]
            assert height <= sizes[index][1]


def test_images_of_rare_shapes_become_squares():
    """Ten narrow images of 100 make no batch of their own shape."""
    wide = np.zeros(100, np.float32)
    wide[:10] = -0.6
    order = BucketOrder(ShuffledOrder(100, 0), lambda images: wide[images], SHAPES, 25, 1)
    batches = list(StepSampler(order, 25))
    assert len(batches) == 4
    assert {index for batch in batches for _, index, _ in batch} == set(range(100))
    assert [batch[0][2] for batch in batches] == [(256, 256)] * 4


# ---- crops -------------------------------------------------------------------------------------------------


@pytest.fixture
def wide_and_high(tmp_path) -> FolderImages:
    """A ramp of 120 x 60 px, the same upright by its EXIF tag, and a square of 64 px."""
    columns = np.broadcast_to(np.linspace(0, 255, 120, dtype=np.uint8)[None, :, None], (60, 120, 3))
    image = Image.fromarray(np.ascontiguousarray(columns))
    image.save(tmp_path / "wide.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    image.save(tmp_path / "turned.jpg", exif=exif)
    image.resize((64, 64)).save(tmp_path / "square.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    return FolderImages(tmp_path, ["wide.png", "turned.jpg", "square.png", "broken.png"])


def crops_of(images: FolderImages, size: int, **data) -> CropDataset:
    sizes = images.sizes(np.arange(len(images)))
    assert sizes.tolist() == [[120, 60], [60, 120], [64, 64], [0, 0]]
    return CropDataset(images, DataConfig(**data), image_size=size, shapes=bucket_shapes(size, 8, 3))


def test_crops_cover_their_shape(wide_and_high):
    crops = crops_of(wide_and_high, 48, crop="center", horizontal_flip=False)
    wide, turned, square, broken = (crops[0, index] for index in range(4))
    assert [tuple(sample.image.shape) for sample in (wide, turned, square)] == [
        *((3, 32, 64), (3, 64, 32), (3, 48, 48))
    ]
    assert broken.rejection.reason == "not_an_image"
    assert wide.image[0].float().mean(0).diff().min() > 2  # the ramp, scaled: all of its 120 columns
    again = crops_of(wide_and_high, 48)
    for index in range(3):
        assert again[5, index].image.equal(crops_of(wide_and_high, 48)[5, index].image)
    data = DataConfig(horizontal_flip=False)
    one_shape = CropDataset(wide_and_high, data, image_size=48, shapes=[(48, 48)])
    assert len({int(one_shape[epoch, 0].image[0, 0, 0]) for epoch in range(9)}) > 4  # positions on the ramp


def test_loaded_batches_have_one_shape(wide_and_high):
    crops = crops_of(wide_and_high, 48)
    images = FolderImages(wide_and_high.root, ["wide.png", "turned.jpg", "square.png"] * 4)
    shapes = bucket_shapes(48, 8, 3)
    crops = CropDataset(images, image_size=48, shapes=shapes)
    order = BucketOrder(images.order(0), lambda some: aspects(images.sizes(some)), shapes, 2, 1)
    with TrainLoader(crops, local_batch=2, order=order) as loader:
        shapes = [tuple(batch.images.shape) for batch in loader.batches(0)]
        later = [batch.images for batch in loader.batches(0, first_step=3)]
    assert sorted(set(shapes)) == [(2, 3, 32, 64), (2, 3, 48, 48), (2, 3, 64, 32)]
    assert [tuple(batch.shape) for batch in later] == shapes[3:]
