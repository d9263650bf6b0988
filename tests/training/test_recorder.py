"""Numbers of steps become records: sums over processes, the slowest rank, and a profile."""

import json
import time
from pathlib import Path

import pytest
import torch

from tests.harness.training_runs import ONE_PROCESS, records, train_on_two_processes, train_short
from vae.data.dataset import Batch
from vae.system.host import MIB
from vae.training.recorder import Health, ProcessNumbers, RunningMetrics, comparison, data_record
from vae.training.run import train

NOTHING = torch.zeros(0)


def batch(images: int, **counts: float) -> Batch:
    return Batch(torch.zeros(images, 3, 1, 1), NOTHING, NOTHING, counts=counts)


def numbers(*processes: Health, allreduces: tuple[float, ...]) -> list[ProcessNumbers]:
    """As several processes would gather after 10 s."""
    pairs = zip(processes, allreduces, strict=True)
    return [process.gathered(ONE_PROCESS, 10.0, allreduce)[0] for process, allreduce in pairs]


def test_counts_of_all_processes_and_workers_are_added():
    one, other = Health(), Health()
    one.add(batch(3, load_seconds=0.4, decode_seconds=0.2, disk_bytes=MIB), 0.0)
    one.add(batch(1, load_seconds=0.4, decode_seconds=0.2, disk_bytes=MIB), 0.0)
    one.add(batch(2, disk_bytes=0, hits=1, misses=1), 0.0)
    other.add(batch(2, remote_bytes=5 * MIB, hits=2), 0.0)
    assert data_record(numbers(one, other, allreduces=(0.0, 0.0)), 10.0) == {
        "decode_ms": pytest.approx(1000 * 0.4 / 8),
        "load_ms": pytest.approx(1000 * 0.8 / 8),
        "disk_mib_per_second": 0.2,
        "bad_share": 0.0,
        "remote_mib_per_second": 0.5,
        "cache_hit_rate": 0.75,
    }


def test_files_have_no_cache_and_no_shards():
    health = Health()
    health.add(batch(4, disk_bytes=100), 0.0)
    found = numbers(health, allreduces=(0.0,))
    assert data_record(found, 10.0).keys() == {"decode_ms", "load_ms", "disk_mib_per_second", "bad_share"}
    assert comparison(found) == {}


def test_the_slowest_rank_waits_least_for_the_others():
    """Steps of 2 s: two ranks compute for 1 s, the third one for 1.9 s."""
    processes = []
    for sync_seconds in (0.6, 0.6, 0.1):
        processes.append(Health())
        for _ in range(5):
            processes[-1].add(batch(1), sync_seconds)
    found = comparison(numbers(*processes, allreduces=(0.4, 0.4, 0.0)))
    assert found.pop("images_per_second_by_rank") == [1.0, 1.0, 0.526]
    assert found == {
        "skew_share": pytest.approx((0.5 + 0.5 + 0.05) / 3 - 0.05),
        "slowest_rank": 2,
        "slowest_to_median": pytest.approx(1.9),
        "network_share": pytest.approx(0.05),  # not the 0.4 s that the two wait for the third one
    }


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


def test_profile_longer_than_the_run_is_no_error(tiny, tmp_path):
    train_short(tiny, tmp_path / "run", profile_steps=50, max_steps=2)
