"""The budget of the way of the images, and the cost of a run."""

import pytest

from tests.harness.training_runs import records
from vae.training.records.budget import budget_parts
from vae.training.records.cost import Cost, cost_text, recorded_cost
from vae.training.run import train

# 200 images of 2 MB in 10 s, 4 decoding processes: half of the shards came from the store meanwhile.
TOTAL = {
    **{"images": 200, "disk_bytes": 450e6, "remote_bytes": 200e6, "hits": 150, "misses": 50},
    **{"load_seconds": 36.0, "decode_seconds": 16.0, "workers": 4, "steps": 20},
}


def test_parts_must_deliver_what_the_steps_take_without_waiting():
    parts = {part.name: part for part in budget_parts(TOTAL, 10.0, 0.5, 3 * 8 * 8, 1e9)}
    assert list(parts) == ["store", "cache", "decoding", "copy", "step"]
    assert parts["step"][2:] == (40.0, 20.0)  # half of the time is waiting
    assert parts["store"][2:] == pytest.approx((40 * 3.0, 20.0))
    assert parts["cache"][2:] == pytest.approx((40 * 3.0, 450 / (20 / 4)))
    assert parts["decoding"][2:] == pytest.approx((40.0, 200 / (16 / 4)))
    assert parts["copy"][2:] == pytest.approx((40 * 192e-6, 1000.0))
    assert parts["step"].line() == "  step      must deliver 40 images/s, delivers 20: it waits for images"
    assert parts["store"].line() == "  store     must deliver 120 MB/s, delivers 20: too slow"
    assert parts["decoding"].line().endswith("must deliver 40 images/s, delivers 50")


def test_files_on_a_disk_have_no_store_and_a_cpu_no_copy():
    in_place = {**TOTAL, "hits": 0, "misses": 0, "remote_bytes": 0}
    parts = budget_parts(in_place, 10.0, 0.0, 192, None)
    assert [part.name for part in parts] == ["disk", "decoding", "step"]
    assert not any("slow" in part.line() or "waits" in part.line() for part in parts)
    cached = budget_parts({**in_place, "hits": 200}, 10.0, 0.0, 192, None)
    assert [part.name for part in cached] == ["cache", "decoding", "step"]


def test_cost_goes_on_where_the_records_end(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    assert Cost(0.0, path).record(5.0) == {}
    path.write_text('{"kind": "train", "cost": 2.5}\n{"kind": "validation"}\n')
    assert recorded_cost(path) == 2.5
    clock = iter([1000.0, 1000.0 + 1800.0])
    monkeypatch.setattr("vae.training.records.cost.time.monotonic", lambda: next(clock))
    assert Cost(36.0, path).record(5.0) == {"cost": 2.5 + 18.0, "cost_per_1000_images": 2.0}
    assert cost_text(20.5, 10_000) == ", cost 20.50, 2.05 per 1,000 images"
    assert cost_text(0.0, 10_000) == ""


@pytest.mark.slow
def test_a_run_prints_its_budget_and_its_cost(tiny, tmp_path, capsys):
    assert train({**tiny, "num_epochs": 1, "log_freq": 1, "hourly_cost": 3600.0}) == 0
    costs = [record["cost"] for record in records(tmp_path / "run", "train")]
    assert costs == sorted(costs)
    assert costs[0] > 0
    printed = capsys.readouterr().out
    assert printed.count("budget  of 1 process, so that no step waits:\n  disk      must deliver") == 1
    assert f", cost {costs[-1]:.2f}, " in printed
