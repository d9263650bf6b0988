"""A stage's line of the plan before it, what was measured after it, and both among the records."""

import json
from pathlib import Path

import pytest
import torch

from vae.config.resolve import resolve
from vae.host import GIB
from vae.memory.plan_table import Target, plan_profile
from vae.training import stage_memory
from vae.training.run import train
from vae.training.stage_memory import measured_line


def memory_records(folder: Path) -> list[dict]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "memory"]


def test_each_stage_says_its_plan_and_leaves_a_record(tiny, tmp_path, capsys):
    stages = {"progressive": "16:1:4,32:1:2", "accumulation_steps": 2, "micro_batch_size": "3"}
    assert train({**tiny, **stages}) == 0
    printed = capsys.readouterr().out
    assert "plan    16 px, batch 8 as 3 x 3, recompute none: predicted peak" in printed
    assert "plan    32 px, batch 4 as 2 x 3, recompute none: predicted peak" in printed
    assert printed.count("memory  predicted peak") == 2
    small, large = memory_records(tmp_path / "run")
    assert (small["image_size"], large["image_size"]) == (16, 32)
    assert (small["micro_batch"], small["recompute"]) == (3, "none")
    assert 0 < small["predicted_peak_gib"] < large["predicted_peak_gib"] < 0.1
    assert large["memory_peak_gib"] > 0.1  # the whole process, PyTorch included


def test_a_micro_batch_above_the_memory_begins_with_a_warning(tiny, capsys, monkeypatch):
    monkeypatch.setattr(stage_memory, "available_bytes", lambda device: 1000)
    assert train({**tiny, "num_epochs": 1, "micro_batch_size": "2"}) == 0
    said = capsys.readouterr().out
    assert "WARNING: --micro_batch_size 2 is taken as it is and may run out of memory: auto takes" in said


def test_the_trainers_line_is_that_of_the_table(tiny, tmp_path):
    given = {**tiny, "num_epochs": 1, "use_bf16": True}
    assert train(given) == 0
    (record,) = memory_records(tmp_path / "run")
    here = Target("CPU", None, is_gpu=False, has_bf16=True, available=8 * GIB, explained="")
    plan = plan_profile("mine", resolve(given), here)
    assert record["predicted_peak_gib"] == plan.peak_gib
    assert (record["micro_batch"], record["recompute"]) == (plan.micro_batch, plan.recompute)


def test_memory_that_ran_out_is_told_beside_the_prediction(tiny, tmp_path, monkeypatch, capsys):
    from vae.model.autoencoder import AutoencoderKL

    plain = AutoencoderKL.forward

    def limited(self, images, noise=None):
        if torch.is_grad_enabled() and images.device.type == "cpu" and len(images) > 2:
            raise torch.OutOfMemoryError("injected")
        return plain(self, images, noise)

    monkeypatch.setattr(AutoencoderKL, "forward", limited)
    assert train({**tiny, "num_epochs": 1, "micro_batch_size": "4"}) == 0
    (record,) = memory_records(tmp_path / "run")
    assert record["micro_batch"] == 2
    assert "(before memory ran out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("measured", "says", "says_not"),
    [
        (
            {"memory_peak_gib": 9.0, "memory_reserved_gib": 9.5},
            "predicted peak 10.00 GiB, measured 9.50 GiB reserved on the card (-5.0%)",
            "process",
        ),
        ({"memory_peak_gib": 3.0}, "the process took 3.00 GiB at most", "measured 3"),
        ({}, "measured on cards only", "process"),
    ],
    ids=["card", "cpu", "windows without a card"],
)
def test_only_a_card_measures_the_step(measured, says, says_not):
    line = measured_line({"predicted_peak_gib": 10.0, **measured})
    assert says in line
    assert says_not not in line
