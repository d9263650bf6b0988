"""Published protocols: crops equal torchvision's, metrics scikit-image's and torchmetrics'."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from torchvision import transforms

from tests.evaluation.test_metrics import image_pair
from vae.config.evaluate_flags import PROTOCOLS, parse_evaluate_flags
from vae.evaluation.measure import Metrics
from vae.evaluation.metrics import ssim
from vae.evaluation.protocols import RULES, rules_of
from vae.images.pixels import as_float, as_uint8
from vae.images.psnr import psnr
from vae.system.errors import UserError

WORDS = ["--vae", "vae", "--data_path", "images", "--output_dir", "out"]
SIZES = [(70, 91), (64, 64), (200, 131), (33, 50)]


def pixels_of(height: int, width: int) -> np.ndarray:
    """A busy picture, (height, width, 3) uint8."""
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("sides", SIZES)
def test_crop_of_sgm_is_that_of_torchvision(sides):
    pixels = pixels_of(*sides)
    wanted = transforms.Compose([transforms.Resize(32), transforms.CenterCrop(32), transforms.ToTensor()])
    expected = wanted(Image.fromarray(pixels)) * 2 - 1
    assert torch.equal(as_uint8(expected), RULES["sgm"].cut(pixels, 32))


@pytest.mark.parametrize("sides", SIZES)
def test_crop_of_va_vae_keeps_floats_between_the_levels(sides):
    pixels = pixels_of(*sides)
    wanted = transforms.Compose([transforms.ToTensor(), transforms.Resize(32), transforms.CenterCrop(32)])
    found = RULES["va-vae"].cut(pixels, 32)
    assert torch.allclose(found, wanted(Image.fromarray(pixels)) * 2 - 1, atol=1e-6)
    assert not torch.equal(as_float(as_uint8(found)), found)


@pytest.mark.parametrize(("sides", "halvings"), [((70, 91), 1), ((200, 131), 2), ((48, 50), 0)])
def test_crop_of_dc_ae_halves_by_means_first(sides, halvings):
    pixels = pixels_of(*sides)
    halved = pixels[: sides[0] // 2**halvings * 2**halvings, : sides[1] // 2**halvings * 2**halvings]
    for _ in range(halvings):
        halved = halved[: len(halved) // 2 * 2, : halved.shape[1] // 2 * 2]
        halved = halved.reshape(len(halved) // 2, 2, halved.shape[1] // 2, 2, 3).mean((1, 3))
    found = RULES["dc-ae"].cut(pixels, 32)
    assert found.shape == (3, 32, 32)
    assert abs(found.float().mean() - halved.mean()) < 2
    assert torch.equal(
        RULES["dc-ae"].cut(np.full((*sides, 3), 77, np.uint8), 32), torch.full((3, 32, 32), 77)
    )


def test_ssim_with_a_uniform_window_equals_scipy():
    recon, images = image_pair(2, 3, 24, 31)
    for one, other, found in zip(
        recon, images, ssim(recon, images, rounded=False, window="uniform"), strict=True
    ):
        values = []
        for x, y in zip(*(np.clip(v.double().numpy(), -1, 1) / 2 + 0.5 for v in (one, other)), strict=True):
            blur = lambda a: ndimage.uniform_filter(a, 7)  # noqa: E731
            mx, my = blur(x), blur(y)
            vx, vy, cov = (
                49 / 48 * (blur(a) - b) for a, b in ((x * x, mx**2), (y * y, my**2), (x * y, mx * my))
            )
            full = (2 * mx * my + 1e-4) * (2 * cov + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4))
            values.append(full[3:-3, 3:-3].mean())
        assert math.isclose(found.item(), float(np.mean(values)), rel_tol=1e-6)


@pytest.mark.parametrize("name", ["va-vae", "dc-ae", "sgm"])
def test_metrics_equal_torchmetrics_and_skimage(name):
    torchmetrics = pytest.importorskip("torchmetrics.functional.image")
    skimage = pytest.importorskip("skimage.metrics")
    recon, images = image_pair(3, 3, 40, 33)
    found = Metrics(torch.device("cpu"), None, None, RULES[name])
    for one, other in zip(recon, images.clamp(-1, 1), strict=True):
        metrics = found.of_image(one, other)
        x, y = (v.clamp(-1, 1) / 2 + 0.5 for v in (one, other))
        levels = [(255 * v + 0.5).floor() for v in (x, y)]
        if name == "sgm":
            arrays = [v.permute(1, 2, 0).numpy() for v in (y, x)]
            psnr_, ssim_ = (
                skimage.peak_signal_noise_ratio(*arrays, data_range=1.0),
                skimage.structural_similarity(*arrays, channel_axis=-1, data_range=1.0),
            )
        else:
            psnr_ = 10 * math.log10(255**2 / (levels[0] - levels[1]).square().mean().item())
            values, data_range = ([one, other], (-1.0, 1.0)) if name == "va-vae" else (levels, (0.0, 255.0))
            pair = [v[None].double() for v in values]
            ssim_ = torchmetrics.structural_similarity_index_measure(*pair, data_range=data_range).item()
        assert metrics["psnr"] == pytest.approx(psnr_, abs=1e-5)
        assert metrics["ssim"] == pytest.approx(ssim_, abs=1e-5)


def test_rounding_is_what_the_rules_say():
    recon, images = image_pair(1, 3, 16, 16)
    rounded, floats = as_float(as_uint8(recon)), recon.clamp(-1, 1)
    device = torch.device("cpu")
    ours = Metrics(device, None, None, RULES["resize"]).of_image(recon[0], images[0])
    sgm = Metrics(device, None, None, RULES["sgm"]).of_image(recon[0], images[0])
    assert ours["psnr"] == psnr(rounded, as_float(as_uint8(images))).item()
    mse = (floats - images.clamp(-1, 1)).double().square().mean().item()
    assert sgm["psnr"] == pytest.approx(10 * math.log10(4 / mse), abs=1e-5)
    assert sgm["psnr"] != ours["psnr"]


def test_protocols_set_sizes_posterior_and_network():
    config = parse_evaluate_flags([*WORDS, "--protocol", "va-vae"])
    assert (config.sizes, config.posterior, config.perceptual_net) == ((256,), "sample", "auto")
    config = parse_evaluate_flags([*WORDS, "--protocol", "dc-ae", "--perceptual_net", "none"])
    assert (config.sizes, config.posterior, config.perceptual_net) == ((512,), "mode", "none")
    assert rules_of("ours", "center") is RULES["center"]
    assert {name: rules_of(name, "resize") for name in PROTOCOLS if name != "ours"} == {
        name: RULES[name] for name in PROTOCOLS if name != "ours"
    }


@pytest.mark.parametrize("words", [["--crop", "center"], ["--posterior", "mode"], ["--sizes", "0"]])
def test_what_contradicts_a_protocol_is_refused(words):
    with pytest.raises(UserError, match=f"{words[0]}.* contradicts --protocol sgm"):
        parse_evaluate_flags([*WORDS, "--protocol", "sgm", *words])
