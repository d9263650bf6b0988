"""Cores and memory, with the limits of a container from its cgroup files."""

import os

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


def test_container_quota(tmp_path):
    assert container_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert container_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert container_quota(tmp_path) is None


def test_container_memory(tmp_path):
    assert container_memory(tmp_path) is None
    for text, limit in (("8589934592\n", 8 * 2**30), ("max\n", None)):
        (tmp_path / "memory.max").write_text(text)
        assert container_memory(tmp_path) == limit


def test_free_memory_is_what_the_container_has_left(tmp_path, monkeypatch):
    monkeypatch.setattr("vae.system.host.main_memory", lambda: (64 * 2**30, 40 * 2**30))
    assert free_memory(tmp_path) == 40 * 2**30
    (tmp_path / "memory.max").write_text("8589934592\n")
    assert free_memory(tmp_path) == 8 * 2**30
    (tmp_path / "memory.current").write_text(f"{6 * 2**30}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {2**30}\nfile 7\n")
    assert free_memory(tmp_path) == 3 * 2**30


def test_main_memory():
    total, free = main_memory()
    assert 2**28 < free <= total < 2**50


def test_decoding_processes_leave_two_cores():
    found = [decoding_processes(cores, windows=False) for cores in (1, 2, 3, 8, 14, 64)]
    assert found == [1, 1, 1, 6, 12, 12]
    assert decoding_processes(64, windows=True) == 4
