"""Averages of checkpoints: exact shares, exact means, and errors where there is none."""

import json
import math

import pytest
import torch

from vae.config.errors import UserError
from vae.interop.averaging import average, recorded_score, softmax_shares


def test_equal_scores_have_equal_shares():
    assert softmax_shares([30.0, 30.0, 30.0], 0.1) == pytest.approx([1 / 3] * 3)


def test_a_temperature_below_the_best_is_one_e_th():
    shares = softmax_shares([30.0, 29.9, 20.0], 0.1)
    assert sum(shares) == pytest.approx(1)
    assert shares[1] / shares[0] == pytest.approx(1 / math.e)
    assert shares[2] < 1e-40


def test_huge_scores_do_not_overflow():
    assert softmax_shares([1e6, 1e6 - 1], 1e-3) == pytest.approx([1.0, 0.0])


def test_the_mean_is_that_of_fp64():
    generator = torch.Generator().manual_seed(0)
    parts = [{"w": 1000 + torch.randn(5000, generator=generator), "n": torch.tensor(7)} for _ in range(3)]
    shares = [0.5, 0.3, 0.2]
    found = average(parts, shares)
    expected = sum(share * part["w"].double() for share, part in zip(shares, parts, strict=True))
    # half a step of fp32 below 1024; sums in fp32 would be off by more
    assert (found["w"].double() - expected).abs().max() <= 2**-14 / 2 + 1e-9
    assert found["n"] == 7


def test_equal_weights_average_to_themselves_bitwise():
    part = {"w": torch.randn(1000, generator=torch.Generator().manual_seed(0))}
    assert torch.equal(average([part, part, part], [1 / 3] * 3)["w"], part["w"])


def write_metrics(folder, *records):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_the_score_is_that_of_the_checkpoint_itself(tmp_path):
    write_metrics(
        tmp_path,
        {"kind": "validation", "step": 4, "psnr": 20.0},
        {"kind": "train", "step": 8, "psnr": 99.0},
        {"kind": "validation", "step": 8, "psnr": 21.5},
        {"kind": "validation", "step": 12, "psnr": 22.0},
    )
    assert recorded_score(tmp_path / "checkpoint_epoch_2.pt", 8) == 21.5


def test_a_missing_score_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"has no validation at step 8.*give --scores"):
        recorded_score(tmp_path / "checkpoint_epoch_2.pt", 8)
    write_metrics(tmp_path, {"kind": "validation", "step": 4, "psnr": 20.0})
    with pytest.raises(UserError, match="--scores"):
        recorded_score(tmp_path / "checkpoint_epoch_2.pt", 8)
