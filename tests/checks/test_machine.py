"""Facts about this machine, folders, mounts and the cache of weights."""

import os

import pytest

from tests.harness.machines import DESKTOP, changed, verdict
from vae.checks.machine import (
    gather_folder,
    gather_host,
    project_python,
    vgg_path,
)
from vae.checks.table import SKIP
from vae.system.host import find_compiler


def test_host_facts_are_consistent():
    host = gather_host()
    assert 1 <= host.cores_usable <= os.cpu_count()
    assert 0 < host.memory_free <= host.memory_total


def test_project_environment_is_found(tmp_path):
    assert project_python(tmp_path) is None
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text("")
    assert project_python(tmp_path) == ".venv/bin/python"


def test_cc_selects_the_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert find_compiler() is None
    for name in ("clang", "my-cc"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert find_compiler() == str(tmp_path / "clang")
    monkeypatch.setenv("CC", "my-cc")
    assert find_compiler() == str(tmp_path / "my-cc")


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="Linux alone has /dev/shm")
def test_file_system_of_a_folder_is_that_of_its_mount(tmp_path, monkeypatch):
    inside = "/dev/shm/no such folder/x"
    assert gather_folder("--output_dir", inside, given=True, writes=True).file_system == "tmpfs"
    monkeypatch.setenv("PATH", str(tmp_path))  # without findmnt
    assert gather_folder("--output_dir", inside, given=True, writes=True).file_system is None


def test_folder_that_will_be_created(tmp_path):
    found = gather_folder("--output_dir", str(tmp_path / "a b'ü" / "c"), given=True, writes=True)
    assert not found.exists
    assert found.nearest == str(tmp_path)
    assert found.free > 0
    assert found.problem is None
    assert list(tmp_path.iterdir()) == []  # the check creates nothing


def test_remote_store_is_no_missing_folder():
    """It is skipped, and its password is not in the report."""
    address = "s3://me:5ecret@bucket/dataset.json"
    found = gather_folder("--data_path", address, given=True, writes=False)
    facts = changed(DESKTOP, folders=(DESKTOP.folders[0], found))
    check = verdict(facts, "disk.images")
    assert (check.status, "s3://bucket/dataset.json" in check.found) == (SKIP, True)
    assert "5ecret" not in str((found, check))


def test_file_instead_of_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "runs"):
        assert "is a file" in gather_folder("--output_dir", str(path), given=True, writes=True).problem


@pytest.mark.parametrize("path", ["x" * 5000, "~nobody-of-this-name/x"])
def test_invalid_paths(path):
    assert gather_folder("--output_dir", path, given=True, writes=True).problem


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="the superuser may read everything")
def test_unreadable_folder(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    assert gather_folder("--data_path", str(closed), given=True, writes=False).problem
    assert gather_folder("--output_dir", str(closed / "runs"), given=True, writes=True).problem
    closed.chmod(0o700)


def test_refused_write_is_a_problem(tmp_path, monkeypatch):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("vae.checks.machine.tempfile.TemporaryFile", refuse)
    assert (
        gather_folder("--output_dir", str(tmp_path), given=True, writes=True).problem == "Permission denied"
    )


def test_weights_are_in_the_folder_of_torch_hub(tmp_path, monkeypatch):
    import torch

    monkeypatch.delenv("TORCH_HOME", raising=False)
    for name in ("XDG_CACHE_HOME", "TORCH_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
        assert str(vgg_path().parent) == os.path.join(torch.hub.get_dir(), "checkpoints")
