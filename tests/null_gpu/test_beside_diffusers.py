"""Launches and host time of a step beside diffusers' step, in one process."""

import json
from typing import Any

import pytest

from tests.null_gpu.child import NEEDS_NULL_GPU, run_on_null_gpu

pytestmark = NEEDS_NULL_GPU
pytest.importorskip("diffusers")


def test_launches_of_a_step(record_property: Any):
    """Fewer than diffusers at 1024 px, without a CUDA graph; with one, hardly any.

    The ratios of host times are only recorded: no test depends on the speed of a machine.
    """
    words = ("benchmarks/launches.py", "--what", "step", "--px", "1024", "--steps", "3", "--json")
    costs = json.loads(run_on_null_gpu(*words, gib=128).stdout)
    ours, graph, theirs = costs.values()
    record_property("launches, ratio", ours["launches"] / theirs["launches"])
    for name, cost in (("without", ours), ("with", graph)):
        record_property(f"host time {name} a graph, ratio", cost["host_ms"] / theirs["host_ms"])
    assert ours["launches"] / theirs["launches"] < 0.87  # 0.81
    assert graph["launches"] < 50  # 26, and 43 with torch 2.10
    assert graph["graphs"] == 1
    assert ours["synchronizations"] == graph["synchronizations"] == 0
    assert theirs["synchronizations"] > 0


def test_decoders_and_norms_need_fewer_launches_and_less_memory():
    what = ("decode", "norm", "wan")
    words = ("benchmarks/launches.py", "--what", *what, "--px", "1024", "--steps", "2", "--json")
    lines = run_on_null_gpu(*words, gib=64).stdout.splitlines()
    assert len(lines) == len(what)
    for line in lines:
        ours, *others = json.loads(line).values()
        for other in others:
            assert ours["launches"] < other["launches"]
            assert ours["peak_gib"] < 0.75 * other["peak_gib"]  # 0.69, 0.50 for the norm
