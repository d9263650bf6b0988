"""Which build suits a machine: real answers of nvidia-smi in, a build and its reason out."""

import os
from pathlib import Path

import pytest

from launchers import torch_builds
from launchers.torch_builds import BUILDS, ENDED, Machine, build_for, ended, misfit, nearest, parse_answer
from vae.checks.cuda_facts import suggested_build

ROOT = Path(__file__).resolve().parents[2]
BLACKWELL, HOPPER, ADA, VOLTA, PASCAL, KEPLER = (12, 0), (9, 0), (8, 9), (7, 0), (6, 1), (3, 7)


def machine(driver: int, *capabilities) -> Machine:
    return Machine(driver, tuple((f"card {capability}", capability) for capability in capabilities))


@pytest.mark.parametrize(
    ("driver", "capability", "build"),
    [
        (595, BLACKWELL, "cu130"),
        (580, BLACKWELL, "cu130"),
        (579, BLACKWELL, "cu128"),
        (570, BLACKWELL, "cu128"),
        (570, HOPPER, "cu128"),
        (560, ADA, "cu126"),
        (525, ADA, "cu126"),
        (580, VOLTA, "cu126"),  # 12.8 and newer end at compute capability 7.5
        (580, PASCAL, "cu126"),
        (580, KEPLER, "cpu"),
        (470, ADA, "cpu"),
        (580, None, "cu130"),  # an nvidia-smi that does not tell
    ],
)
def test_auto_takes_the_newest_build_that_driver_and_card_bear(driver, capability, build):
    found, reason = build_for(machine(driver, capability), "linux")
    assert found == build
    assert str(driver) in reason or "compute capability 3.7" in reason


@pytest.mark.parametrize("driver", [470, 525, 569, 570, 580, 610])
@pytest.mark.parametrize("capability", [BLACKWELL, HOPPER, ADA, VOLTA, PASCAL, None])
def test_the_check_suggests_what_auto_takes(driver, capability):
    suggested = suggested_build(driver, capability)
    if suggested is not None:  # it is where the driver must be renewed first
        assert build_for(machine(driver, capability), "linux")[0] == suggested


def test_auto_without_an_nvidia_driver():
    assert build_for(None, "linux")[0] == "cpu"
    assert build_for(None, "win32")[0] == "cpu"
    assert build_for(None, "darwin")[0] == "index"


def test_auto_says_what_a_driver_or_a_second_card_costs():
    build, reason = build_for(machine(560, BLACKWELL), "linux")
    assert build == "cu128"  # ready for the driver that must come
    assert "update to 580" in reason
    build, reason = build_for(machine(580, PASCAL, BLACKWELL), "linux")
    assert build == "cu130"
    assert "no code for card (6, 1)" in reason


def test_windows_takes_the_build_for_which_there_is_triton():
    assert build_for(machine(580, BLACKWELL), "win32")[0] == "cu128"
    assert build_for(machine(580, PASCAL), "win32")[0] == "cu126"


def test_every_build_of_auto_exists_and_serves_the_rtx_5090_where_it_says_so():
    assert {*torch_builds.AUTO_ORDER, *torch_builds.AUTO_ORDER_WINDOWS} <= set(BUILDS)
    assert [b for b in BUILDS if torch_builds.has_code_for(b, BLACKWELL)] == ["cu132", "cu130", "cu128"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "575.51.03, 12.0, NVIDIA GeForce RTX 5090\n",
            Machine(575, (("NVIDIA GeForce RTX 5090", BLACKWELL),)),
        ),
        (
            "580.65.06, 8.9, NVIDIA GeForce RTX 4090\n580.65.06, [N/A], NVIDIA, odd name\n",
            Machine(580, (("NVIDIA GeForce RTX 4090", ADA), ("NVIDIA, odd name", None))),
        ),
        ("470.82.01\n", Machine(470)),
        ("No devices were found\n", None),
        ("", None),
    ],
)
def test_answers_of_nvidia_smi_are_read(text, expected):
    assert parse_answer(text) == expected


@pytest.fixture
def nvidia_smi(monkeypatch, tmp_path):
    """Puts an nvidia-smi first on PATH that runs these lines of shell."""
    if os.name == "nt":
        pytest.skip("a shell script stands in")

    def put(lines: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{lines}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return put


def test_an_old_nvidia_smi_that_does_not_know_the_field_still_names_the_driver(nvidia_smi):
    nvidia_smi(
        'case "$*" in *compute_cap*) echo \'Field "compute_cap" is not a valid field to query.\'; exit 2;; '
        "esac; echo 470.82.01"
    )
    assert torch_builds.read_machine() == Machine(470)


def test_nvidia_smi_that_fails_hangs_or_is_no_program(nvidia_smi, monkeypatch):
    nvidia_smi("echo NVIDIA-SMI has failed because it could not communicate with the driver; exit 9")
    assert torch_builds.read_machine() is None
    monkeypatch.setattr(torch_builds, "NVIDIA_SMI_TIMEOUT_SECONDS", 0.5)
    nvidia_smi("exec sleep 20")
    with pytest.raises(TimeoutError, match=r"no answer in 0\.5 s"):
        torch_builds.read_machine()
    monkeypatch.setenv("PATH", "/nowhere")
    assert torch_builds.read_machine() is None


def test_builds_that_ended_are_older_than_what_is_supported_and_name_the_nearest():
    supported = next(
        line.split(">=")[1].split(",")[0]
        for line in (ROOT / "requirements-torch.txt").read_text().splitlines()
        if line.startswith("torch>=")
    )
    for build, (name, last) in ENDED.items():
        assert [int(n) for n in last.split(".")] < [int(n) for n in supported.split(".")]
        assert name in ended(build, None)
        assert "--torch cu126" in ended(build, None)
    assert nearest(machine(580, BLACKWELL)) == "cu128"
    assert nearest(machine(580, PASCAL)) == "cu126"


def test_a_build_that_cannot_work_here_is_said():
    assert "no code for card (12, 0)" in misfit("cu126", machine(580, BLACKWELL))
    assert "driver 580 or newer" in misfit("cu130", machine(570, BLACKWELL))
    assert misfit("cu128", machine(570, BLACKWELL)) is None
    assert misfit("cu130", None) is None  # an environment may be made for another machine
    assert misfit("cpu", machine(470, KEPLER)) is None
