"""The index of a build, and the substitute if that index cannot be reached."""

import socket

import pytest

from launchers import torch_index
from launchers.torch_index import read_index, torch_source

NOWHERE = "http://127.0.0.1:9/whl"  # the discard port refuses connections at once


@pytest.fixture(autouse=True)
def _linux(monkeypatch):
    monkeypatch.setattr(torch_index, "WINDOWS", False)


def test_general_index_with_a_version_bound_replaces_an_unreachable_index(monkeypatch):
    monkeypatch.setenv("VAE_TORCH_INDEX", NOWHERE)
    bounds = {
        "cu126": ["torch<2.11"],
        "cu128": ["torch<2.11"],
        "cu130": ["torch<2.14"],
        "cu132": [],
        "cpu": [],
    }
    for build, expected in bounds.items():
        source, name, remark = torch_source(build)
        assert source == expected
        assert name == "the general Python index"
        assert f"{NOWHERE}/{build} cannot be reached" in remark
        assert remark.count("\n") == 0
    assert "CUDA 12.8, not CUDA 12.6" in torch_source("cu126")[2]
    assert torch_source("index") == ([], "the general Python index", None)
    assert torch_source("2.10.0") == (["torch==2.10.0"], "the general Python index", None)


def test_rocm_has_no_substitute(monkeypatch):
    monkeypatch.setenv("VAE_TORCH_INDEX", NOWHERE)
    with pytest.raises(ValueError, match="lists no ROCm build"):
        torch_source("rocm")
    monkeypatch.setattr(torch_index, "WINDOWS", True)
    with pytest.raises(ValueError, match="for Linux only"):
        torch_source("rocm")


def test_silent_index_times_out(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("VAE_TORCH_INDEX", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert read_index("cpu", timeout=0.5) is None
    assert torch_index.TIMEOUT_SECONDS <= 10  # applies to each connection and each answer


def test_newest_version_on_a_page():
    page = "".join(f"<a href='torch-2.10.0%2Brocm{v}-cp312.whl'>" for v in ("6.4", "7.10", "7.2"))
    assert torch_index.newest_rocm(page) == "rocm7.10"
    assert torch_index.newest_rocm("<a href='torch-2.10.0%2Bcu128-cp312.whl'>") is None
    page = "<a href='torch-2.9.1%2Bcu128-cp312.whl'><a href='torch-2.11.0%2Bcu128-cp312.whl'>"
    assert torch_index.newest_torch(page) == "2.11.0"


def test_windows_gets_the_newest_torch_that_has_triton(monkeypatch):
    page = "".join(
        f"<a href='torch-{v}%2Bcu130-cp312-win_amd64.whl'>" for v in ("2.13.0", "2.14.1", "2.15.0")
    )
    monkeypatch.setattr(torch_index, "read_index", lambda *_: page)
    assert torch_source("cu130")[0][-1] == "torch<=2.15.0"
    monkeypatch.setattr(torch_index, "WINDOWS", True)
    assert torch_source("cu130")[0][-1] == "torch<=2.14.1"
    assert torch_source("cpu")[0][-1] == "torch<=2.15.0"  # no kernel needs Triton there
    monkeypatch.setattr(torch_index, "read_index", lambda *_: "<a href='torch-2.15.0%2Bcu132-cp312.whl'>")
    assert torch_source("cu132")[0][-1] == "torch<=2.15.0"  # the set-up reports that Triton is missing
