"""Neighbours of latents that are made for it: their labels, the path between two, and their distance."""

import numpy as np
import pytest
import torch

from tests.harness.small_vae import write_vae
from vae.evaluation import neighbours
from vae.evaluation.diffusability import NOISE_SEED, diffusability, normalise
from vae.evaluation.neighbours import (
    PATH_NEIGHBOURS,
    feature_distance,
    interpolated,
    nearest,
    same_label_share,
    slerp_middle,
)
from vae.images.pixels import to_float, to_uint8
from vae.inference.codec import decode_latents, encode_images
from vae.interop.vae_files import load_vae


def two_clusters() -> torch.Tensor:
    """Six latents around each of two orthogonal directions."""
    directions = torch.zeros(2, 2, 4, 4)
    directions[0, 0], directions[1, 1] = 1, 1
    noise = torch.randn(12, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    return directions.repeat_interleave(6, 0) + 0.01 * noise


def test_share_of_neighbours_with_the_same_label():
    """One latent of the first cluster has the label of the second, so that no neighbour has its label."""
    latents, order = two_clusters(), torch.randperm(12, generator=torch.Generator().manual_seed(1))
    labels = np.array(["a"] * 5 + ["b"] + ["b"] * 6)[order].tolist()
    assert same_label_share(latents[order], ["ab"[number >= 6] for number in order]) == 1
    assert same_label_share(latents[order], labels) == pytest.approx((5 * 4 / 5 + 0 + 6) / 12)


def test_labels_without_a_relation_have_the_share_of_chance():
    latents = torch.randn(1000, 4, 4, 4, generator=torch.Generator().manual_seed(2))
    labels = ["a" if number % 10 < 7 else "b" for number in range(1000)]
    assert same_label_share(latents, labels) == pytest.approx(0.7**2 + 0.3**2, abs=0.02)


def test_nearest_are_those_of_the_largest_cosine(monkeypatch):
    """In parts of three, and whatever the lengths."""
    latents = torch.randn(10, 2, 2, 2, generator=torch.Generator().manual_seed(3))
    vectors = latents.flatten(1) / latents.flatten(1).norm(dim=1, keepdim=True)
    cosines = (vectors @ vectors.T).fill_diagonal_(-2)
    monkeypatch.setattr(neighbours, "ROWS", 3)
    scaled = latents * torch.arange(1.0, 11)[:, None, None, None]
    assert torch.equal(nearest(scaled, 4), cosines.argsort(dim=1, descending=True)[:, :4])
    assert nearest(latents[:3], PATH_NEIGHBOURS).shape == (3, 2)


def test_the_middle_of_the_path_is_on_the_sphere():
    a, b = torch.randn(2, 5, 4, 3, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    b = b * (a.flatten(1).norm(dim=1) / b.flatten(1).norm(dim=1))[:, None, None, None]
    middle = slerp_middle(a, b)
    torch.testing.assert_close(middle.flatten(1).norm(dim=1), a.flatten(1).norm(dim=1))
    torch.testing.assert_close((middle - a).norm(), (middle - b).norm())
    torch.testing.assert_close(slerp_middle(a, a), a)


def test_near_neighbours_are_drawn_more_often():
    """Two neighbours at known distances: softmax(-MSE) of draws with 400 seeds."""
    latents = torch.zeros(3, 1, 1, 2)
    latents[:, 0, 0] = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.5]])
    errors = (latents[0] - latents[1:]).square().mean((1, 2, 3))
    near = slerp_middle(latents[:1], latents[1:2])[0]
    drawn = [torch.equal(interpolated(latents, seed)[0], near) for seed in range(400)]
    assert np.mean(drawn) == pytest.approx(torch.softmax(-errors, 0)[0].item(), abs=0.08)


def mean_colours(images: torch.Tensor) -> torch.Tensor:
    """Features of a stand-in for Inception."""
    assert images.dtype == torch.uint8
    return images.float().mean((2, 3)) / 100


def squared_mmd(real: np.ndarray, other: np.ndarray) -> float:
    """The unbiased one with the kernel (xy / D + 1)^3 (Binkowski et al. 2018)."""
    kernels = [(x @ y.T / x.shape[1] + 1) ** 3 for x, y in ((real, real), (other, other), (real, other))]
    count = len(real)
    within = [(kernel.sum() - kernel.trace()) / (count * (count - 1)) for kernel in kernels[:2]]
    return sum(within) - 2 * kernels[2].mean()


def test_distance_of_images_between_neighbours(tmp_path, monkeypatch):
    """iKID of a VAE is that of its decoded paths; of many images it is iFID, with its formula."""
    pytest.importorskip("torch_fidelity")
    model = load_vae(write_vae(tmp_path / "vae")).autoencoder
    images = torch.randint(0, 256, (12, 3, 32, 32), generator=torch.Generator().manual_seed(5)).byte()
    found, _ = diffusability(model, images.split(4), torch.float32, features=mean_colours)
    with torch.no_grad():
        latents = encode_images(model, to_float(images), dtype=torch.float32).mode()
        std, mean = torch.std_mean(latents, (0, 2, 3), correction=0, keepdim=True)
        paths = interpolated(normalise(latents).float(), NOISE_SEED) * std + mean
        between = to_uint8(decode_latents(model, paths, (32, 32), dtype=torch.float32))
    real, other = (mean_colours(values).double() for values in (images, between))
    assert found["iKID"] == pytest.approx(squared_mmd(real.numpy(), other.numpy()), rel=0.02)
    assert "iFID" not in found
    monkeypatch.setattr(neighbours, "MIN_FID_IMAGES", 12)
    name, value = feature_distance(real, real + torch.tensor([3.0, 0, 4]))
    assert (name, value) == (
        "iFID",
        pytest.approx(25),
    )  # equal covariances: the squared distance of the means
