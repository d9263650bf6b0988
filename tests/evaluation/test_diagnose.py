"""Each defect is measured at the strength at which it was added, and nothing else is."""

import math
from types import SimpleNamespace

import pytest
import torch

from vae.evaluation.diagnose import DEFECTS, DefectMeter, diagnose
from vae.evaluation.metrics import bicubic_baseline
from vae.evaluation.results import SizeResult, VaeResult
from vae.evaluation.tables import diagnosis_lines
from vae.images.pixels import to_float, to_uint8

LEVEL = 1 / 127.5
SIDE = 256


def image(seed: int) -> torch.Tensor:
    """A smooth picture with the noise of a camera, and a busy half."""
    generator = torch.Generator().manual_seed(seed)
    smooth = torch.rand((1, 3, 4, 4), generator=generator) - 0.5
    busy = torch.rand((1, 3, SIDE // 2, SIDE), generator=generator) - 0.5
    picture = torch.nn.functional.interpolate(smooth, (SIDE, SIDE), mode="bicubic")
    picture += LEVEL * torch.randn((1, 3, SIDE, SIDE), generator=generator)
    picture[:, :, SIDE // 2 :] = busy
    return to_float(to_uint8(picture))[0]


def added(defect: str, strength: float, recon: torch.Tensor) -> torch.Tensor:
    """The reconstruction with a defect of a strength in the unit of its measure."""
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    if defect.startswith("grid"):
        period = int(defect.removeprefix("grid_"))
        wave = torch.cos(2 * math.pi * y / period) * torch.cos(2 * math.pi * x / period)
        return recon + strength * LEVEL * wave / wave.square().mean().sqrt()
    if defect == "speckles":
        count = round(strength * SIDE * SIDE / 2e6)  # the smooth half
        at = torch.linspace(8, SIDE - 8, count).long()
        recon = recon.clone()
        recon[:, (at * 37) % (SIDE // 2 - 30) + 8, at] += 40 * LEVEL
        return recon
    if defect == "cast":
        return recon + LEVEL * torch.tensor([strength, 0.0, -strength / 2])[:, None, None]
    edge = torch.ones(SIDE, SIDE, dtype=torch.bool)
    edge[8:-8, 8:-8] = False
    return torch.where(edge, strength, 1.0) * recon


def measured(defect: str, strength: float, seed: int = 0) -> dict[str, float | None]:
    meter = DefectMeter()
    picture = image(seed)
    error = LEVEL * torch.randn(picture.shape, generator=torch.Generator().manual_seed(seed))
    if defect == "border":
        meter.add(picture + added(defect, strength, error), picture)
    else:
        meter.add(added(defect, strength, picture + error), picture)
    return meter.measures()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("defect", ["grid_2", "grid_4", "grid_8", "speckles", "cast"])
def test_a_defect_is_measured(defect: str, seed: int):
    limit = DEFECTS[defect].limit
    for strength in (2 * limit, 4 * limit, 8 * limit):
        values = measured(defect, strength, seed)
        # 60 speckles per megapixel are 2 in the smooth half of an image
        assert values[defect] == pytest.approx(strength, rel=0.3 if defect == "speckles" else 0.1)
        others = {name: value for name, value in values.items() if name not in (defect, "border")}
        assert all(value < DEFECTS[name].limit for name, value in others.items()), (strength, values)


def test_surroundings_in_parts_are_the_same(monkeypatch):
    """So a large image needs little memory."""
    whole = measured("speckles", 200.0)
    monkeypatch.setattr("vae.evaluation.diagnose.AT_ONCE", 7)
    assert measured("speckles", 200.0) == whole


@pytest.mark.parametrize("seed", range(3))
def test_a_border_is_measured(seed: int):
    for strength in (1.5, 2, 4):
        # the busy half has most of the error beside its detail
        assert measured("border", strength, seed)["border"] == pytest.approx(strength, rel=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_noise_and_blur_are_no_defects(seed: int):
    meter = DefectMeter()
    picture = image(seed)
    meter.add(bicubic_baseline(picture[None], 8)[0], picture)
    for values in (meter.measures(), measured("cast", 0.0, seed)):
        assert all(value < DEFECTS[name].limit for name, value in values.items()), values


def test_a_cast_adds_up_over_rounds():
    def reconstruct(images: torch.Tensor, _: range) -> list[torch.Tensor]:
        return [added("cast", 4.0, picture) for picture in to_float(images)]

    grey = torch.full((2, 3, SIDE, SIDE), 128, dtype=torch.uint8)
    values = diagnose(reconstruct, [grey])
    assert values["cast"] == pytest.approx(4, abs=0.1)
    assert values["cast_after_rounds"] == pytest.approx(40, abs=1)
    assert values["border"] is not None
    assert diagnose(lambda images, _: [None] * len(images), [grey]) == dict.fromkeys(DEFECTS)


def test_images_without_smooth_regions_are_not_measured():
    busy = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    meter = DefectMeter()
    meter.add(busy * 0.9, busy)
    values = meter.measures()
    assert values["grid_2"] is None
    assert values["speckles"] is None


def test_verdicts():
    """A VAE with a defect is named with it; one with a higher PSNR and a worse LPIPS is blurred."""
    none = dict.fromkeys(DEFECTS, 0.0)
    vaes = [
        VaeResult(
            name,
            name,
            "diffusers",
            [SizeResult(256, {"psnr": psnr, "lpips": lpips}, {})],
            diagnosis={**none, **defects},
        )
        for name, psnr, lpips, defects in (
            ("grid", 30.0, 0.1, {"grid_8": 0.6}),
            ("fine", 30.0, 0.1, {}),
            ("busy", 30.0, 0.1, {"grid_8": None}),
            ("soft", 30.5, 0.2, {}),
        )
    ]
    lines = diagnosis_lines(SimpleNamespace(networks=vaes))
    assert [line.split(",")[0] for line in lines] == [
        "grid: grid of 8 px",
        "fine: no grid",
        "busy: not measured: grid of 8 px",
        "soft: blur",
        "soft: no grid",
    ]
