"""Validation sums over batches and ranks give the mean over images; lpips only if it is measured."""

import math

import pytest
import torch

from vae.evaluation.baselines import bicubic_baseline, mean_colour
from vae.evaluation.metrics import ssim
from vae.evaluation.sums import baseline_sums, means, reconstruction_sums
from vae.images.psnr import OFF_BY_ONE_DB, psnr


def images(count: int) -> torch.Tensor:
    return torch.rand(count, 3, 16, 24, generator=torch.Generator().manual_seed(0)) * 2 - 1


def darker(batch: torch.Tensor) -> torch.Tensor:
    return batch * 0.8


def distance(recon: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return (recon - batch).abs().mean((1, 2, 3))


def test_mean_is_over_images_not_batches():
    whole = images(5)
    found = means(reconstruction_sums(darker, whole.split([1, 4]), distance))
    assert set(found) == {"psnr", "ssim", "lpips", "images"}
    assert found["images"] == 5
    assert math.isclose(found["psnr"], psnr(darker(whole), whole).mean().item(), rel_tol=1e-12)
    assert math.isclose(found["ssim"], ssim(darker(whole), whole).mean().item(), rel_tol=1e-12)
    assert math.isclose(found["lpips"], distance(darker(whole), whole).mean().item(), rel_tol=1e-6)


def test_sums_of_ranks_add_up_even_if_one_has_no_images():
    whole = images(5)
    parts = [reconstruction_sums(darker, [part], distance) for part in whole.split([2, 3])] + [
        reconstruction_sums(darker, [], distance)
    ]
    added = {name: tuple(map(sum, zip(*(part[name] for part in parts), strict=True))) for name in parts[0]}
    together, alone = means(added), means(reconstruction_sums(darker, [whole], distance))
    assert together.keys() == alone.keys()
    assert all(math.isclose(together[name], alone[name], rel_tol=1e-6) for name in alone)
    assert all(type(total) is float and type(count) is int for total, count in parts[0].values())


def test_without_lpips_there_is_no_lpips():
    sums = reconstruction_sums(darker, [images(2)], None)
    assert "lpips" not in sums
    assert set(means(sums)) == {"psnr", "ssim", "images"}
    assert means(reconstruction_sums(darker, [], None)) == {"images": 0}


def test_exact_copies_leave_the_mean_finite():
    found = means(reconstruction_sums(lambda batch: batch, [images(2)], None))
    assert found["psnr"] == OFF_BY_ONE_DB
    assert math.isclose(found["ssim"], 1.0, rel_tol=1e-12)


def test_crops_of_one_colour_do_not_decide_the_mean_of_the_baseline():
    """Bicubic copies them exactly; a VAE that is better on every other crop is better in the mean."""
    noisy, plain = images(3), torch.full_like(images(1), 0.25)
    batch = torch.cat([noisy, plain])
    bicubic = means(baseline_sums([batch], None)["bicubic"])["psnr"]
    alone = means(baseline_sums([noisy], None)["bicubic"])["psnr"]
    assert bicubic == pytest.approx((3 * alone + 20 * math.log10(255)) / 4)
    vae = means(reconstruction_sums(lambda x: x * 0.9 + 0.01, [batch], None))["psnr"]
    assert vae > bicubic


def test_reconstruction_with_nan_gives_nan():
    assert math.isnan(means(reconstruction_sums(lambda batch: batch * math.nan, [images(2)], None))["psnr"])


def test_bf16_reconstructions_are_measured_in_fp32_without_a_graph():
    weight = torch.tensor(0.9, requires_grad=True)
    graphs = []

    def reconstruct(batch: torch.Tensor) -> torch.Tensor:
        recon = (batch * weight).bfloat16()
        graphs.append(recon.requires_grad)
        return recon

    found = means(reconstruction_sums(reconstruct, [images(2)], distance))
    assert graphs == [False]
    rounded = (images(2) * 0.9).bfloat16().float()
    assert math.isclose(found["psnr"], psnr(rounded, images(2)).mean().item(), rel_tol=1e-12)


@pytest.mark.parametrize("perceptual", [None, distance])
def test_baselines_are_measured_like_reconstructions(perceptual):
    batches = images(3).split(2)
    found = baseline_sums(iter(batches), perceptual, factor=8)
    assert found == {
        "mean_colour": reconstruction_sums(mean_colour, batches, perceptual),
        "bicubic": reconstruction_sums(lambda batch: bicubic_baseline(batch, 8), batches, perceptual),
    }
