"""Padding to a multiple: mirrored, to the right and below, and cut off again."""

import pytest
import torch

from vae.inference.padding import crop_back, pad_to_multiple, padded_side


@pytest.mark.parametrize(("side", "expected"), [(8, 8), (9, 16), (16, 16), (3071, 3072)])
def test_the_next_multiple(side, expected):
    assert padded_side(side, 8) == expected


def test_padding_mirrors_at_the_last_pixel_and_is_cut_off_again():
    images = torch.arange(2 * 3 * 9 * 11).reshape(2, 3, 9, 11).to(torch.uint8)
    padded = pad_to_multiple(images, 4)
    assert padded.shape == (2, 3, 12, 12)
    assert torch.equal(padded[:, :, 9, :11], images[:, :, 7])
    assert torch.equal(padded[:, :, 11, :11], images[:, :, 5])
    assert torch.equal(padded[:, :, :9, 11], images[:, :, :, 9])
    assert torch.equal(crop_back(padded, (9, 11)), images)


def test_padding_agrees_with_torchs_own_reflection():
    images = torch.rand(1, 3, 10, 13)
    expected = torch.nn.functional.pad(images, (0, 3, 0, 6), mode="reflect")
    assert torch.equal(pad_to_multiple(images, 16), expected)


def test_a_side_below_half_the_multiple_is_mirrored_forth_and_back():
    row = pad_to_multiple(torch.arange(8.0).expand(1, 3, 8, 8), 32)[0, 0, 0]
    assert row.tolist() == [*range(8), *range(6, -1, -1), *range(1, 8), *range(6, -1, -1), *range(1, 4)]


def test_less_than_eight_pixels_are_refused():
    with pytest.raises(ValueError, match="7 px"):
        pad_to_multiple(torch.zeros(1, 3, 20, 7), 8)
