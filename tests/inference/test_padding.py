"""Padding to a multiple repeats the border at the right and bottom, and is cropped off again."""

import pytest
import torch

from vae.inference.codec import crop_back, pad_to_multiple, padded_side


@pytest.mark.parametrize(("side", "expected"), [(8, 8), (9, 16), (16, 16), (3071, 3072)])
def test_padded_side_is_the_next_multiple(side, expected):
    assert padded_side(side, 8) == expected


def test_padding_repeats_the_last_pixels_and_is_cropped_off_again():
    images = torch.arange(2 * 3 * 9 * 11).reshape(2, 3, 9, 11).to(torch.uint8)
    padded = pad_to_multiple(images, 4)
    assert padded.shape == (2, 3, 12, 12)
    assert torch.equal(padded[:, :, 11, :11], images[:, :, 8])
    assert torch.equal(padded[:, :, :9, 11], images[:, :, :, 10])
    assert torch.equal(crop_back(padded, (9, 11)), images)


@pytest.mark.parametrize(("height", "width", "multiple"), [(10, 13, 16), (8, 9, 64), (16, 17, 8)])
def test_padding_equals_replicate_padding_of_torch(height, width, multiple):
    images = torch.rand(1, 3, height, width)
    sides = (0, padded_side(width, multiple) - width, 0, padded_side(height, multiple) - height)
    expected = torch.nn.functional.pad(images, sides, mode="replicate")
    assert torch.equal(pad_to_multiple(images, multiple), expected)


def test_image_with_suitable_sides_is_not_copied():
    images = torch.rand(1, 3, 16, 24)
    assert pad_to_multiple(images, 8) is images


def test_side_below_eight_pixels_is_refused():
    with pytest.raises(ValueError, match="7 px"):
        pad_to_multiple(torch.zeros(1, 3, 20, 7), 8)
