"""Counted figures of the recompute levels: bytes per pixel, arithmetic, and large images that fit."""

from dataclasses import replace

import pytest

import train_vae
from tests.harness.default_step import default_spec
from tests.harness.runs import TINY
from vae.config.options import RECOMPUTE
from vae.memory.plan import StepMemory, StepSpec, step_memory
from vae.system.host import GIB


def memory_by_level(spec: StepSpec) -> list[StepMemory]:
    """The step at every recompute level, with one image per pass, from the fastest level to the smallest."""
    return [step_memory(replace(spec, recompute=level), 1) for level in RECOMPUTE]


@pytest.fixture(scope="module")
def at_1024():
    return {memory.recompute: memory for memory in memory_by_level(default_spec(1024))}


@pytest.mark.slow
def test_bytes_per_pixel_of_the_whole_step(at_1024):
    """Working bytes: without what stays between steps; with LPIPS and the gradients of the weights."""
    found = {name: memory.working / 1024**2 for name, memory in at_1024.items()}
    assert found["none"] <= 12_200
    assert found["activations"] <= 7_150
    # A block is one operation: the tensor between its convolutions lives until its backward ends. As two
    # operations, the peak at this level was 5,199; `all` was 2,217.
    assert found["top_level"] <= 5_250
    assert found["blocks"] <= 4_800
    assert found["blocks_encoder"] <= 3_350
    assert found["all"] <= 2_000


def test_flops_of_an_image(at_1024):
    """TFLOP of forward and backward at 1024 px, LPIPS of both images included."""
    found = {name: memory.flops / 1e12 for name, memory in at_1024.items()}
    assert found["none"] == found["activations"] <= 44  # 48.5 if upsampling and convolution are separate
    assert max(found.values()) == found["all"] <= 65
    assert list(found) == list(RECOMPUTE)


@pytest.mark.slow
@pytest.mark.parametrize(("image_size", "batch"), [(2048, 4), (2560, 2)])
def test_large_images_fit_30_gib_at_two_or_more_levels(image_size, batch):
    levels = memory_by_level(default_spec(image_size, batch))
    assert sum(memory.total <= 30 * GIB for memory in levels) >= 2


def test_plan_of_a_command_prints_every_level_and_trains_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = [word for name in ("channels", "layers_per_block", "norm_groups", "z_channels")
             for word in (f"--{name}", *str(TINY[name]).strip("[]").replace(",", "").split())]  # fmt: skip
    flags += ["--perceptual_weight", "0", "--progressive", "32:1:8,64:1:4", "--use_bf16"]
    assert train_vae.main(["--plan", "--gpu", "RTX 5090", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if " px" not in line and line[:4] in ("1   ", "2   ", "  or")]
    assert [row[:3] for row in rows if row[0] != "or"] == [["1", "32", "8"], ["2", "64", "4"]]
    assert [row[6] for row in rows] == [*RECOMPUTE, *RECOMPUTE]
    assert list(tmp_path.iterdir()) == []
