"""The list of loss terms: every weight has a term, and every term keeps what the step relies on."""

from dataclasses import replace

import pytest
import torch

from tests.harness.images import pair
from tests.harness.toy_networks import ALL_TERMS, TERM_WEIGHTS, toy_terms
from vae.losses.terms import LossTerms, Term, build_terms

IMAGE_TERMS = [term.name for term in build_terms(ALL_TERMS, torch.float32, "meta").image]


def image_term(name: str, dtype: torch.dtype = torch.float32) -> Term:
    loss = replace(ALL_TERMS, perceptual_net="dinov2-s") if name == "dinov2-s" else ALL_TERMS
    name = "perceptual" if name == "dinov2-s" else name
    return next(term for term in toy_terms(loss, dtype).image if term.name == name)


def test_every_weight_has_a_term_and_zero_removes_it_unless_it_is_always_recorded():
    terms = build_terms(ALL_TERMS, torch.float32, "meta")
    names = [term.name for term in terms.all]
    assert sorted(names) == sorted(name.removesuffix("_weight") for name in TERM_WEIGHTS)
    none = build_terms(replace(ALL_TERMS, **dict.fromkeys(TERM_WEIGHTS, 0.0)), torch.float32, "meta")
    assert [term.name for term in none.all] == ["reconstruction", "kl"]


def test_the_loss_is_the_weighted_sum():
    terms = LossTerms((Term("a", "A", 2.0, torch.sub),), (Term("b", "B", 0.5, torch.sub),))
    assert terms.weighted_sum({"a": 3.0, "b": 4.0, "unrelated": 9.0}) == 8.0


@pytest.mark.parametrize("name", [*IMAGE_TERMS, "dinov2-s"])
def test_an_image_term_couples_no_images_and_is_zero_for_equal_ones(name):
    recon, images = pair()
    whole = image_term(name).function(recon, images)
    alone = [image_term(name).function(recon[i : i + 1], images[i : i + 1]) for i in range(len(images))]
    torch.testing.assert_close(whole, torch.cat(alone), rtol=1e-5, atol=1e-7)
    assert (whole > 0).all()
    assert image_term(name).function(images, images).abs().max() < 1e-6


@pytest.mark.parametrize("name", IMAGE_TERMS)
def test_an_image_term_does_not_depend_on_the_size_of_the_crop(name):
    recon, images = pair(batch=1, size=256)
    whole = image_term(name).function(recon, images)
    tiles = [t.unfold(2, 64, 64).unfold(3, 64, 64).permute(0, 2, 3, 1, 4, 5) for t in (recon, images)]
    quarters = image_term(name).function(*(t.reshape(-1, 3, 64, 64) for t in tiles)).mean()
    assert float(quarters) == pytest.approx(float(whole), rel=0.1)  # windows over the edges of tiles


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", [*IMAGE_TERMS, "dinov2-s"])
def test_an_image_term_is_fp32_and_its_gradient_finite(name, dtype):
    recon, images = pair()
    flat = torch.zeros_like(images[:1])  # no contrast, and in its half equal to the reconstruction
    recon, images = torch.cat([recon, flat]).to(dtype).requires_grad_(), torch.cat([images, flat])
    values = image_term(name, dtype).function(recon, images)
    assert values.dtype == torch.float32
    (gradient,) = torch.autograd.grad(values.sum() * 2**10, recon)
    assert gradient.dtype == dtype
    assert torch.isfinite(values).all()
    assert torch.isfinite(gradient).all()
    assert gradient[:-1].abs().amax((1, 2, 3)).min() > 0
