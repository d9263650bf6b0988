"""Each measure has its known value on latents that are made for it."""

import math

import pytest
import torch

from tests.harness.small_vae import write_vae
from vae.evaluation.diffusability import (
    DISTANCE,
    DISTANCE_SPREAD,
    RECONSTRUCTION,
    TAUS,
    VELOCITY,
    VELOCITY_SPREAD,
    _measures_of_latents,
    channel_correlation,
    compared,
    diffusability,
    effective_rank,
    high_frequency_share,
    local_similarity,
    noise_curve,
    normalise,
    spectrum,
    viv,
    viv_of_classes,
)
from vae.evaluation.latents import NoiseMeter, noise_facts
from vae.interop.vae_files import load_vae


def kronecker_latents(space: torch.Tensor, channel: torch.Tensor, count: int, height: int) -> torch.Tensor:
    """Gaussian latents whose covariance is the Kronecker product of two diagonal ones, rotated."""
    generator = torch.Generator().manual_seed(0)
    white = torch.randn(count, len(space), len(channel), generator=generator, dtype=torch.float64)
    bases = [
        torch.linalg.qr(torch.randn(len(d), len(d), generator=generator).double())[0]
        for d in (space, channel)
    ]
    tokens = bases[0] * space.sqrt() @ white * channel.sqrt() @ bases[1].T
    return tokens.mT.unflatten(2, (height, -1))


@pytest.mark.parametrize("decay", [0.0, 0.2, 0.5])
def test_viv_of_a_kronecker_gaussian(decay):
    space = torch.exp(-decay * torch.arange(24).double())
    channel = torch.tensor([2.0, 1.0, 0.5, 0.1], dtype=torch.float64)
    latents = kronecker_latents(space, channel, 4000, 4)
    expected = math.pi / 2 * space.sqrt().mean() * channel.sqrt().mean()
    assert viv(latents) == pytest.approx(expected.item(), rel=0.01)


def test_viv_of_white_noise_is_the_largest():
    white = torch.randn(2000, 4, 4, 6, generator=torch.Generator().manual_seed(1))
    smooth = torch.nn.functional.avg_pool2d(white, 3, 1, 1)
    assert viv(normalise(white)) == pytest.approx(math.pi / 2, rel=0.01)
    assert viv(normalise(smooth)) < 1.2


def test_viv_of_few_latents_is_not_a_number_of_theirs():
    assert viv(torch.randn(10, 4, 8, 8)) is None


def test_viv_is_the_mean_over_classes_with_enough_latents():
    """The classes lie far apart, so that one class of all has another value."""
    channel = torch.tensor([1.0, 0.5], dtype=torch.float64)
    classes = [
        kronecker_latents(torch.exp(-decay * torch.arange(24).double()), channel, 1000, 4) + 3 * decay
        for decay in (0.2, 0.5)
    ]
    latents, labels = torch.cat(classes), ["a"] * 1000 + ["b"] * 1000
    expected = sum(map(viv, classes)) / 2
    assert viv_of_classes(latents, labels) == (pytest.approx(expected), 2)
    few = ["a"] * 999 + ["c"] + ["b"] * 999 + [None]
    assert viv_of_classes(latents, few) == (pytest.approx(expected, rel=1e-3), 2)
    whole = viv(latents)
    assert abs(whole - expected) > 0.1
    for unknown in ([], [None] * 2000, ["a"] * 1000 + [str(number) for number in range(1000)]):
        assert viv_of_classes(latents, unknown) == (whole, 1)


@pytest.mark.parametrize(("u", "v", "above"), [(0, 0, 0), (1, 2, 0), (2, 3, 1), (7, 11, 1)])
def test_energy_is_at_its_frequency(u, v, above):
    """One cosine of an 8 x 12 grid; rho 0.25 separates at u + v = 4.5."""
    rows = torch.cos(math.pi / 8 * (torch.arange(8).double() + 0.5) * u)
    columns = torch.cos(math.pi / 12 * (torch.arange(12).double() + 0.5) * v)
    latents = (rows[:, None] * columns).expand(2, 3, 8, 12)
    assert high_frequency_share(latents, 0.25) == pytest.approx(above, abs=1e-12)


def test_white_noise_has_the_share_of_the_frequencies():
    white = torch.randn(500, 2, 8, 8, generator=torch.Generator().manual_seed(2)).double()
    grid = torch.arange(8)
    expected = (grid[:, None] + grid > 7).double().mean().item()
    assert high_frequency_share(white, 0.5) == pytest.approx(expected, abs=0.01)
    assert abs(local_similarity(white)) < 0.05


def test_similar_neighbours_and_different_distant_tokens():
    """Left and right half have opposite tokens: neighbours are equal but for those at the middle."""
    latents = torch.ones(1, 2, 4, 8, dtype=torch.float64)
    latents[..., 4:] = -1
    pairs = 4 * 7 + 3 * 8
    near = (pairs - 2 * 4) / pairs
    assert local_similarity(latents) > near  # far ones are mostly opposite
    white = torch.randn(64, 16, 8, 8, generator=torch.Generator().manual_seed(3)).double()
    smooth = torch.nn.functional.avg_pool2d(white, 3, 1, 1)
    assert local_similarity(smooth) > 0.4


def test_rank_and_correlation_of_the_channels():
    white = normalise(torch.randn(200, 8, 8, 8, generator=torch.Generator().manual_seed(5)))
    assert effective_rank(white) == pytest.approx(8, rel=0.01)
    assert channel_correlation(white) < 0.02
    copies = white[:, :1].expand(-1, 8, -1, -1)
    assert effective_rank(copies) == pytest.approx(1)
    assert channel_correlation(copies) == pytest.approx(1)
    assert channel_correlation(white[:, :1]) == 0


def test_noise_curve_of_a_linear_decoder():
    """Its error is that of the noise alone: tau² times the squared sum of weights times std."""
    generator = torch.Generator().manual_seed(6)
    weights = torch.randn(3, 4, generator=generator).double() * 0.05
    latents = (
        torch.randn(8, 4, 64, 64, generator=generator).double() * torch.tensor([0.5, 1, 2, 1])[:, None, None]
    )
    noise = torch.randn(latents.shape, generator=generator).double()

    def decode(values: torch.Tensor) -> torch.Tensor:
        return torch.einsum("dc,nchw->ndhw", weights, values)

    std = latents.std((0, 2, 3), correction=0)
    curve = noise_curve(decode, latents, noise * std[:, None, None], decode(latents))
    for tau, value in list(zip(TAUS, curve.mean(1).tolist(), strict=True))[2:]:  # below, rounding counts
        mse = tau**2 * (weights * std).square().sum(1).mean().item() * 127.5**2
        assert value == pytest.approx(10 * math.log10(255**2 / mse), rel=0.02)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (
            (0.412, 0.003),
            (0.447, 0.004),
            "a are easier to model: velocity loss 0.412 ± 0.003 against 0.447 ± 0.004 of b",
        ),
        (
            (0.447, 0.004),
            (0.412, 0.003),
            "b are easier to model: velocity loss 0.412 ± 0.003 against 0.447 ± 0.004 of a",
        ),
        ((0.412, 0.02), (0.447, 0.004), "a and b: no difference"),
    ],
)
def test_the_spread_of_the_seeds_decides_whether_vaes_differ(first, second, expected):
    keys = VELOCITY, VELOCITY_SPREAD, DISTANCE, DISTANCE_SPREAD
    sides = [dict(zip(keys, (*of_loss, 0.1, 0.01), strict=True)) for of_loss in (first, second)]
    of_loss, of_distance = compared("a", sides[0], "b", sides[1])
    assert of_loss.startswith(f"latents of {expected}")
    assert of_distance == "latents of a and b: no difference in sample distance beyond that of the seeds"


def test_spectrum_of_noise_is_flat_and_that_of_smooth_latents_falls():
    noise = torch.randn(200, 4, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    flat, smooth = spectrum(noise), spectrum(torch.nn.functional.avg_pool2d(noise, 5, stride=1))
    assert len(flat) == 16
    assert max(abs(value - 1) for value in flat) < 0.15  # 256 coefficients of the lowest band
    assert smooth[0] > 10 * smooth[8]


def test_every_measure_of_a_vae(tmp_path):
    """VIV needs more images than positions over channels; the other measures do not."""
    model = load_vae(write_vae(tmp_path / "vae")).autoencoder
    images = torch.randint(0, 256, (12, 3, 32, 32), generator=torch.Generator().manual_seed(7)).byte()
    measures, bands = diffusability(model, images.split(4), torch.float32)
    assert measures["VIV"] is not None
    assert 0 < measures["SEC 0.5"] < measures["SEC 0.25"] < 1
    assert 1 < measures["effective rank"] <= 16
    curve = [measures[f"noise {tau:g} dB"] for tau in TAUS]
    assert curve == sorted(curve, reverse=True)
    assert curve[0] > curve[-1]
    assert all(value > 0 for value in bands)
    other, _ = diffusability(model, images.split(6), torch.float32)  # batches change only the noise
    assert other["VIV"] == pytest.approx(measures["VIV"], rel=1e-3)
    assert diffusability(model, images[:4].split(4), torch.float32)[0]["VIV"] is None


def test_dead_channels_count_as_nothing():
    """Also with a little noise of their own, which would otherwise be as strong as the other channels."""
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(96, 8, 12, 12, generator=generator)
    live = torch.nn.functional.avg_pool2d(noise, 5, stride=1)
    dead = 1e-6 * torch.randn(live.shape, generator=generator)
    both = live, torch.cat([live, dead], 1)
    measures = [_measures_of_latents(normalise(latents), [], live.device) for latents in both]
    for found in measures:
        del found["channel correlation"]  # the mean over all pairs of channels
    assert measures[1] == pytest.approx(measures[0], rel=1e-3)
    for latents in both:
        meter = NoiseMeter(latents.shape[1])
        meter.add(latents, torch.zeros_like(latents))
        assert noise_facts(meter.sums())["sec"] == pytest.approx(measures[0]["SEC 0.25"], rel=1e-3)


def test_latents_that_are_not_finite_have_no_measures(tmp_path):
    model = load_vae(write_vae(tmp_path / "vae")).autoencoder
    images = torch.randint(0, 256, (40, 3, 32, 32), generator=torch.Generator().manual_seed(7)).byte()
    model.decoder.conv_out.bias.data.fill_(torch.nan)
    measures, _ = diffusability(model, images.split(4), torch.float32, velocity_steps=2)
    missing = {name for name, value in measures.items() if value is None}
    distances = {DISTANCE, DISTANCE_SPREAD, RECONSTRUCTION}
    assert missing == {"VIV"} & missing | {f"noise {tau:g} dB" for tau in TAUS} | distances
    (of_loss,) = compared("a", measures, "b", measures)
    assert "no difference in velocity loss" in of_loss
    model.encoder.conv_out.bias.data.fill_(torch.nan)
    assert diffusability(model, images.split(4), torch.float32, velocity_steps=2) == ({}, [])


def test_networks_are_compared_by_their_samples_too(tmp_path):
    model = load_vae(write_vae(tmp_path / "vae")).autoencoder
    images = torch.randint(0, 256, (40, 3, 32, 32), generator=torch.Generator().manual_seed(7)).byte()
    measures, _ = diffusability(model, images.split(4), torch.float32, velocity_steps=2)
    assert measures[VELOCITY] > 1
    assert measures[DISTANCE] > 0
    assert measures[DISTANCE_SPREAD] > 0
    assert 0 < measures[RECONSTRUCTION] < 2
