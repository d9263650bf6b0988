"""The baselines equal Pillow and NumPy."""

import numpy as np
import pytest
import torch
from PIL import Image

from vae.evaluation.baselines import bicubic_baseline, mean_colour


def images(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_mean_colour_equals_numpy():
    batch = images(2, 3, 6, 10)
    found = mean_colour(batch)
    assert found.shape == batch.shape
    assert torch.allclose(found[1, 2], torch.tensor(batch[1, 2].numpy().mean()), atol=1e-6)
    assert found.std((2, 3)).max() == 0


@pytest.mark.parametrize(("size", "factor"), [((64, 48), 8), ((64, 32), 16), ((8, 8), 8)])
def test_bicubic_equals_pillow(size, factor):
    batch = images(2, 3, *size)
    found = bicubic_baseline(batch, factor)
    height, width = size
    for channel, expected in zip(found.flatten(0, 1), batch.flatten(0, 1).numpy(), strict=True):
        blocks = expected.reshape(height // factor, factor, width // factor, factor).mean((1, 3))
        large = Image.fromarray(blocks).resize((width, height), Image.Resampling.BICUBIC)
        assert np.abs(channel.numpy() - np.clip(np.asarray(large), -1, 1)).max() < 1e-5


def test_bicubic_stays_in_range_and_keeps_constant_images():
    edges = torch.ones(1, 3, 32, 32)
    edges[..., :16] = -1
    found = bicubic_baseline(edges)
    assert found.min() == -1
    assert found.max() == 1
    flat = torch.full((1, 3, 32, 32), 0.3)
    assert torch.allclose(bicubic_baseline(flat), flat, atol=1e-6)
