"""Launches, memory and host time beside diffusers and PyTorch, in one process."""

import json
from typing import Any

import pytest

from tests.null_gpu.child import NEEDS_NULL_GPU, run_on_null_gpu

pytestmark = NEEDS_NULL_GPU
pytest.importorskip("diffusers")


def test_fewer_launches_and_less_memory_than_diffusers(record_property: Any):
    """Of steps, decoders and norms.


    The ratios of host times are only recorded: no test depends on the speed of a machine.
    """
    what = ("step", "decode", "norm", "wan")
    words = ("benchmarks/launches.py", "--what", *what, "--px", "1024", "--steps", "3", "--json")
    step, *others = map(json.loads, run_on_null_gpu(*words, gib=128).stdout.splitlines())
    ours, graph, theirs = step.values()
    for name, cost in (("without", ours), ("with", graph)):
        record_property(f"host time {name} a graph, ratio", cost["host_ms"] / theirs["host_ms"])
    assert ours["launches"] / theirs["launches"] < 0.87  # 0.81
    assert graph["launches"] < 50  # 26, and 43 with torch 2.10
    assert graph["graphs"] == 1
    assert ours["synchronizations"] == graph["synchronizations"] == 0
    assert theirs["synchronizations"] > 0
    assert len(others) == len(what) - 1
    for costs in others:
        ours, *theirs = costs.values()
        for other in theirs:
            assert ours["launches"] < other["launches"]
            assert ours["peak_gib"] < 0.75 * other["peak_gib"]  # 0.69, 0.50 for the norm
