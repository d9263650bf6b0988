"""nvidia-smi: answers, and missing, hanging and failing programs."""

import os
import sys
import time
from pathlib import Path

import pytest

from vae.checks.facts import Card
from vae.checks.nvidia_smi import FIELDS, parse, query

ANSWER = "0, NVIDIA GeForce RTX 5090, 580.95.05, 32607, 12.0\n"


def test_parse_cards_after_a_warning():
    second = "1, NVIDIA GeForce RTX 4090 Laptop GPU, 580.95.05, [N/A], [Unknown Error]\n"
    smi = parse(0, f"Warning: infoROM is corrupted at gpu 0\n{ANSWER}{second}", "")
    assert (smi.status, smi.driver) == ("answered", "580.95.05")
    assert smi.cards == (
        Card("NVIDIA GeForce RTX 5090", (12, 0), 32607),
        Card("NVIDIA GeForce RTX 4090 Laptop GPU"),
    )
    assert parse(0, ANSWER.replace("RTX", "RTX, 4000", 1), "").status == "failed"  # too many fields


@pytest.mark.parametrize(
    ("code", "out", "status"),
    [
        (0, "No devices were found\n", "answered"),
        (6, "No devices were found\n", "answered"),
        (0, "", "answered"),
        (18, "Failed to initialize NVML: Driver/library version mismatch\n", "failed"),
        (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", "failed"),
        (255, "Failed to initialize NVML: Unknown Error\n", "failed"),  # a container that lost its card
        (139, "", "failed"),
    ],
)
def test_output_without_cards(code, out, status):
    smi = parse(code, out, "")
    assert (smi.status, smi.cards) == (status, ())
    if out:
        assert out.strip() == smi.message
    elif status == "failed":
        assert "139" in smi.message


# --- the program itself, on PATH ------------------------------------------------------------------------


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Write a Python program as nvidia-smi into the only folder on PATH."""
    folder = tmp_path / "a b'ü"
    folder.mkdir()

    def write(code: str) -> None:
        file = folder / "nvidia-smi"
        file.write_text(f"#!{sys.executable} -S\n{code}\n", encoding="utf-8")
        file.chmod(0o755)

    monkeypatch.setenv("PATH", str(folder))
    return write


def test_missing_program(program):
    assert query(60).status == "missing"


def test_query_requests_every_field(program):
    program(f"import sys\nassert sys.argv[1] == '--query-gpu={','.join(FIELDS)}'\nprint({ANSWER!r})")
    assert query(60).cards[0].memory_mib == 32607


def test_time_limit_with_a_child_that_keeps_the_output_open(program):
    program(
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
        "\ntime.sleep(60)"
    )
    begun = time.monotonic()
    smi = query(0.3)
    assert (smi.status, smi.message) == ("hanging", "no answer in 0.3 s")
    assert time.monotonic() - begun < 30  # far below the minute it would sleep


def test_program_that_cannot_be_executed(program, monkeypatch):
    program("")
    Path(os.environ["PATH"], "nvidia-smi").write_bytes(b"\x7fELF broken")
    smi = query(60)
    assert smi.status == "failed"
    assert "nvidia-smi" in smi.message


def test_output_that_is_not_utf8(program):
    program("import os\nos.write(1, b'Failed to initialize NVML: G\\xe9r\\xe4t\\n')\nos._exit(1)")
    assert query(60).message.startswith("Failed to initialize NVML: G")
