"""nvidia-smi: complete, old, missing, hanging and failing programs, and values that it does not report."""

import os
import sys
import time
from pathlib import Path

import pytest

from vae.checks.nvidia_smi import FIELDS, parse, query

NAMES = list(FIELDS)
ANSWER = (
    "0, NVIDIA GeForce RTX 5090, 580.95.05, 32607, 520, 12.0, 1, 5, 16, 16, 31.24, 575.00, 575.00, 38, "
    "0x0000000000000001\n"
)
LAPTOP = (
    "0, NVIDIA GeForce RTX 4090 Laptop GPU, 580.95.05, 16376, 15, 8.9, 4, 4, 8, 16, 4.50, [N/A], "
    "[Not Supported], 41, [Unknown Error]\n"
)


def test_parse_a_card():
    smi = parse(NAMES, 0, ANSWER, "")
    assert (smi.status, smi.driver) == ("answered", "580.95.05")
    (card,) = smi.cards
    assert card.name == "NVIDIA GeForce RTX 5090"
    assert card.capability == (12, 0)
    assert (card.memory_total_mib, card.memory_used_mib) == (32607, 520)
    assert (card.pcie_generation, card.pcie_generation_max) == (1, 5)
    assert (card.pcie_width, card.pcie_width_max) == (16, 16)
    assert (card.power_draw_w, card.power_limit_w, card.power_default_w) == (31.24, 575.0, 575.0)
    assert (card.temperature_c, card.clock_reasons) == (38, 1)


def test_unreported_values_are_none():
    (card,) = parse(NAMES, 0, LAPTOP, "").cards
    assert card.power_draw_w == 4.5
    assert (card.power_limit_w, card.power_default_w, card.clock_reasons) == (None, None, None)


def test_several_cards_after_a_warning():
    second = ANSWER.replace("0, NVIDIA GeForce RTX 5090", "1, NVIDIA RTX 4000 Ada, Generation", 1)
    smi = parse(
        NAMES, 0, f"Warning: infoROM is corrupted at gpu 0\n{ANSWER}{ANSWER.replace('0,', '1,', 1)}", ""
    )
    assert [card.index for card in smi.cards] == [0, 1]
    assert parse(NAMES, 0, second, "").status == "failed"  # a line with too many fields is not a card


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
    smi = parse(NAMES, code, out, "")
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
    program(
        f"import sys\nassert sys.argv[1] == {'--query-gpu=' + ','.join(FIELDS.values())!r}\nprint({ANSWER!r})"
    )
    smi = query(60)
    assert smi.cards[0].memory_total_mib == 32607


def test_old_driver_is_queried_for_its_own_fields(program):
    """Drivers before R535 have no clocks_event_reasons; older ones have no compute_cap."""
    program(f"""import sys
fields = sys.argv[1].split("=")[1].split(",")
values = dict(zip({list(FIELDS.values())!r}, [v.strip() for v in {ANSWER!r}.split(",")]))
del values["clocks_event_reasons.active"], values["compute_cap"]
for field in fields:
    if field not in values:
        print('Field "%s" is not a valid field to query.' % field)
        sys.exit(2)
print(", ".join(values[field] for field in fields))""")
    (card,) = query(60).cards
    assert (card.clock_reasons, card.capability, card.temperature_c) == (None, None, 38)


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
