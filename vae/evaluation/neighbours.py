"""Measures of the nearest neighbours among latents: their labels (LNC), and images between two (iFID).

Shapes: N latents of C channels, H x W positions, normalised per channel. Near is a large cosine of whole
latents.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

LABEL_NEIGHBOURS = 5  # arXiv 2606.03578
PATH_NEIGHBOURS = 10  # tongdaxu/Making-rFID-Predictive-of-Diffusion-gFID
MIN_FID_IMAGES = 10_000  # of fewer, the bias of FID is larger than differences; KID has none
KID_SUBSET = 1000  # images (Binkowski et al. 2018)
ROWS = 64  # latents at once


def nearest(latents: Tensor, count: int) -> Tensor:
    """The numbers of the nearest other latents of each one, at most `count`: (N, count), nearest first."""
    vectors = F.normalize(latents.flatten(1), dim=1)
    found = []
    for first in range(0, len(vectors), ROWS):
        cosines = vectors[first : first + ROWS] @ vectors.T
        cosines.diagonal(first).fill_(-torch.inf)  # itself
        found.append(cosines.topk(min(count, len(vectors) - 1)).indices)
    return torch.cat(found)


def same_label_share(latents: Tensor, labels: Sequence[str]) -> float:
    """LNC: share of the nearest neighbours with the same label (arXiv 2606.03578)."""
    numbers = torch.from_numpy(np.unique(labels, return_inverse=True)[1]).to(latents.device)
    return (numbers[nearest(latents, LABEL_NEIGHBOURS)] == numbers[:, None]).double().mean().item()


def interpolated(latents: Tensor, seed: int) -> Tensor:
    """Each latent moved halfway to one of its neighbours, which is drawn with weights softmax(-MSE)."""
    generator = torch.Generator().manual_seed(seed)
    near, halfway = nearest(latents, PATH_NEIGHBOURS), torch.empty_like(latents)
    for first in range(0, len(latents), ROWS):
        own, numbers = latents[first : first + ROWS], near[first : first + ROWS]
        errors = (own[:, None] - latents[numbers]).square().flatten(2).mean(2)
        drawn = torch.multinomial(torch.softmax(-errors, 1).cpu(), 1, generator=generator).to(numbers.device)
        halfway[first : first + ROWS] = slerp_middle(own, latents[numbers.gather(1, drawn)[:, 0]])
    return halfway


def slerp_middle(a: Tensor, b: Tensor) -> Tensor:
    """The middle of the spherical path (Shoemake 1985), where both weights are sin(θ/2) / sin(θ)."""
    cosine = F.cosine_similarity(a.flatten(1), b.flatten(1)).clamp(min=-0.999)  # opposite ones have no path
    return (a + b) / (2 + 2 * cosine).sqrt()[:, None, None, None]


def feature_distance(real: Tensor, other: Tensor) -> tuple[str, float]:
    """Name and value of torch-fidelity's distance of features (N, D): iFID, or iKID of few images."""
    from torch_fidelity.metric_fid import KEY_METRIC_FID, fid_features_to_statistics, fid_statistics_to_metric
    from torch_fidelity.metric_kid import KEY_METRIC_KID_MEAN, kid_features_to_metric

    if len(real) >= MIN_FID_IMAGES:
        statistics = [fid_features_to_statistics(features.double()) for features in (real, other)]
        return "iFID", fid_statistics_to_metric(*statistics, verbose=False)[KEY_METRIC_FID]
    size = min(len(real), KID_SUBSET)
    draws = {} if size < len(real) else {"kid_subsets": 1}  # all subsets would be the same
    found = kid_features_to_metric(
        real.double(), other.double(), kid_subset_size=size, verbose=False, **draws
    )
    return "iKID", found[KEY_METRIC_KID_MEAN]
