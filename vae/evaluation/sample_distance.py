"""Samples of a flow-matching network: how far decoded ones are from real images, and how many these cover.

A low velocity loss alone does not mean good samples: latents whose channels repeat each other have one too.
The distance sees local texture alone, and the coverage thumbnails alone.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vae.evaluation.velocity import BATCH, Velocity

SAMPLE_STEPS = 16  # of Heun's method
LAYERS = ((64, 5), (128, 3), (256, 3))  # filters and kernel size, each with stride 2
PART = 64  # images at once
THUMBNAIL = 8  # px
NEIGHBORS = 5  # Naeem et al. 2020
MIN_STD = 1 / 255  # of a feature, half an 8-bit level: of a few images, some filters see nothing


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


def image_distance(images: Tensor, reference: Tensor) -> float:
    """How far two sets of images (N, 3, H, W) are from each other: 0 if both are of one kind, at most 2.

    The squared maximum mean discrepancy, also a little below 0, with a Gaussian kernel as in CMMD (Jayasumana
    et al. 2024, arXiv 2401.09603), of features of a fixed random network instead of CLIP. The features are in
    standard deviations of the reference, so the result is unbiased only with many images: 20 have about 0.01.
    An image's mean color does not count. Both sets need two images.
    """
    return distance_of_features(image_features(images), image_features(reference))


def distance_of_features(features: Tensor, reference: Tensor) -> float:
    """`image_distance` of images with these `image_features`."""
    std, mean = torch.std_mean(reference, 0)
    ours, theirs = ((values - mean) / std.clamp(min=MIN_STD) for values in (features, reference))

    def similarity(a: Tensor, b: Tensor) -> Tensor:
        return (torch.cdist(a, b).square() / (-2 * a.shape[1])).exp()

    within = sum(
        ((kernel := similarity(part, part)).sum() - kernel.trace()) / (len(part) * (len(part) - 1))
        for part in (ours, theirs)
    )
    return float(within - 2 * similarity(ours, theirs).mean())


@torch.no_grad()
def image_features(images: Tensor) -> Tensor:
    """Mean and standard deviation of each filter's response in each image, (N, 896) on the CPU."""
    generator, weights, channels = torch.Generator().manual_seed(0), [], 3
    for filters, kernel in LAYERS:
        weight = torch.randn(filters, channels, kernel, kernel, generator=generator)
        weights.append(2**0.5 * F.normalize(weight.flatten(1)).view_as(weight).to(images))
        channels = filters
    parts = []
    for part in images.split(PART):
        x, statistics = part - part.mean((2, 3), keepdim=True), []
        for weight in weights:
            x = F.relu(F.conv2d(x, weight, stride=2, padding=weight.shape[2] // 2))
            statistics += [x.mean((2, 3)), x.std((2, 3), correction=0)]
        parts.append(torch.cat(statistics, 1).cpu())
    return torch.cat(parts)


def coverage(images: Tensor, reference: Tensor) -> float:
    """The share of the reference near which there is one of the images; both are `thumbnails`.

    Naeem et al. 2020 (arXiv 2002.09797), with thumbnails instead of Inception's features: near is no farther
    than the fifth neighbor within the reference. About 0.97 for images of one kind, less if they repeat each
    other; NaN if a value is not finite. The reference needs more than NEIGHBORS.
    """
    if not images.isfinite().all():
        return math.nan
    radii = torch.cdist(reference, reference).kthvalue(NEIGHBORS + 1, dim=1).values  # itself is the first
    return (torch.cdist(reference, images).amin(1) <= radii).double().mean().item()


def thumbnails(images: Tensor) -> Tensor:
    """Mean colors of an even grid of areas of each image (N, 3, H, W): (N, 192) on the CPU."""
    return F.adaptive_avg_pool2d(images, THUMBNAIL).flatten(1).cpu()
