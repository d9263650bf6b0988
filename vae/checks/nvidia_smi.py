"""Driver and cards as nvidia-smi reports them: one query, parsed into facts."""

import csv
import os
import re
import shutil
from dataclasses import fields
from typing import Any

from vae.checks.facts import Smi, SmiCard
from vae.system.child_process import ChildProcess

REQUIRED = {"index": "index", "name": "name", "driver": "driver_version"}  # every driver supports these
# The field of SmiCard -> the field of `nvidia-smi --help-query-gpu`.
FIELDS = REQUIRED | {f.name: f.metadata["query"] for f in fields(SmiCard) if f.metadata}
PATIENT_SECONDS = 15.0  # a sleeping card takes seconds to wake up


def query(timeout_seconds: float) -> Smi:
    """Run nvidia-smi with a time limit; fields that this driver does not support are omitted."""
    program = find_program()
    if program is None:
        return Smi("missing")
    asked = FIELDS
    while True:
        command = [program, f"--query-gpu={','.join(asked.values())}", "--format=csv,noheader,nounits"]
        try:
            process = ChildProcess(command).finish(timeout_seconds)
        except OSError as error:
            return Smi("failed", f"{program}: {error.strerror or error}")
        if process.code is None:
            return Smi("hanging", f"no answer in {timeout_seconds:g} s")
        refused = re.search(r'Field "([^"]+)" is not a valid field', process.out + process.err)
        kept = {ours: theirs for ours, theirs in asked.items() if not refused or theirs != refused[1]}
        if kept == asked or not kept.keys() >= REQUIRED.keys():
            return parse(list(asked), process.code, process.out, process.err)
        asked = kept


def find_program() -> str | None:
    # Under WSL its folder may be missing from PATH; older Windows drivers install it in a folder of its own.
    folders = (None, "/usr/lib/wsl/lib", os.path.expandvars(r"%ProgramFiles%\NVIDIA Corporation\NVSMI"))
    return next(filter(None, (shutil.which("nvidia-smi", path=folder) for folder in folders)), None)


def parse(names: list[str], code: int, out: str, err: str) -> Smi:
    """The output of a query for `names`; output without any card is taken as an error message."""
    cards, driver = [], None
    for row in csv.reader(out.splitlines(), skipinitialspace=True):
        if len(row) == len(names) and row[0].strip().isdigit():
            values = dict(zip(names, (cell.strip() for cell in row), strict=True))
            driver = driver or values["driver"]
            cards.append(_card(values))
    if cards:
        return Smi("answered", "", driver, tuple(cards))
    message = " ".join((out + " " + err).split())
    if "no devices were found" in message.lower() or (code == 0 and not message):
        return Smi("answered", message)
    return Smi("failed", message or f"it ended with code {code}")


def _card(values: dict[str, str]) -> SmiCard:
    capability = re.fullmatch(r"(\d+)\.(\d+)", values.get("capability", ""))
    texts = {name: text for name, text in values.items() if name not in ("name", "driver", "capability")}
    return SmiCard(
        name=values["name"],
        capability=(int(capability[1]), int(capability[2])) if capability else None,
        **{name: _number(name, text) for name, text in texts.items()},
    )


def _number(field: str, text: str) -> Any:
    """The number; None for [N/A], [Not Supported], [Unknown Error], [Insufficient Permissions]."""
    try:
        return float(text) if field.endswith("_w") else int(text, 16 if field == "clock_reasons" else 10)
    except ValueError:
        return None
