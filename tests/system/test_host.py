"""Cores and memory, with the limits of a container from its cgroup files."""

import os

import pytest

from vae.system.host import (
    container_memory,
    container_quota,
    decoding_processes,
    free_memory,
    main_memory,
    usable_cores,
)


def test_usable_cores_respect_affinity_and_quota(tmp_path):
    assert 1 <= usable_cores() <= os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert usable_cores(tmp_path) == 1  # half a core rounds up to one


def test_container_quota_of_cgroup_v2(tmp_path):
    assert container_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert container_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert container_quota(tmp_path) is None


def test_container_quota_of_cgroup_v1(tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("250000\n")
    assert container_quota(tmp_path) == 2.5
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    assert container_quota(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("memory.max", "8589934592\n", 8 * 2**30),
        ("memory.max", "max\n", None),
        ("memory/memory.limit_in_bytes", "4294967296\n", 4 * 2**30),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", None),  # means "no limit"
    ],
)
def test_container_memory(tmp_path, name, text, limit):
    assert container_memory(tmp_path) is None
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert container_memory(tmp_path) == limit


def test_free_memory_is_at_most_the_limit_of_the_container(tmp_path, monkeypatch):
    monkeypatch.setattr("vae.system.host.main_memory", lambda: (64 * 2**30, 40 * 2**30))
    assert free_memory(tmp_path) == 40 * 2**30
    (tmp_path / "memory.max").write_text("8589934592\n")
    assert free_memory(tmp_path) == 8 * 2**30


@pytest.mark.parametrize(
    ("folder", "limit", "usage", "cached"),
    [
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_free_memory_is_less_by_what_the_container_uses(tmp_path, monkeypatch, folder, limit, usage, cached):
    monkeypatch.setattr("vae.system.host.main_memory", lambda: (64 * 2**30, 40 * 2**30))
    (tmp_path / folder).mkdir(exist_ok=True)
    texts = {limit: 8 * 2**30, usage: 6 * 2**30, "memory.stat": f"anon 1\n{cached} {2**30}\nfile 7"}
    for name, text in texts.items():
        (tmp_path / folder / name).write_text(f"{text}\n")
    assert free_memory(tmp_path) == 3 * 2**30


def test_main_memory():
    total, free = main_memory()
    assert 2**28 < free <= total < 2**50


def test_decoding_processes_leave_two_cores():
    found = [decoding_processes(cores, windows=False) for cores in (1, 2, 3, 8, 14, 64)]
    assert found == [1, 1, 1, 6, 12, 12]
    assert decoding_processes(64, windows=True) == 4
