"""Python, packages and the build of PyTorch: each fault is found and has the right remedy."""

from dataclasses import replace

import pytest

from tests.harness.machines import (
    ARCHS_126,
    DESKTOP,
    GTX_1080,
    RTX_5090,
    WINDOWS,
    WITHOUT_TORCH,
    changed,
    verdict,
)
from vae.checks.facts import CudaDevice, Requirement, Smi
from vae.checks.judge.all_checks import judge
from vae.checks.results import FAIL, PASS, SKIP, WARN


def test_first_remedy_without_torch_is_the_set_up():
    checks = judge(WITHOUT_TORCH)
    assert checks[0].id == "torch.loads"
    assert (checks[0].status, checks[0].remedy) == (FAIL, "./setup.sh")
    windows = changed(WINDOWS, torch_files=WITHOUT_TORCH.torch_files)
    assert verdict(replace(windows, loaded=None), "torch.loads").remedy == "setup_windows.bat"
    kernels = [check for check in checks if check.group == "kernels"]
    assert {check.status for check in kernels} == {SKIP}


def test_inactive_project_environment_is_pointed_out():
    facts = changed(WITHOUT_TORCH, python={"project_python": ".venv/bin/python"})
    assert ".venv/bin/python check_compatibility.py" in verdict(facts, "torch.loads").found


def test_cpu_torch_with_cuda_torchvision():
    facts = changed(
        DESKTOP,
        torch_files={"version": "2.14.0+cpu", "cuda": None},
        loaded={"vision_error": "RuntimeError: operator torchvision::nms does not exist"},
    )
    pair = verdict(facts, "torch.pair")
    assert pair.status == FAIL
    assert "two different builds" in pair.found
    assert "nms does not exist" in pair.found
    assert pair.remedy.startswith(
        "/home/me/vae/.venv/bin/python -m pip install --force-reinstall torch torchvision"
    )
    assert pair.remedy.endswith("--index-url https://download.pytorch.org/whl/cpu")


def test_torchvision_of_another_version_or_missing():
    older = changed(DESKTOP, torch_files={"vision_version": "0.28.0+cu130", "vision_wants_torch": "==2.13.0"})
    assert "another torch" in verdict(older, "torch.pair").found
    none = changed(DESKTOP, torch_files={"vision_version": None})
    assert verdict(none, "torch.pair").status == FAIL
    # the general index lists both versions without a build
    plain = changed(DESKTOP, torch_files={"version": "2.14.0", "vision_version": "0.29.0"})
    assert verdict(plain, "torch.pair").status == PASS


def test_torch_too_old_or_excluded():
    for version, status in (("2.9.1+cu128", FAIL), ("2.13.0+cpu", FAIL), ("2.13.0+cu130", PASS)):
        assert verdict(changed(DESKTOP, torch_files={"version": version}), "torch.version").status == status


def test_cpu_build_on_a_machine_with_a_card():
    facts = changed(
        DESKTOP, torch_files={"version": "2.14.0+cpu", "cuda": None, "vision_version": "0.29.0+cpu"}
    )
    facts = changed(facts, loaded={"devices": (), "cuda_available": False, "arch_list": ()})
    build = verdict(facts, "torch.build")
    assert (build.status, build.remedy) == (FAIL, "./setup.sh --torch cu130")
    assert "no CUDA" in build.found
    assert verdict(changed(facts, smi=Smi("missing")), "torch.build").status == PASS


def test_wheel_without_code_for_the_card():
    facts = changed(
        DESKTOP,
        torch_files={"version": "2.14.0+cu126", "cuda": "12.6"},
        loaded={"arch_list": ARCHS_126},
    )
    check = verdict(facts, "torch.architectures")
    assert check.status == FAIL
    assert check.expected == "sm_120"
    assert "RTX 5090 (sm_120)" in check.found
    assert check.remedy == "./setup.sh --torch cu130"
    older_driver = changed(facts, smi={"driver": "572.16"})
    assert verdict(older_driver, "torch.architectures").remedy == "./setup.sh --torch cu128"


def test_architecture_is_read_from_nvidia_smi_if_cuda_does_not_start():
    facts = changed(DESKTOP, loaded={"devices": (), "arch_list": ARCHS_126})
    assert verdict(facts, "torch.architectures").status == FAIL


def test_unsupported_second_card_is_a_warning():
    devices = (*DESKTOP.loaded.devices, CudaDevice("NVIDIA GeForce GTX 1080", (6, 1), 8 * 2**30))
    facts = changed(DESKTOP, loaded={"devices": devices}, smi={"cards": (RTX_5090, GTX_1080)})
    check = verdict(facts, "torch.architectures")
    assert (check.status, check.remedy) == (WARN, "export CUDA_VISIBLE_DEVICES=0")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"error": "OSError: libcudart.so.13: cannot open shared object file"}, "libcudart"),
        ({"unfinished": "loading torch", "ended": "killed by signal 4"}, "signal 4"),
        ({"unfinished": "loading torch", "ended": "it exceeded the time limit"}, "time limit"),
    ],
)
def test_torch_that_does_not_load(part, words):
    check = verdict(changed(DESKTOP, loaded={**part, "kernels": ()}), "torch.loads")
    assert check.status == FAIL
    assert words in check.found
    assert "--force-reinstall" in check.remedy


def test_triton_must_match_torch():
    other = changed(DESKTOP, torch_files={"triton_version": "3.7.1"})
    check = verdict(other, "torch.triton")
    assert check.status == WARN  # training works without it
    assert check.remedy == "/home/me/vae/.venv/bin/python -m pip install 'triton~=3.8.0'"
    assert verdict(changed(DESKTOP, torch_files={"triton_version": None}), "torch.triton").status == WARN
    cpu = changed(DESKTOP, torch_files={"cuda": None, "triton_version": None})
    assert verdict(cpu, "torch.triton").status == SKIP


def test_triton_on_windows():
    missing = changed(WINDOWS, torch_files={"triton_version": None})
    remedy = '"C:\\Users\\Jörg B\\vae\\.venv\\Scripts\\python.exe" -m pip install "triton-windows==3.8.*"'
    assert verdict(missing, "torch.triton").remedy == remedy
    too_new = changed(WINDOWS, torch_files={"version": "2.15.0+cu130"})
    check = verdict(too_new, "torch.triton")
    assert (check.status, check.remedy) == (WARN, "setup_windows.bat --torch cu128")
    assert "without torch.compile" in check.found


def test_missing_compiler():
    facts = changed(DESKTOP, host={"c_compiler": None})
    assert verdict(facts, "torch.compiler").remedy == "sudo apt install gcc g++"
    assert verdict(changed(WINDOWS, host={"c_compiler": None}), "torch.compiler").status == SKIP


def test_packages_too_old_or_missing():
    old = Requirement("Pillow", ">=13", "12.1.0")
    check = verdict(changed(DESKTOP, requirements=(*DESKTOP.requirements[:2], old)), "software.pillow")
    assert check.status == FAIL
    assert check.remedy == "/home/me/vae/.venv/bin/python -m pip install 'Pillow>=13'"
    missing = Requirement("simplejpeg", ">=1.8", None)
    facts = changed(DESKTOP, requirements=(*DESKTOP.requirements[:2], missing))
    assert verdict(facts, "software.simplejpeg").status == WARN  # everything works without it


def test_python_too_old_or_32_bit():
    assert verdict(changed(DESKTOP, python={"version": (3, 9, 18)}), "software.python").status == FAIL
    assert verdict(changed(DESKTOP, python={"bits": 32}), "software.python").status == FAIL


def test_file_names_that_are_not_utf8():
    facts = changed(DESKTOP, python={"file_name_encoding": "ascii", "text_encoding": "ANSI_X3.4-1968"})
    check = verdict(facts, "software.encoding")
    assert (check.status, check.remedy) == (WARN, "export PYTHONUTF8=1")
    windows = changed(WINDOWS, python={"text_encoding": "cp1252"})
    assert verdict(windows, "software.encoding").status == PASS
