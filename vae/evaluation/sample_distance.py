"""Samples of a flow-matching network, and how far decoded ones are from real images.

A low velocity loss alone does not mean good samples: latents whose channels repeat each other have one too.
"""

import random
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from vae.evaluation.velocity import BATCH, Velocity

SAMPLE_STEPS = 16  # of Heun's method
PATCH, PATCHES, LEVELS, DIRECTIONS = 7, 32, 3, 256
MIN_STD = 1 / 255  # half an 8-bit level: blank images have none


@torch.no_grad()
def samples_of(velocity: Velocity, noise: Tensor) -> Tensor:
    """Normalised latents (N, C, H, W) to which Heun's method takes noise of their shape."""

    def at(x: Tensor, step: int) -> Tensor:
        t = torch.full((len(x),), step / SAMPLE_STEPS).to(x)
        return torch.cat([velocity(*part) for part in zip(x.split(BATCH), t.split(BATCH), strict=True)])

    x = noise
    for step in range(SAMPLE_STEPS, 0, -1):
        first = at(x, step)
        second = at(x - first / SAMPLE_STEPS, step - 1)
        x = x - (first + second) / (2 * SAMPLE_STEPS)
    return x


def patch_distance(images: Tensor, reference: Tensor) -> float:
    """Sliced Wasserstein distance of patches of as many images (N, 3, H, W), the mean of three sizes.

    As Karras et al. 2018 (arXiv 1710.10196), but of box-filtered images instead of Laplacian levels, and both
    sides in standard deviations of the reference, so that a lost contrast counts. 0 for equal images.
    """
    generator, distances = torch.Generator().manual_seed(0), []
    for ours, theirs in zip(_patches(images), _patches(reference), strict=True):
        directions = F.normalize(torch.randn(ours.shape[1], DIRECTIONS, generator=generator), dim=0)
        a, b = (
            (((part - theirs.mean()) / theirs.std().clamp(min=MIN_STD)) @ directions).sort(dim=0).values
            for part in (ours, theirs)
        )
        distances.append((a - b).abs().mean().item())
    return sum(distances) / len(distances)


def _patches(images: Tensor) -> Iterator[Tensor]:
    """PATCHES random patches of each image, (N PATCHES, 3 PATCH²), at full, half and quarter size."""
    draw = random.Random(0)
    for level in range(LEVELS):
        small = F.avg_pool2d(images, 2**level)
        sides = [side - PATCH + 1 for side in small.shape[2:]]
        if min(sides) < 1:
            return
        places = [tuple(draw.randrange(side) for side in sides) for _ in range(PATCHES)]
        found = [small[..., top : top + PATCH, left : left + PATCH] for top, left in places]
        yield torch.stack(found, 1).flatten(0, 1).flatten(1)
