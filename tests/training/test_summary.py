"""The lines that a run prints about its device, its validations and its result."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.harness.training_runs import records
from vae.config.options import SpeedConfig
from vae.system.host import GIB
from vae.training.distributed import Distributed
from vae.training.records.summary import device_line
from vae.training.run import train


@pytest.mark.parametrize(
    ("name", "gib", "known"),
    [("NVIDIA GeForce RTX 5090", 31.36, True), ("NVIDIA GeForce RTX 5060 Ti", 7.5, False)],
)
def test_device_line_reports_gpus_without_a_profile(monkeypatch, name, gib, known):
    # There is no such GPU here: only the answer of its driver is replaced.
    properties = SimpleNamespace(name=name, total_memory=int(gib * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    dist = Distributed(0, 2, torch.device("cuda", 0))
    line = device_line(dist, SpeedConfig(channels_last=True), torch.bfloat16, compiled=True)
    assert name in line
    assert ("no profile" in line) != known
    for words in ("2 processes", "bf16", "channels_last", "compiled"):
        assert words in line


def printed_lines(given: dict, capsys) -> list[str]:
    capsys.readouterr()
    assert train(given) == 0
    return capsys.readouterr().out.splitlines()


def validations(given: dict) -> list[dict]:
    return records(Path(given["output_dir"]), "validation")


@pytest.mark.slow
def test_run_that_max_steps_ends_is_validated_at_its_last_step(tiny, capsys):
    """12 images, 4 per step: 5 steps are an epoch and two thirds of another."""
    lines = printed_lines({**tiny, "max_steps": 5}, capsys)
    start, epoch, end = validations(tiny)
    assert [record["step"] for record in (start, epoch, end)] == [0, 3, 5]
    assert any(line.startswith(f"start: VAE PSNR {start['psnr']:.2f} ") for line in lines)
    result = lines[lines.index("done: 1.6 of 2 epochs, 5 steps, 20 images") :]
    assert any(line.startswith("epoch 1 (best)") and f"{epoch['psnr']:.2f} dB" in line for line in result)
    assert any(line.startswith("step 5 ") and f"{end['psnr']:.2f} dB" in line for line in result)
    lines = printed_lines({**tiny, "resume_from": "latest"}, capsys)
    assert "done: 2 epochs, 6 steps, 24 images" in lines
    assert not any(line.startswith("start: ") for line in lines)
    assert [record["step"] for record in validations(tiny)] == [0, 3, 5, 6]


def test_run_without_validation_images_is_not_validated(tiny, capsys):
    lines = printed_lines({**tiny, "val_split": 0.0, "max_steps": 1}, capsys)
    assert validations(tiny) == []
    assert not any("PSNR" in line for line in lines if not line.startswith("step "))
