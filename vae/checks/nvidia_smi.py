"""What the driver says of the cards, through nvidia-smi: one question, and its answer as facts."""

import csv
import os
import re
import shutil

from vae.checks.children import Child
from vae.checks.facts import Smi, SmiCard

# Fields of `nvidia-smi --help-query-gpu`, under the name each has in SmiCard.
FIELDS = {
    "index": "index",
    "name": "name",
    "driver": "driver_version",
    "memory_total_mib": "memory.total",
    "memory_used_mib": "memory.used",
    "capability": "compute_cap",
    "pcie_generation": "pcie.link.gen.current",
    "pcie_generation_most": "pcie.link.gen.max",
    "pcie_width": "pcie.link.width.current",
    "pcie_width_most": "pcie.link.width.max",
    "power_draw": "power.draw",
    "power_limit": "power.limit",
    "power_default": "power.default_limit",
    "temperature_c": "temperature.gpu",
    "clock_reasons": "clocks_event_reasons.active",
}
OLD_NAMES = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}  # before R535
PATIENT_SECONDS = 15.0  # waking a card takes seconds
ALWAYS_KNOWN = ("index", "name", "driver_version")


def ask(timeout_seconds: float) -> Smi:
    """What nvidia-smi answers within the time; a field that this driver does not know is left out."""
    program = find_program()
    if program is None:
        return Smi("missing")
    fields = dict(FIELDS)
    while True:
        query = [program, f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader,nounits"]
        try:
            answer = Child(query).finish(timeout_seconds)
        except OSError as error:
            return Smi("failed", f"{program}: {error.strerror or error}")
        if answer.code is None:
            return Smi("hanging", f"no answer in {timeout_seconds:g} s")
        refused = re.search(r'Field "([^"]+)" is not a valid field', answer.out + answer.err)
        if not refused or not drop_field(fields, refused[1]):
            return parse(list(fields), answer.code, answer.out, answer.err)


def find_program() -> str | None:
    # Under WSL it lies where PATH does not always lead, on older Windows drivers in a folder of its own.
    places = (None, "/usr/lib/wsl/lib", os.path.expandvars(r"%ProgramFiles%\NVIDIA Corporation\NVSMI"))
    return next(filter(None, (shutil.which("nvidia-smi", path=place) for place in places)), None)


def drop_field(fields: dict[str, str], refused: str) -> bool:
    """Replace a field by its older name, or take it out; False where it cannot be done without."""
    for ours, theirs in fields.items():
        if theirs == refused and theirs not in ALWAYS_KNOWN:
            if theirs in OLD_NAMES:
                fields[ours] = OLD_NAMES[theirs]
            else:
                del fields[ours]
            return True
    return False


def parse(names: list[str], code: int, out: str, err: str) -> Smi:
    """The answer to a question for `names`; lines that are no cards are its complaint."""
    rows = [row for row in csv.reader(out.splitlines(), skipinitialspace=True) if len(row) == len(names)]
    cards, driver = [], None
    for row in rows:
        values = dict(zip(names, (cell.strip() for cell in row), strict=True))
        if not values["index"].isdigit():
            continue
        driver = driver or values.get("driver")
        cards.append(_card(values))
    if cards:
        return Smi("answered", "", driver, tuple(cards))
    message = " ".join((out + " " + err).split())
    if "no devices were found" in message.lower() or (code == 0 and not message):
        return Smi("answered", message)
    return Smi("failed", message or f"it ended with code {code}")


def _card(values: dict[str, str]) -> SmiCard:
    kinds = {"power_draw": float, "power_limit": float, "power_default": float, "clock_reasons": _mask}
    numbers = {
        name: _number(text, kinds.get(name, int))
        for name, text in values.items()
        if name not in ("name", "driver", "capability", "index")
    }
    capability = re.fullmatch(r"(\d+)\.(\d+)", values.get("capability", ""))
    return SmiCard(
        index=int(values["index"]),
        name=values["name"],
        capability=(int(capability[1]), int(capability[2])) if capability else None,
        **numbers,
    )


def _mask(text: str) -> int:
    return int(text, 16)


def _number(text: str, kind):
    """The number, None for [N/A], [Not Supported], [Unknown Error], [Insufficient Permissions]."""
    try:
        return kind(text)
    except ValueError:
        return None
