"""Initial weights: the linear codec reconstructs, every weight can learn, and the seed decides the result."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vae.config.model_options import ModelConfig
from vae.model import layers
from vae.model.autoencoder import AutoencoderKL
from vae.model.initialization import initialize, natural_images

SMALL = {"channels": (32, 64, 64, 64), "layers_per_block": 1, "norm_groups": 8}
ODD = [
    {"channels": (8, 16, 16), "layers_per_block": 1, "norm_groups": 4, "z_channels": 4},
    {"channels": (8, 16), "layers_per_block": 1, "norm_groups": 8, "z_channels": 32},  # one channel per group
    {"channels": (32, 64, 64, 64), "layers_per_block": 1, "norm_groups": 32, "z_channels": 32},
    {"channels": (24, 24, 24), "layers_per_block": 3, "norm_groups": 2, "use_quant_conv": True},
    {
        "channels": (32, 16, 8, 16),
        "layers_per_block": 1,
        "norm_groups": 4,
        "z_channels": 8,
    },  # widths decrease
    {"channels": (8, 16, 16, 16, 16, 16), "layers_per_block": 1, "norm_groups": 2, "z_channels": 16},
]


@functools.cache
def initialized(config: ModelConfig, seed: int) -> AutoencoderKL:
    model = AutoencoderKL(config)
    initialize(model, "warm", seed)
    return model


def warm_model(seed: int = 0, **shape) -> AutoencoderKL:
    return copy.deepcopy(initialized(ModelConfig(**shape), seed))


def unseen_images() -> torch.Tensor:
    """Images with another spectrum than the fitted ones: random discs with sharp edges."""
    generator = torch.Generator().manual_seed(5)
    images = torch.zeros(4, 3, 128, 128)
    grid = torch.arange(128.0)
    for image in images:
        for _ in range(60):
            x, y, radius = torch.rand(3, generator=generator) * torch.tensor([128.0, 128.0, 30.0])
            inside = (grid[:, None] - y) ** 2 + (grid[None] - x) ** 2 < radius**2
            gray = torch.rand(1, generator=generator) * 1.6 - 0.8
            color = gray + 0.15 * torch.randn(3, generator=generator)
            image[:, inside] = color[:, None].clamp(-1, 1)
    return images


def psnr(recon: torch.Tensor, images: torch.Tensor) -> float:
    error = (recon.float() - images).pow(2).mean(dim=(1, 2, 3))
    return (10 * torch.log10(4 / error)).mean().item()


def bicubic_baseline(images: torch.Tensor, factor: int) -> torch.Tensor:
    small = F.interpolate(images, scale_factor=1 / factor, mode="area")
    return F.interpolate(small, scale_factor=factor, mode="bicubic")


@pytest.mark.slow
def test_untrained_codec_beats_the_bicubic_baseline():
    natural = natural_images(26, 128)[24:]  # the fits see the first 24
    model = warm_model(**SMALL)
    with torch.no_grad():
        for images in (natural, unseen_images()):
            recon, mean, _ = model(images)
            assert psnr(recon, images) > psnr(bicubic_baseline(images, 8), images) + 0.7
        assert 0.7 < mean.std() < 1.5


def test_flat_and_smooth_areas_are_reconstructed_away_from_the_border():
    """Random weights in the last convolutions once added a pattern of up to 0.19 to gray areas."""
    gray = torch.zeros(1, 3, 128, 128)
    gradient = (torch.linspace(-0.8, 0.8, 128)[None, None, None] * torch.ones(1, 3, 128, 1)).contiguous()
    with torch.no_grad():
        for images, largest in ((gray, 0.01), (gradient, 0.03)):
            error = (warm_model(**SMALL)(images)[0] - images)[..., 32:-32, 32:-32]
            assert error.abs().max() < largest


def test_a_rounding_change_in_one_operation_changes_weights_only_by_rounding(monkeypatch):
    """With fits in fp32, a change in the last digit of the norm changed the weights by a thousandth."""
    original = layers.group_norm_silu

    def rounded_differently(h, *rest):
        return original(h, *rest) * (1 + torch.finfo(h.dtype).eps)

    shape = ODD[0]
    expected = warm_model(**shape).state_dict()
    monkeypatch.setattr(layers, "group_norm_silu", rounded_differently)
    model = AutoencoderKL(ModelConfig(**shape))
    initialize(model, "warm", 0)
    for name, weight in model.state_dict().items():
        assert (weight - expected[name]).norm() <= 1e-7 * expected[name].norm(), name


def test_latents_have_unit_variance_and_little_noise():
    with torch.no_grad():
        posterior = warm_model(**SMALL).encode(natural_images(32, 128))
    std = posterior.mean.std(dim=(0, 2, 3))
    assert std.min() > 0.8
    assert std.max() < 1.2
    assert posterior.logvar.mean() == pytest.approx(-6, abs=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [SMALL, *ODD])
def test_every_weight_learns(shape):
    model = warm_model(**shape)
    plain = AutoencoderKL(ModelConfig(**shape)).state_dict()
    kept = {name: (value.shape, value.dtype) for name, value in model.state_dict().items()}
    assert kept == {name: (value.shape, value.dtype) for name, value in plain.items()}
    images = natural_images(2, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trained = set()
    for step in range(3):
        noise = torch.randn(model.encode(images).mean.shape, generator=torch.Generator().manual_seed(step))
        recon, mean, logvar = model(images, noise)
        assert recon.isfinite().all()
        kl = (mean**2 + logvar.exp() - logvar).sum()
        optimizer.zero_grad()
        ((recon - images).abs().mean() + 1e-6 * kl).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        trained |= {name for name, p in model.named_parameters() if p.grad.abs().max() > 0}
        optimizer.step()
    assert trained == {name for name, _ in model.named_parameters()}


def test_no_channel_is_dead():
    """Each output channel of each convolution gets a gradient."""
    model = warm_model(**SMALL)
    images = natural_images(2, 64)
    (model(images)[0] - images).abs().mean().backward()
    torch.optim.SGD(model.parameters(), lr=1e-2).step()
    model.zero_grad()
    recon, mean, logvar = model(images, torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(0)))
    ((recon - images).abs().mean() + 1e-6 * (mean**2 - logvar).sum()).backward()
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            assert (module.weight.grad.flatten(1).abs().amax(dim=1) > 0).all(), name


@pytest.mark.slow
def test_result_depends_only_on_the_seed():
    torch.manual_seed(1)
    first, state = warm_model(seed=0, **SMALL).state_dict(), torch.get_rng_state()
    model = AutoencoderKL(ModelConfig(**SMALL))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    initialize(model, "warm", 0)
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(state, before)
    again, other = model.state_dict(), warm_model(seed=4, **SMALL).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("use_quant_conv", [False, True])
def test_default_weights_begin_with_little_noise(use_quant_conv):
    model = AutoencoderKL(ModelConfig(**SMALL, use_quant_conv=use_quant_conv))
    initialize(model, "default", 0)
    with torch.no_grad():
        posterior = model.encode(natural_images(2, 64))
    assert posterior.logvar.mean() == pytest.approx(-6, abs=0.2)
    assert posterior.logvar.std() > 1e-3  # it depends on the image
    assert posterior.mean.std() > 0.1


def test_default_weights_are_those_of_pytorch():
    model = AutoencoderKL(ModelConfig(**SMALL))
    initialize(model, "default", 7)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        conv = nn.Conv2d(3, 32, 3, padding=1)  # the first module of the model
    assert torch.equal(model.encoder.conv_in.weight, conv.weight)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear) and module is not model.encoder.conv_out:
            bound = module.weight[0].numel() ** -0.5  # kaiming_uniform_ with a = sqrt(5)
            assert module.weight.abs().max() <= bound
            assert module.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
        if isinstance(module, nn.GroupNorm):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()
