"""Augmentations: functions of (seed, epoch, index) that reach their limits, and never exceed them."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from vae.config.options import DataConfig
from vae.data.dataset import CropDataset, color_jitter, resized_crop, unit
from vae.data.image_files import FolderImages

SPAN = (2**64 - 1) // 1000


@pytest.fixture
def ramps(tmp_path):
    """An image of 96x64 px: red rises with x, green with y."""
    y, x = np.mgrid[0:64, 0:96]
    Image.fromarray(np.stack([x, y, np.full_like(x, 90)], axis=-1).astype(np.uint8)).save(tmp_path / "a.png")
    return FolderImages(tmp_path, ["a.png"])


def crops(images, seed=3, **data):
    return CropDataset(images, DataConfig(**{"horizontal_flip": False} | data), image_size=32, seed=seed)


ALL = {
    **{"crop": "resized", "crop_scale": (0.2, 0.9), "crop_ratio": (0.5, 2.0)},
    **{"rotate90": True, "color_jitter": (0.3, 0.3, 0.3, 0.1), "horizontal_flip": True},
}


def test_every_augmentation_depends_only_on_seed_epoch_and_index(ramps):
    torch.manual_seed(0)
    first = [crops(ramps, **ALL)[epoch, 0].image for epoch in range(6)]
    torch.manual_seed(1)
    assert all(torch.equal(crops(ramps, **ALL)[epoch, 0].image, first[epoch]) for epoch in (5, 2, 0))
    assert len({image.numpy().tobytes() for image in first}) == 6
    assert not torch.equal(crops(ramps, **ALL, seed=4)[0, 0].image, first[0])


def test_others_do_not_move_the_crop_and_the_flip(ramps):
    plain, turned = crops(ramps, horizontal_flip=True), crops(ramps, horizontal_flip=True, rotate90=True)
    turns = set()
    for epoch in range(20):
        image, other = plain[epoch, 0].image, turned[epoch, 0].image
        turns |= {k for k in range(4) if torch.equal(torch.rot90(image, k, (1, 2)), other)}
    assert turns == {0, 1, 2, 3}


def test_regions_have_the_areas_and_shapes_of_their_ranges(ramps):
    pixels = ramps.decode(0, max_pixels=10**6, background="white")
    sizes = []
    for number in range(0, 1001, 40):
        words = [number * SPAN, (number * 37 % 1001) * SPAN, number, number * 7]
        crop = resized_crop(pixels, words, 32, (0.04, 0.16), (0.5, 2.0), True).astype(float)
        assert crop.shape == (32, 32, 3)
        sizes.append(((crop[:, -1, 0] - crop[:, 0, 0]).mean(), (crop[-1, :, 1] - crop[0, :, 1]).mean()))
    areas = [(w + 1) * (h + 1) / (96 * 64) for w, h in sizes]
    assert 0.03 < min(areas) < 0.07
    assert 0.13 < max(areas) < 0.18
    ratios = [math.log2(w / h) for w, h in sizes]
    assert -1.2 < min(ratios) < -0.7
    assert 0.7 < max(ratios) < 1.2


def test_regions_are_never_enlarged_without_upscale(ramps):
    small = crops(ramps, crop="resized", crop_scale=(0.02, 0.03), crop_ratio=(1.0, 1.0))
    plain = crops(ramps, crop="random")
    for epoch in range(5):  # a region of exactly 32 px keeps its pixels: steps of 1
        assert (small[epoch, 0].image[0].diff(dim=1) == 1).all()
        assert (plain[epoch, 0].image[0].diff(dim=1) == 1).all()
    enlarged = crops(ramps, crop="resized", crop_scale=(0.02, 0.03), crop_ratio=(1.0, 1.0), upscale=True)
    assert int(enlarged[0, 0].image[0].max() - enlarged[0, 0].image[0].min()) < 20


def test_color_jitter_stays_within_its_strengths():
    grey = np.full((4, 4, 3), 100, np.uint8)
    brighter = {color_jitter(grey, [n * SPAN, 0, 0, 0], (0.2, 0.0, 0.0, 0.0))[0, 0, 0] for n in range(1000)}
    assert (min(brighter), max(brighter)) == (80, 119)
    red = np.zeros((4, 4, 3), np.uint8) + np.array([200, 40, 40], np.uint8)
    assert (color_jitter(red, [0, 0, 0, 0], (0.0, 0.0, 0.0, 0.0)) == red).all()
    flat = color_jitter(red, [0, 0, 0, 0], (0.0, 0.0, 1.0, 0.0))  # saturation 0
    assert np.ptp(flat[0, 0].astype(int)) == 0
    assert color_jitter(red, [0, 0, 0, 0], (0.0, 0.0, 0.0, 1 / 3))[0, 0].argmax() == 2  # red turned to blue
    assert 0 <= unit(0) <= unit(2**64 - 1) < 1
