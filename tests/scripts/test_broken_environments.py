"""check_compatibility.py in broken environments, simulated by stub packages."""

import sys

import pytest

from tests.harness.check_runs import POSIX, checks_of, run_check

TORCH = """
import os, sys, types
from .version import __version__, cuda as _cuda
version = types.SimpleNamespace(cuda=_cuda, hip=None)
class cuda:
    get_arch_list = staticmethod(lambda: {arch_list})
    is_available = staticmethod(lambda: {available})
    device_count = staticmethod(lambda: 1)
    def get_device_properties(index):
        name = "NVIDIA GeForce RTX 5090"
        return types.SimpleNamespace(name=name, major=12, minor=0, total_memory=33690000000)
    def init():
        raise RuntimeError({message!r})
device = str
{more}
"""


@pytest.fixture
def broken(tmp_path, bare):
    """Run the script with stubs of torch, torchvision and nvidia-smi; returns its checks."""

    def write(
        version, cuda, *, arch_list=(), available=False, message="", more="", vision="", driver=None, **words
    ):
        site = tmp_path / "site"
        (site / "torch").mkdir(parents=True)
        (site / "torchvision").mkdir()
        (site / "torch/version.py").write_text(f"__version__ = {version!r}\ncuda = {cuda!r}\n")
        code = TORCH.format(arch_list=list(arch_list), available=available, message=message, more=more)
        (site / "torch/__init__.py").write_text(code)
        (site / "torchvision/version.py").write_text("__version__ = '0.29.0+cu130'\n")
        (site / "torchvision/__init__.py").write_text(vision)
        path = tmp_path / "bin"
        path.mkdir()
        if driver:
            card = f"0, RTX 5090, {driver}, 32607, 12.0"
            answer = driver if "\n" in driver else f"print({card!r})"
            (path / "nvidia-smi").write_text(f"#!{sys.executable} -S\n{answer}\n")
            (path / "nvidia-smi").chmod(0o755)
        found = run_check(bare, "--json", PYTHONPATH=str(site), PATH=str(path), CUDA_VISIBLE_DEVICES=None)
        assert found.returncode == 1
        assert found.stderr == b""
        return checks_of(found.stdout)

    return write


@POSIX
def test_wheel_without_code_for_the_card(broken):
    archs = ("sm_50", "sm_80", "sm_86", "sm_90")
    checks = broken("2.14.0+cu126", "12.6", arch_list=archs, available=True, driver="580.95.05")
    check = checks["torch.build"]
    assert (check["status"], check["remedy"]) == ("fail", "./setup.sh --torch cu130")
    assert "RTX 5090 (sm_120)" in check["found"]
    assert checks["card.usable"]["status"] == "pass"


@POSIX
def test_torch_that_crashes_the_process(broken):
    checks = broken("2.14.0+cu130", "13.0", more="os.abort()")
    assert checks["torch.loads"]["status"] == "fail"
    assert "killed by signal 6" in checks["torch.loads"]["found"]
