"""Each measure has its known value on latents that are made for it."""

import math

import pytest
import torch

from tests.harness.small_vae import write_vae
from vae.evaluation.diffusability import (
    COVERAGE,
    DISTANCE,
    DISTANCE_SPREAD,
    RECONSTRUCTION,
    TAUS,
    VELOCITY,
    VELOCITY_SPREAD,
    diffusability,
    effective_rank,
    lowest,
    noise_curve,
    normalise,
    verdicts,
)
from vae.interop.vae_files import load_vae


def test_rank_of_the_channels():
    """Dead channels count as nothing, also with a little noise of their own."""
    white = normalise(torch.randn(200, 8, 8, 8, generator=torch.Generator().manual_seed(5)))
    assert effective_rank(white) == pytest.approx(8, rel=0.01)
    copies = white[:, :1].expand(-1, 8, -1, -1)
    assert effective_rank(copies) == pytest.approx(1)
    dead = 1e-6 * white.roll(1, 0)
    assert effective_rank(normalise(torch.cat([white, dead], 1))) == pytest.approx(8, rel=0.01)


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


def measures_of(loss: tuple[float, float], distance: tuple[float, float]) -> dict[str, float]:
    keys = VELOCITY, VELOCITY_SPREAD, DISTANCE, DISTANCE_SPREAD
    return dict(zip(keys, (*loss, *distance), strict=True))


@pytest.mark.parametrize(("better", "other"), ["ab", "ba"])
def test_the_seeds_decide_whether_a_vae_is_named(better, other):
    vaes = {
        better: measures_of((0.412, 0.003), (0.1, 0.01)),
        other: measures_of((0.447, 0.004), (0.11, 0.01)),
        "worst": measures_of((0.9, 0.004), (0.9, 0.01)),
    }
    of_distance, of_loss = verdicts(vaes)
    expected = "velocity loss 0.412 ± 0.003 against 0.447 ± 0.004"
    assert of_loss == f"latents of {better} are easier to model: {expected} of {other}"
    assert of_distance.startswith(f"latents of {better} and {other}: no difference in sample distance")
    assert lowest(VELOCITY, vaes) == ([better, other], True)
    assert lowest(DISTANCE, vaes) == ([better, other], False)
    assert verdicts({better: vaes[better]}) == []
    assert verdicts({better: {"noise 0.1 dB": 20.0}, other: {"noise 0.1 dB": 10.0}}) == []  # no seeds


def test_every_measure_of_a_vae(tmp_path):
    model = load_vae(write_vae(tmp_path / "vae")).autoencoder
    images = torch.randint(0, 256, (12, 3, 32, 32), generator=torch.Generator().manual_seed(7)).byte()
    measures = diffusability(model, images.split(4), torch.float32)
    assert list(measures) == ["effective rank", *(f"noise {tau:g} dB" for tau in TAUS)]
    assert 1 < measures["effective rank"] <= 16
    curve = [measures[f"noise {tau:g} dB"] for tau in TAUS]
    assert curve == sorted(curve, reverse=True)
    assert curve[0] > curve[-1]
    other = diffusability(model, images.split(6), torch.float32)  # batches change only the noise
    assert other["effective rank"] == pytest.approx(measures["effective rank"], rel=1e-3)


def test_latents_that_are_not_finite_have_no_measures(tmp_path):
    model = load_vae(write_vae(tmp_path / "vae")).autoencoder
    images = torch.randint(0, 256, (40, 3, 32, 32), generator=torch.Generator().manual_seed(7)).byte()
    model.decoder.conv_out.bias.data.fill_(torch.nan)
    measures = diffusability(model, images.split(4), torch.float32, velocity_steps=2)
    missing = {name for name, value in measures.items() if value is None}
    distances = {DISTANCE, DISTANCE_SPREAD, RECONSTRUCTION, COVERAGE}
    assert missing == {f"noise {tau:g} dB" for tau in TAUS} | distances
    (of_loss,) = verdicts({"a": measures, "b": measures})
    assert "no difference in velocity loss" in of_loss
    model.encoder.conv_out.bias.data.fill_(torch.nan)
    assert diffusability(model, images.split(4), torch.float32, velocity_steps=2) == {}


def test_networks_are_compared_by_their_samples_too(tmp_path):
    model = load_vae(write_vae(tmp_path / "vae")).autoencoder
    images = torch.randint(0, 256, (40, 3, 32, 32), generator=torch.Generator().manual_seed(7)).byte()
    measures = diffusability(model, images.split(4), torch.float32, velocity_steps=2)
    assert measures[VELOCITY] > 1
    assert measures[DISTANCE] > 0
    assert measures[DISTANCE_SPREAD] > 0
    assert 0 < measures[RECONSTRUCTION] < 2
    assert 0 <= measures[COVERAGE] <= 1
    assert diffusability(model, images[:20].split(4), torch.float32, velocity_steps=2)[COVERAGE] is None
