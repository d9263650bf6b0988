"""What a run says of itself before it starts, while it is measured, and at its end."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vae.config.options import Config
from vae.host import GIB
from vae.training.run import train
from vae.training.summary import _device


@pytest.mark.parametrize(
    ("name", "gib", "known"),
    [("NVIDIA GeForce RTX 5090", 31.36, True), ("NVIDIA GeForce RTX 5060 Ti", 7.5, False)],
)
def test_a_card_without_profile_is_said(monkeypatch, name, gib, known):
    facts = SimpleNamespace(name=name, total_memory=int(gib * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    run = SimpleNamespace(
        processes=SimpleNamespace(device=torch.device("cuda", 0), world=1),
        networks=SimpleNamespace(dtype=torch.bfloat16),
        config=Config(),
        compiled=False,
    )
    line = _device(run)
    assert name in line
    assert ("no profile" in line) != known
    assert "bf16" in line


def said_by(given: dict, capsys) -> list[str]:
    capsys.readouterr()
    assert train(given) == 0
    return capsys.readouterr().out.splitlines()


def validations(given: dict) -> list[dict]:
    lines = Path(given["output_dir"], "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "validation"]


@pytest.mark.slow
def test_a_run_cut_short_is_validated_where_it_ends(tiny, capsys):
    """12 images, 4 a step: 5 steps are an epoch and two thirds of another."""
    said = said_by({**tiny, "max_steps": 5}, capsys)
    start, epoch, end = validations(tiny)
    assert [record["step"] for record in (start, epoch, end)] == [0, 3, 5]
    assert any(line.startswith(f"start: VAE PSNR {start['psnr']:.2f} ") for line in said)
    assert "done: 1.6 of 2 epochs, 5 steps, 20 images" in said
    closing = said[said.index("done: 1.6 of 2 epochs, 5 steps, 20 images") :]
    assert any(line.startswith("best, epoch 1") and f"{epoch['psnr']:.2f} dB" in line for line in closing)
    assert any(line.startswith("at step 5") and f"{end['psnr']:.2f} dB" in line for line in closing)
    said = said_by({**tiny, "resume_from": "latest"}, capsys)
    assert "done: 2 epochs, 6 steps, 24 images" in said
    assert not any(line.startswith("start: ") for line in said)
    assert [record["step"] for record in validations(tiny)] == [0, 3, 5, 6]


def test_a_run_without_held_out_images_is_not_validated(tiny, capsys):
    said = said_by({**tiny, "val_split": 0.0, "max_steps": 1}, capsys)
    assert validations(tiny) == []
    assert not any("PSNR" in line for line in said if not line.startswith("step "))


@pytest.mark.slow
def test_a_run_that_gets_worse_than_its_start_says_so_once(tiny, capsys):
    ruinous = {**tiny, "learning_rate": 0.3, "warmup_epochs": 0.0, "num_epochs": 3, "max_steps": 8}
    said = [line for line in said_by(ruinous, capsys) if line.startswith("WARNING: PSNR ")]
    found = validations(tiny)
    worse = next(record for record in found if record["psnr"] < found[0]["psnr"])
    assert len(found) == 4  # all but the first are worse
    (line,) = said
    assert f"PSNR {worse['psnr']:.2f} dB is below the {found[0]['psnr']:.2f} dB" in line
    assert "lower --learning_rate (now 0.3)" in line
    again = said_by({**ruinous, "resume_from": "latest", "max_steps": None}, capsys)
    assert not any(line.startswith("WARNING: PSNR ") for line in again)  # the stage has said it


def test_a_run_that_gets_better_does_not(tiny, capsys):
    said = said_by({**tiny, "init": "default", "learning_rate": 1e-3}, capsys)
    found = validations(tiny)
    assert found[-1]["psnr"] > found[0]["psnr"]
    assert not any("WARNING: PSNR" in line for line in said)
