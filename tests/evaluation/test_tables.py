"""The lines about which VAE is better."""

import pytest

from vae.evaluation.results import PER_IMAGE, Protocol, Results, SizeResult, VaeResult
from vae.evaluation.tables import quality_lines


def compared(**psnrs: list[float]) -> Results:
    """A comparison of VAEs with these PSNR of the same images, and without other measures."""
    vaes = []
    for name, values in psnrs.items():
        none = dict.fromkeys(PER_IMAGE)
        per_image = {str(number): {**none, "psnr": value} for number, value in enumerate(values)}
        metrics = {**none, "psnr": sum(values) / len(values)}
        vaes.append(VaeResult(name, "", "diffusers", [SizeResult(256, metrics, per_image)]))
    facts = dict.fromkeys(("data_path", "crop", "posterior", "dtype", "device"), "")
    protocol = Protocol(**facts, images=3, sizes=(256,), batch_size=1, perceptual_net=None, seed=0)
    return Results(protocol, {}, vaes, {}, {})


@pytest.mark.parametrize("worse", [[29.0, 34.0, 39.0], [29.0, 34.0, 39.5]])
def test_a_constant_gain_is_a_difference_however_different_the_images(worse):
    (line,) = quality_lines(compared(worse=worse, better=[30.0, 35.0, 40.0], worst=[10.0, 11.0, 12.0]))
    assert line.startswith("PSNR dB: better is best, by ")
    assert line.endswith(" before worse, and better on 3 of 3 images")


@pytest.mark.parametrize(
    ("one", "other", "won"),
    [([30.0, 30.0, 33.0], [31.0, 30.5, 29.0], "1 of 3 images"), ([30.0], [20.0], "1 of 1 image")],
)
def test_a_gain_that_may_be_chance_is_none(one, other, won):
    assert quality_lines(compared(one=one, other=other)) == [
        f"PSNR dB: one and other cannot be told apart; the first is better on {won}"
    ]


def test_one_vae_is_not_ranked():
    assert quality_lines(compared(one=[30.0, 31.0])) == []
