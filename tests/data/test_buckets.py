"""Aspect buckets: shapes, batches of one shape for any number of processes, crops that cover it."""

import math
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from vae.data.buckets import BucketOrder, assign, bucket_shapes
from vae.data.dataset import CropDataset, FolderImages
from vae.data.decoding import decode_image
from vae.data.image_sizes import aspects, image_sizes, load_aspects, save_aspects
from vae.data.loading import TrainLoader
from vae.data.sampling import ShuffledOrder, StepSampler
from vae.data.streams import StreamOrder

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
    assert buckets.shape_of(0) == shapes[-1]
    assert buckets.shape_of(len(sizes) - 1) == (96, 96)  # unknown
    used = [math.log(width / height) for height, width in buckets.shapes]
    for index in (0, 40, 90, 99):
        log_aspect = math.log(sizes[index][0] / sizes[index][1])
        nearest = min(range(len(used)), key=lambda number: abs(used[number] - log_aspect))
        assert buckets.codes[index] == nearest
    assert len(assign(aspects(sizes), shapes, 1000).shapes) == 1


@pytest.fixture(scope="module")
def codes():
    drawn = np.random.default_rng(0).normal(0.1, 0.35, COUNT).astype(np.float32)
    return assign(drawn, bucket_shapes(256, 8, 5), BATCH).codes


def streams() -> StreamOrder:
    return StreamOrder([50] * 100, 8, seed=3)


def step_of_all(order, step: int, processes: int, epoch: int = 1) -> list[int]:
    """The images of a global step, as these processes read them."""
    found = []
    for rank in range(processes):
        sampler = StepSampler(order, BATCH // processes, rank, processes)
        sampler.start_at(epoch, step)
        found += [index for _, index in next(iter(sampler))]
    return sorted(found)


@pytest.mark.parametrize("base", [lambda: ShuffledOrder(COUNT, 3), streams])
def test_any_number_of_processes_sees_the_same_batches_of_one_shape(codes, base):
    order = BucketOrder(base(), codes, BATCH)
    steps = len(order) // BATCH
    assert steps == sum(np.bincount(codes) // BATCH)
    for step in (0, 7, steps - 1):
        expected = step_of_all(order, step, 1)
        assert len(set(codes[expected])) == 1
        for processes in (2, 4, 8):
            assert step_of_all(BucketOrder(base(), codes, BATCH), step, processes) == expected
    whole = order.whole(1).reshape(-1, BATCH)
    assert all(len(set(codes[batch])) == 1 for batch in whole)
    assert not np.array_equal(order.whole(1), order.whole(2))
    changes = np.mean(codes[whole[1:, 0]] != codes[whole[:-1, 0]])
    assert changes > 0.5  # shapes alternate


def test_folder_repeats_no_image_and_leaves_out_less_than_a_batch_of_each_shape(codes):
    order = BucketOrder(ShuffledOrder(COUNT, 3), codes, BATCH)
    one, other = order.whole(0), order.whole(1)
    assert len(np.unique(one)) == len(one) > COUNT - 5 * BATCH
    left_out = [set(range(COUNT)) - set(images) for images in (one, other)]
    assert left_out[0] != left_out[1]


def test_a_process_reads_its_own_streams_only(codes):
    base = streams()
    order = BucketOrder(base, codes, BATCH)
    place = {int(image): position for position, image in enumerate(base.whole(2))}
    sampler = StepSampler(order, BATCH // 4, 3, 4)
    sampler.start_at(2, 0)
    read = [index for batch in sampler for _, index in batch]
    own = [place[index] % 4 == 3 for index in read if index in place]
    assert np.mean(own) == 1.0
    assert len(set(read)) > 0.9 * len(read)  # of each shape as many as on average: some are repeated
    positions = [order.base_position(2, position) for position in range(0, len(order), BATCH)]
    assert positions == sorted(positions)


def test_threads_may_ask_at_the_same_time(codes, monkeypatch):
    """The other order keeps a few windows only, which threads would remove from each other."""
    entered, whole = [], ShuffledOrder.whole

    def slow(self, epoch):
        entered.append(epoch)
        time.sleep(0.02)
        assert entered[-1] == epoch, "another thread has entered"
        return whole(self, epoch)

    monkeypatch.setattr(ShuffledOrder, "whole", slow)
    order = BucketOrder(ShuffledOrder(COUNT, 3), codes, BATCH)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(order.whole, (1, 2, 1, 2)))
    assert np.array_equal(found[0], found[2])
    assert sorted(entered) == [1, 2]


def test_whole_is_the_order_of_the_samples():
    for order in (ShuffledOrder(100, 1), StreamOrder([7, 60, 33], 4, 1)):
        assert order.whole(5).tolist() == order.samples(5, 0, len(order))


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


def crops_of(images: FolderImages, size: int, **options) -> CropDataset:
    sizes = image_sizes(images, range(len(images)))
    assert sizes.tolist() == [[120, 60], [60, 120], [64, 64], [0, 0]]
    buckets = assign(aspects(sizes), bucket_shapes(size, 8, 3), 1)
    return CropDataset(images, image_size=size, buckets=buckets, **options)


def test_sizes_are_those_of_decoded_images(wide_and_high):
    for index, (width, height) in enumerate(image_sizes(wide_and_high, range(3)).tolist()):
        assert decode_image(wide_and_high.root / wide_and_high.names[index]).shape == (height, width, 3)
    assert image_sizes(wide_and_high, range(1, 2), {"turned.jpg": (5, 6)}).tolist() == [[5, 6]]


def test_stored_aspects_are_those_of_the_same_images(tmp_path):
    path, found = tmp_path / "aspects.npz", np.array([0.5, np.nan], np.float32)
    assert load_aspects(path, "one") is None
    save_aspects(path, "one", found)
    assert np.array_equal(load_aspects(path, "one"), found, equal_nan=True)
    assert load_aspects(path, "other") is None
    path.write_bytes(path.read_bytes()[:50])
    assert load_aspects(path, "one") is None


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
    one_shape = CropDataset(wide_and_high, image_size=48, buckets=square_only, horizontal_flip=False)
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
    buckets = assign(aspects(image_sizes(images, range(12))), bucket_shapes(48, 8, 3), 2)
    crops = CropDataset(images, image_size=48, buckets=buckets)
    order = BucketOrder(images.order(0), buckets.codes, 2)
    with TrainLoader(crops, local_batch=2, order=order) as loader:
        shapes = [tuple(batch.images.shape) for batch in loader.batches(0)]
        later = [batch.images for batch in loader.batches(0, first_step=3)]
    assert sorted(set(shapes)) == [(2, 3, 32, 64), (2, 3, 48, 48), (2, 3, 64, 32)]
    assert [tuple(batch.shape) for batch in later] == shapes[3:]
