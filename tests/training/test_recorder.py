"""Numbers of steps become records: sums over processes, the slowest rank, and a profile."""

import json
import math
import time
from pathlib import Path

import pytest
import torch

from tests.harness.training_runs import ONE_PROCESS, records, train_on_two_processes, train_short
from vae.config.options import LossConfig
from vae.losses.terms import LossTerms, Term, build_terms
from vae.system.host import MIB
from vae.training.recorder import COUNTS, RunningMetrics, comparison, data_record, loss_record
from vae.training.run import train
from vae.training.stability import Stability


def counts(**values: float) -> dict[str, float]:
    """What a process has counted in 10 s."""
    return {**dict.fromkeys(COUNTS, 0.0), "seconds": 10.0, **values}


def test_counts_of_all_processes_and_workers_are_added():
    one = counts(images=6, load_seconds=0.8, decode_seconds=0.4, disk_bytes=2 * MIB, hits=1, misses=1)
    assert data_record([one, counts(images=2, remote_bytes=5 * MIB, hits=2)]) == {
        "decode_ms": pytest.approx(1000 * 0.4 / 8),
        "load_ms": pytest.approx(1000 * 0.8 / 8),
        "disk_mib_per_second": 0.2,
        "bad_share": 0.0,
        "remote_mib_per_second": 0.5,
        "cache_hit_rate": 0.75,
    }
    assert "cache_hit_rate" not in data_record([counts(images=4, disk_bytes=100)])


def test_the_slowest_rank_waits_least_for_the_others():
    """Steps of 2 s: two ranks compute for 1 s, the third one for 1.9 s."""
    fast = counts(steps=5, images=5, sync_seconds=3.0, allreduce_seconds=2.0)
    assert comparison([fast]) == {}
    found = comparison([fast, fast, counts(steps=5, images=5, sync_seconds=0.5)])
    assert found.pop("images_per_second_by_rank") == [1.0, 1.0, 0.526]
    assert found == {
        "skew_share": pytest.approx((0.5 + 0.5 + 0.05) / 3 - 0.05),
        "slowest_rank": 2,
        "slowest_to_median": pytest.approx(1.9),
        "network_share": pytest.approx(0.05),  # not the 0.4 s that the two wait for the third one
    }


def test_steps_without_a_usable_image_have_no_loss():
    """Not 0, by which later records would be judged."""
    metrics = RunningMetrics()
    metrics.add({"mse": torch.zeros(())}, 0, [])
    means = metrics.all_reduced_means(ONE_PROCESS)
    assert math.isnan(means["mse"])
    assert not Stability().add_record(10, means["mse"], means["mse"])
    assert metrics.speed()["images_per_second"] == 0


def test_the_psnr_of_a_record_is_that_of_values_from_minus_one_to_one():
    terms = LossTerms((Term("kl", "KL", 0.5, torch.sub),))
    assert loss_record({"mse": 0.04, "kl": 2.0}, terms) == {"loss": 1.0, "kl": 2.0, "psnr": pytest.approx(20)}
    for mse in (0.0, math.inf, math.nan):
        assert math.isnan(loss_record({"mse": mse, "kl": 2.0}, terms)["psnr"])


def test_the_squared_error_is_recorded_if_it_is_a_term():
    terms = build_terms(LossConfig(mse_weight=0.5, perceptual_weight=0.0), torch.float32, "meta")
    means = {"mse": 0.04, "reconstruction": 0.1, "kl": 0.0}
    found = loss_record(means, terms)
    assert found == {**means, "loss": pytest.approx(0.1 + 0.5 * 0.04), "psnr": pytest.approx(20)}
    assert terms.image_text == "1 l1 + 0.5 mse"


@pytest.mark.slow
def test_a_run_counts_what_it_reads(tiny, tmp_path, monkeypatch):
    """12 files, each read once in an epoch of 3 steps; a record at its end."""
    once = {**tiny, "num_epochs": 1, "init": "default"}
    monkeypatch.setattr(RunningMetrics, "seconds", lambda _self: 2.0)
    assert train(once) == 0
    (data,) = records(tmp_path / "run", "data")
    (trainer,) = records(tmp_path / "run", "trainer")
    sizes = sorted(path.stat().st_size for path in Path(tiny["data_path"]).rglob("*.png"))
    assert sum(sizes[:12]) <= round(data["disk_mib_per_second"] * MIB * 2.0) <= sum(sizes[-12:])
    assert 0 < data["decode_ms"] <= data["load_ms"]
    assert trainer == {"kind": "trainer", "step": 3, "restarts": 0, "out_of_memory": 0}
    assert train({**once, "resume_from": "latest", "new_stage": True}) == 0
    assert records(tmp_path / "run", "trainer")[-1]["restarts"] == 1


SLOW_RANK = """
    import os, time, torch
    from vae.model.autoencoder import AutoencoderKL
    forward = AutoencoderKL.forward
    def slow(self, images, noise=None):
        if os.environ["RANK"] == "1" and torch.is_grad_enabled() and images.device.type == "cpu":
            time.sleep(0.5)  # far above what other programs on this machine cost
        return forward(self, images, noise)
    AutoencoderKL.forward = slow
"""


@pytest.mark.slow
def test_slow_rank_is_named(tiny, tmp_path):
    given = {**tiny, "init": "default", "val_split": 0.0, "log_freq": 2, "batch_size": 2, "num_epochs": 1}
    train_on_two_processes(given, SLOW_RANK)
    found = records(tmp_path / "run", "trainer")[1:]  # the first steps also start the processes
    assert [record["slowest_rank"] for record in found] == [1] * len(found)
    assert all(record["slowest_to_median"] > 1.2 for record in found)  # 2 is the most for two processes
    assert all(record["skew_share"] > record["network_share"] for record in found)
    assert all(record["skew_share"] + record["network_share"] > 0.1 for record in found)


def test_validations_are_no_time_of_training_also_at_the_end_of_an_epoch(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    metrics = RunningMetrics(started=0.0, counted_until=0.0)
    # validations and saves, the wait for a batch, the step; no step follows the last wait of an epoch
    for pause, wait, step in ((0, 1, 2), (10, 0, None), (5, 1, 2), (3, 1, 2)):
        now[0] += pause + wait
        metrics.add_wait(wait)
        if step:
            now[0] += step
            metrics.add({}, 4, [])
    assert metrics.speed() == {"images_per_second": 12 / 9, "data_wait_share": 3 / 9}


# ---- Profile ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_profile_contains_a_trace_and_a_table(tiny, tmp_path):
    train_short(tiny, tmp_path / "run", batch_size=2, profile_steps=2)
    folder = tmp_path / "run" / "profile" / "32px"
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert "convolution" in (folder / "table.txt").read_text()
