"""What the ladder promises, counted: bytes per pixel, arithmetic, and the large images that fit."""

import argparse
import subprocess
import sys

import pytest

from tests.harness.runs import ROOT
from vae.config.options import RECOMPUTE
from vae.host import GIB
from vae.memory.recompute_table import default_spec, ladder, side


@pytest.fixture(scope="module")
def at_1024():
    return {memory.recompute: memory for memory in ladder(default_spec(1024))}


def test_bytes_per_pixel_of_the_whole_step(at_1024):
    """Working bytes: all but what stays between steps; LPIPS and the gradients of the weights included."""
    found = {name: memory.working / 1024**2 for name, memory in at_1024.items()}
    assert found["none"] <= 12_650
    assert found["activations"] <= 7_150
    assert found["top_level"] <= 5_250
    assert found["encoder"] <= 4_800
    assert found["blocks"] <= 4_800
    assert found["blocks_encoder"] <= 3_350
    assert found["all"] <= 2_250


def test_arithmetic_of_an_image(at_1024):
    """TFLOP of forward and backward at 1024 px, LPIPS of both images included."""
    found = {name: memory.flops / 1e12 for name, memory in at_1024.items()}
    assert found["none"] == found["activations"] <= 44  # 48.5 with upsampling as enlargement + convolution
    assert max(found.values()) == found["all"] <= 65
    assert list(found) == list(RECOMPUTE)


@pytest.mark.slow
@pytest.mark.parametrize(("image_size", "batch"), [(2048, 4), (2560, 2)])
def test_large_images_fit_30_gib_at_two_rungs_or_more(image_size, batch):
    found = [memory for memory in ladder(default_spec(image_size, batch)) if memory.total <= 30 * GIB]
    assert len(found) >= 2


@pytest.mark.slow
def test_the_table_is_one_command():
    found = subprocess.run(
        [sys.executable, "-m", "vae.memory.recompute_table", "64"], cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert [line.split()[0] for line in found.stdout.splitlines()] == ["--recompute", *RECOMPUTE]


@pytest.mark.parametrize("text", ["abc", "1000.5", "0", "-8", "1001"])
def test_a_side_that_the_model_does_not_take_is_named(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"{text}: give a multiple of 8"):
        side(text)
