"""LPIPS: values of the package, gradients only for the reconstruction, little memory."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from vae.losses import feature_distance
from vae.losses.feature_distance import FeatureDistance
from vae.losses.perceptual import LeanMaxPool, PerceptualLoss, build_perceptual
from vae.system.errors import UserError

NETS = ("vgg", "alex", "squeeze")


def image_pair(batch: int = 3, height: int = 48, width: int = 35) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(batch, 3, height, width, generator=generator) * 2 - 1
    recon = (images + 0.2 * torch.randn(images.shape, generator=generator)).clamp(-1, 1)
    return recon, images


def gradient(loss: nn.Module, recon: Tensor, images: Tensor) -> Tensor:
    leaf = recon.clone().requires_grad_()
    loss(leaf, images).sum().backward()
    return leaf.grad


@pytest.fixture(scope="module")
def small(weights_files: dict[str, Path]) -> PerceptualLoss:
    return build_perceptual("alex", weights_files["alex"], torch.float32, "cpu")


@pytest.mark.parametrize("net", NETS)
def test_equals_the_package(net, packages, weights_files):
    ours = build_perceptual(net, weights_files[net], torch.float32, "cpu")
    recon, images = image_pair()
    expected = packages[net](recon, images).flatten()
    assert expected.min() > 0.005
    assert (ours(recon, images) - expected).abs().max() < 1e-6
    theirs = gradient(packages[net], recon, images)
    # convolutions in another layout add in another order
    assert (gradient(ours, recon, images) - theirs).norm() < 2e-5 * theirs.norm()


@pytest.mark.parametrize("elements", [700, 4000])  # at most one row; several rows and a smaller last piece
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_equals_the_package_when_features_are_split_into_pieces(
    packages, small, monkeypatch, elements, layout
):
    recon, images = (each.contiguous(memory_format=layout) for each in image_pair(2, 64, 64))
    whole = gradient(small, recon, images)
    monkeypatch.setattr(feature_distance, "CPU_PIECE_ELEMENTS", elements)
    assert (small(recon, images) - packages["alex"](recon, images).flatten()).abs().max() < 1e-6
    assert (gradient(small, recon, images) - whole).norm() < 1e-5 * whole.norm()


def test_only_the_reconstruction_gets_a_gradient(small):
    recon, images = (each.requires_grad_() for each in image_pair())
    small.train()(recon, images).sum().backward()
    assert (recon.grad.flatten(1).norm(dim=1) > 0).all()
    assert images.grad is None
    assert not any(weight.requires_grad for weight in small.parameters())
    assert not list(module for module in small.modules() if isinstance(module, nn.Dropout))


def test_equal_images_and_zero_features_have_finite_gradients(small):
    _, images = image_pair()
    assert small(images, images).tolist() == [0.0, 0.0, 0.0]
    assert torch.equal(gradient(small, images, images), torch.zeros_like(images))

    features = torch.zeros(1, 4, 2, 2, requires_grad=True)
    distance = FeatureDistance.apply(features, torch.ones(1, 4, 2, 2), torch.ones(4))
    distance.sum().backward()
    assert torch.allclose(distance, torch.ones(1))  # distance of a unit vector from zero
    assert torch.isfinite(features.grad).all()


def test_gradient_of_the_distance_is_correct():
    generator = torch.Generator().manual_seed(0)
    features, target = (torch.randn(2, 5, 3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    linear = torch.rand(5, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(FeatureDistance.apply, (features.requires_grad_(), target, linear))


@pytest.mark.parametrize(("window", "ceil_mode"), [(2, False), (3, False), (3, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pooling_equals_pytorch_with_ties(window, ceil_mode, dtype):
    reference = nn.MaxPool2d(window, 2, ceil_mode=ceil_mode)
    images = torch.randint(0, 3, (2, 4, 9, 10), generator=torch.Generator().manual_seed(0)).to(dtype)
    found, expected = (images.clone().requires_grad_() for _ in range(2))
    ours, theirs = LeanMaxPool(reference)(found), reference(expected)
    assert torch.equal(ours, theirs)
    upstream = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours.backward(upstream)
    theirs.backward(upstream)
    assert torch.equal(found.grad, expected.grad)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_half_precision_is_close(small, weights_files, dtype, tolerance):
    """Features have 8 or 11 bits (2^-8, 2^-11) in a few layers; the sum is fp32."""
    half = build_perceptual("alex", weights_files["alex"], dtype, "cpu")
    recon, images = image_pair()
    recon = recon.to(dtype)
    found, expected = half(recon, images), small(recon.float(), images)
    assert found.dtype == torch.float32
    assert (found / expected - 1).abs().max() < tolerance
    slope, exact = gradient(half, recon, images), gradient(small, recon.float(), images)
    assert slope.dtype == dtype
    assert nn.functional.cosine_similarity(slope.float().flatten(), exact.flatten(), dim=0) > 0.99


def test_saves_few_bytes_for_backward():
    """850 bytes per pixel in bf16, computed; the package saves 1,351 in the same dtype."""
    loss = build_perceptual("vgg", None, torch.bfloat16, "meta")
    side = 256
    recon = torch.empty(1, 3, side, side, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weights = {value.untyped_storage()._cdata for value in loss.state_dict().values()}
    saved = {}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(record, lambda tensor: tensor):
        distance = loss(recon, torch.empty(1, 3, side, side, device="meta"))
    assert distance.requires_grad
    assert sum(saved.values()) / side**2 <= 850


def test_random_trunk_is_always_the_same_and_does_not_change_the_random_state():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    one = build_perceptual("random", None, torch.float32, "cpu")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(8)
    other = build_perceptual("random", None, torch.float32, "cpu")
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    kernels = [value for value in one.state_dict().values() if value.shape[2:] == (3, 3)]  # He et al. 2015
    for weight in kernels:
        assert weight.std().item() == pytest.approx((2 / weight[0].numel()) ** 0.5, rel=0.1)
    recon, images = image_pair()
    assert (one(recon, images) > 0.01).all()
    assert (gradient(one, recon, images).flatten(1).norm(dim=1) > 0).all()


@pytest.mark.parametrize(("net", "smallest"), [("vgg", 16), ("alex", 31), ("squeeze", 17)])
def test_smallest_side_is_the_smallest_that_works(net, smallest):
    loss = build_perceptual(net, None, torch.float32, "meta")
    fits = torch.empty(1, 3, smallest, 64, device="meta")
    assert loss(fits, fits).shape == (1,)
    small = fits[:, :, 1:]
    with pytest.raises(UserError, match=rf"\b{smallest} px .*--image_size"):
        loss(small, small)
    loss.smallest_side = 0
    with pytest.raises(RuntimeError):
        loss(small, small)
