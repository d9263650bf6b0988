"""Averages of checkpoints: exact weights, exact means, and errors if a score is missing."""

import json
import math

import pytest
import torch

from vae.interop.averaging import average, recorded_score, softmax_weights
from vae.system.errors import UserError


def test_equal_scores_give_equal_weights():
    assert softmax_weights([30.0, 30.0, 30.0], 0.1) == pytest.approx([1 / 3] * 3)


def test_score_one_temperature_below_the_best_has_weight_scaled_by_1_over_e():
    weights = softmax_weights([30.0, 29.9, 20.0], 0.1)
    assert sum(weights) == pytest.approx(1)
    assert weights[1] / weights[0] == pytest.approx(1 / math.e)
    assert weights[2] < 1e-40


def test_large_scores_do_not_overflow():
    assert softmax_weights([1e6, 1e6 - 1], 1e-3) == pytest.approx([1.0, 0.0])


def test_mean_is_accurate_to_fp32_rounding():
    generator = torch.Generator().manual_seed(0)
    parts = [{"w": 1000 + torch.randn(5000, generator=generator), "n": torch.tensor(7)} for _ in range(3)]
    weights = [0.5, 0.3, 0.2]
    found = average(parts, weights)
    expected = sum(weight * part["w"].double() for weight, part in zip(weights, parts, strict=True))
    # half the fp32 spacing below 1024; sums in fp32 would have a larger error
    assert (found["w"].double() - expected).abs().max() <= 2**-14 / 2 + 1e-9
    assert found["n"] == 7


def test_average_of_identical_tensors_is_bitwise_identical():
    part = {"w": torch.randn(1000, generator=torch.Generator().manual_seed(0))}
    assert torch.equal(average([part, part, part], [1 / 3] * 3)["w"], part["w"])


def write_metrics(folder, *records):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_recorded_score_is_of_the_same_step(tmp_path):
    write_metrics(
        tmp_path,
        {"kind": "validation", "step": 4, "psnr": 20.0},
        {"kind": "train", "step": 8, "psnr": 99.0},
        {"kind": "validation", "step": 8, "psnr": 21.5},
        {"kind": "validation", "step": 12, "psnr": 22.0},
    )
    assert recorded_score(tmp_path / "checkpoint_epoch_2.pt", 8) == 21.5


def test_missing_score_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"has no validation at step 8.*give --scores"):
        recorded_score(tmp_path / "checkpoint_epoch_2.pt", 8)
    write_metrics(tmp_path, {"kind": "validation", "step": 4, "psnr": 20.0})
    with pytest.raises(UserError, match="--scores"):
        recorded_score(tmp_path / "checkpoint_epoch_2.pt", 8)
