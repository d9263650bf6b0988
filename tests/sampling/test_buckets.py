"""Aspect buckets: shapes, batches of one shape for any number of processes, crops that cover it."""

import math
from itertools import chain, pairwise

import numpy as np
import pytest
from PIL import Image

from vae.config.options import DataConfig
from vae.data.dataset import CropDataset, FolderImages
from vae.data.image_sizes import image_sizes
from vae.data.loading import TrainLoader
from vae.images.decoding import decode_image
from vae.sampling.buckets import BucketOrder, aspects, assign, bucket_shapes
from vae.sampling.mixture import MixtureOrder
from vae.sampling.order import ShuffledOrder, StepSampler
from vae.sampling.stream_buckets import StreamBuckets
from vae.sampling.streams import StreamOrder

COUNT, BATCH = 5000, 16


@pytest.mark.parametrize(("size", "factor", "count"), [(512, 8, 9), (1024, 16, 20), (256, 8, 1), (32, 2, 3)])
def test_shapes_have_about_the_pixels_of_the_square(size, factor, count):
    shapes = bucket_shapes(size, factor, count)
    assert 1 <= len(shapes) <= count
    for height, width in shapes:
        assert height % factor == width % factor == 0
        assert 1 - 2 * factor / size < height * width / size**2 <= 1  # never more: the plan is for the square
        assert 0.5 <= height / width <= 2
    assert ((size, size) in shapes) == (count % 2 == 1)
    assert shapes == [(width, height) for height, width in reversed(shapes)]
    ratios = [width / height for height, width in shapes]
    assert ratios == sorted(ratios)


def test_each_image_has_the_nearest_shape_and_rare_shapes_are_left_out():
    sizes = np.array([[300, 100]] * 40 + [[100, 100]] * 50 + [[90, 100]] * 9 + [[100, 160]] * 3 + [[0, 0]])
    shapes = bucket_shapes(96, 8, 5)
    buckets = assign(aspects(sizes), shapes, 4)
    assert set(buckets.shapes) < set(shapes)
    assert np.bincount(buckets.codes).min() >= 4
    assert buckets.shapes[buckets.codes[0]] == shapes[-1]
    assert buckets.shapes[buckets.codes[-1]] == (96, 96)  # unknown
    assert np.array_equal(buckets.nearest(sizes), buckets.codes)
    used = [math.log(width / height) for height, width in buckets.shapes]
    for index in (0, 40, 90, 99):
        log_aspect = math.log(sizes[index][0] / sizes[index][1])
        nearest = min(range(len(used)), key=lambda number: abs(used[number] - log_aspect))
        assert buckets.codes[index] == nearest
    assert len(assign(aspects(sizes), shapes, 1000).shapes) == 1


@pytest.fixture(scope="module")
def drawn():
    """Width and height of COUNT images."""
    wide = np.exp(np.random.default_rng(0).normal(0.1, 0.35, COUNT))
    return np.stack([1000 * wide, np.full(COUNT, 1000)], axis=1).astype(np.int64)


@pytest.fixture(scope="module")
def buckets(drawn):
    return assign(aspects(drawn), bucket_shapes(256, 8, 5), BATCH)


def of_folder(drawn, buckets, batch=BATCH) -> BucketOrder:
    return BucketOrder(ShuffledOrder(COUNT, 3), buckets, batch)


def of_streams(drawn, buckets, batch=BATCH, images_of_a_shard=50, num_streams=8) -> StreamBuckets:
    """With 50 images in a shard, an epoch has four blocks."""
    shards = COUNT // images_of_a_shard
    base = StreamOrder([images_of_a_shard] * shards, num_streams, seed=3, shuffle_shards=4 * num_streams)
    return StreamBuckets(base, lambda images: drawn[images], buckets, batch)


def of_mixture(drawn, buckets, batch=BATCH) -> StreamBuckets:
    """Of 3000 and 2000 images, of which half of each batch is expected."""
    orders = [StreamOrder([50] * shards, 8, seed=3, shuffle_shards=32) for shards in (60, 40)]
    return StreamBuckets(MixtureOrder(orders, (0.5, 0.5), 3), lambda images: drawn[images], buckets, batch)


def keys_of(order, processes: int, rank: int, epoch: int, step: int = 0) -> list:
    """The keys of each further step of a process."""
    sampler = StepSampler(order, BATCH // processes, rank, processes)
    sampler.start_at(epoch, step)
    return list(sampler)


@pytest.mark.parametrize("make", [of_folder, of_streams, of_mixture])
def test_any_number_of_processes_sees_the_same_batches_of_one_shape(drawn, buckets, make):
    """Also from the middle of an epoch on; each process computes them itself."""
    whole = keys_of(make(drawn, buckets), 1, 0, 1)
    assert len(whole) == sum(np.bincount(buckets.codes) // BATCH)
    assert all(len({shape for _, _, shape in batch}) == 1 for batch in whole)
    for processes in (2, 4, 8):
        ranks = [keys_of(make(drawn, buckets), processes, rank, 1) for rank in range(processes)]
        assert [sorted(chain(*one)) for one in zip(*ranks, strict=True)] == list(map(sorted, whole))
    for step in (7, len(whole) // 2, len(whole) - 1):
        assert keys_of(make(drawn, buckets), 1, 0, 1, step) == whole[step:]
    assert keys_of(make(drawn, buckets), 1, 0, 2) != whole
    changes = [one[0][2] != other[0][2] for one, other in pairwise(whole)]
    assert np.mean(changes) > 0.5  # shapes alternate


@pytest.mark.parametrize(("make", "least"), [(of_folder, 1), (of_streams, 0.998), (of_mixture, 0.998)])
def test_batches_have_the_nearest_shape_of_their_images(drawn, buckets, make, least):
    """The last windows of streams are short, and some lack a shape."""
    keys = chain(*keys_of(make(drawn, buckets), 1, 0, 0))
    assert np.mean([shape == buckets.shapes[buckets.codes[index]] for _, index, shape in keys]) >= least


def test_folder_repeats_no_image_and_leaves_out_less_than_a_batch_of_each_shape(drawn, buckets):
    order = of_folder(drawn, buckets)
    one, other = order.whole(0), order.whole(1)
    assert len(np.unique(one)) == len(one) > COUNT - 5 * BATCH
    left_out = [set(range(COUNT)) - set(images) for images in (one, other)]
    assert left_out[0] != left_out[1]


def test_order_of_a_folder_is_the_same_in_every_version(drawn, buckets):
    assert of_folder(drawn, buckets).samples(1, 0, 6) == [2355, 2465, 4340, 3790, 1300, 2445]


@pytest.mark.parametrize(("images_of_a_shard", "least"), [(50, 0.9), (1250, 0.95)])
def test_streams_repeat_few_images(drawn, buckets, images_of_a_shard, least):
    """The more images a window has, the fewer: 800 in a class here, or all 2500 of two streams."""
    order = of_streams(drawn, buckets, images_of_a_shard=images_of_a_shard)
    found = order.samples(2, 0, len(order))
    assert len(set(found)) > least * COUNT
    assert set(found) != set(order.samples(3, 0, len(order)))


def test_every_shape_of_a_mixture_has_images_by_the_weights(drawn, buckets):
    keys = chain(*chain(*(keys_of(of_mixture(drawn, buckets), 1, 0, epoch) for epoch in range(4))))
    of_first: dict = {}
    for _, index, shape in keys:
        of_first.setdefault(shape, []).append(index < 3000)
    assert set(of_first) == set(buckets.shapes)
    assert [np.mean(found) for found in of_first.values()] == pytest.approx([0.5] * len(of_first), abs=0.06)


def test_a_process_reads_its_own_streams_and_open_windows_only(drawn, buckets):
    order = of_streams(drawn, buckets)
    base = order.base
    in_order = base.samples(2, 0, len(base))
    place = {image: position for position, image in enumerate(in_order)}
    opened: list[int] = []

    def sizes(images):
        opened.extend(images.tolist())
        return drawn[images]

    order._sizes = sizes
    block = base.window_length * base.num_streams
    positions = list(range(3, len(order), BATCH))  # of rank 3 of 4
    for position in positions:
        for index in order.samples(2, position, 4, 4):
            assert place[index] % 4 == 3
            assert place[index] // block == order.base_position(position) // block
    announced = [order.base_position(position) for position in positions]
    assert announced == sorted(announced)
    assert sorted(opened) == sorted(in_order[3::4])  # each size once
    assert sum(len(part) for _, parts in order._images.values() for part in parts) <= 2 * block / 4


def test_sample_of_a_large_dataset_is_enough(drawn, buckets):
    """The shares of the shapes come from every fifth image: batches are of all images all the same."""
    some = assign(aspects(drawn[::5]), bucket_shapes(256, 8, 5), BATCH / 5)
    assert some.shapes == buckets.shapes
    order, exact = of_streams(drawn, some), of_streams(drawn, buckets)
    assert abs(len(order) - len(exact)) <= 5 * BATCH
    assert len(set(order.samples(0, 0, len(order)))) > 0.85 * COUNT


def test_shape_that_a_window_lacks_is_cut_from_the_nearest(drawn, buckets):
    """Each shard has images of one shape only."""
    sorted_sizes = drawn[np.argsort(buckets.codes, kind="stable")]
    of_all = assign(aspects(sorted_sizes), buckets.shapes, 1)
    order = of_streams(sorted_sizes, of_all, images_of_a_shard=25, num_streams=2)
    keys = keys_of(order, 1, 0, 0)
    assert len(keys) == sum(np.bincount(of_all.codes) // BATCH)
    others = [shape != of_all.shapes[of_all.codes[index]] for batch in keys for _, index, shape in batch]
    assert 0 < np.mean(others) < 0.9


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
    sizes = image_sizes(images, np.arange(len(images)))
    assert sizes.tolist() == [[120, 60], [60, 120], [64, 64], [0, 0]]
    buckets = assign(aspects(sizes), bucket_shapes(size, 8, 3), 1)
    return CropDataset(images, DataConfig(**data), image_size=size, buckets=buckets)


def test_sizes_are_those_of_decoded_images(wide_and_high):
    for index, (width, height) in enumerate(image_sizes(wide_and_high, np.arange(3)).tolist()):
        assert decode_image(wide_and_high.root / wide_and_high.names[index]).shape == (height, width, 3)
    assert image_sizes(wide_and_high, np.arange(1, 2), {"turned.jpg": (5, 6)}).tolist() == [[5, 6]]


def test_crops_cover_their_shape(wide_and_high):
    crops = crops_of(wide_and_high, 48, crop="center", horizontal_flip=False)
    wide, turned, square, broken = (crops[0, index] for index in range(4))
    assert [tuple(sample.image.shape) for sample in (wide, turned, square)] == [
        *((3, 32, 64), (3, 64, 32), (3, 48, 48)),
    ]
    assert broken.rejection.reason == "not_an_image"
    assert wide.image[0].float().mean(0).diff().min() > 2  # the ramp, scaled: all of its 120 columns
    again = crops_of(wide_and_high, 48)
    for index in range(3):
        assert again[5, index].image.equal(crops_of(wide_and_high, 48)[5, index].image)
    square_only = assign(np.zeros(4, np.float32), [(48, 48)], 1)
    one_shape = CropDataset(
        wide_and_high, DataConfig(horizontal_flip=False), image_size=48, buckets=square_only
    )
    assert len({int(one_shape[epoch, 0].image[0, 0, 0]) for epoch in range(9)}) > 4  # positions on the ramp


def test_small_images_need_upscale(wide_and_high):
    rejection = crops_of(wide_and_high, 96)[0, 0].rejection
    assert rejection.reason == "too_small"
    for token in ("120x60", "--buckets", "--upscale"):
        assert token in rejection.detail
    assert crops_of(wide_and_high, 96, upscale=True)[0, 0].image.shape == (3, 72, 120)


def test_loaded_batches_have_one_shape(wide_and_high):
    crops = crops_of(wide_and_high, 48)
    images = FolderImages(wide_and_high.root, ["wide.png", "turned.jpg", "square.png"] * 4)
    buckets = assign(aspects(image_sizes(images, np.arange(12))), bucket_shapes(48, 8, 3), 2)
    crops = CropDataset(images, image_size=48, buckets=buckets)
    order = BucketOrder(images.order(0), buckets, 2)
    with TrainLoader(crops, local_batch=2, order=order) as loader:
        shapes = [tuple(batch.images.shape) for batch in loader.batches(0)]
        later = [batch.images for batch in loader.batches(0, first_step=3)]
    assert sorted(set(shapes)) == [(2, 3, 32, 64), (2, 3, 48, 48), (2, 3, 64, 32)]
    assert [tuple(batch.shape) for batch in later] == shapes[3:]
