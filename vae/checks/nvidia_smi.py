"""Driver and cards as nvidia-smi reports them: one query, parsed into facts."""

import csv
import re
import shutil

from vae.checks.facts import Card, Smi
from vae.system.child_process import ChildProcess

# Names of `nvidia-smi --help-query-gpu`. Every driver that runs a supported PyTorch (525 or newer) has them.
FIELDS = ("index", "name", "driver_version", "memory.total", "compute_cap")
TIMEOUT_SECONDS = 15.0  # a sleeping card takes seconds to wake up


def query(timeout_seconds: float = TIMEOUT_SECONDS) -> Smi:
    """Run nvidia-smi with a time limit."""
    program = find_program()
    if program is None:
        return Smi("missing")
    command = [program, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        process = ChildProcess(command).finish(timeout_seconds)
    except OSError as error:
        return Smi("failed", f"{program}: {error.strerror or error}")
    if process.code is None:
        return Smi("hanging", f"no answer in {timeout_seconds:g} s")
    return parse(process.code, process.out, process.err)


def find_program() -> str | None:
    # Under WSL its folder may be missing from PATH.
    return shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/lib/wsl/lib")


def parse(code: int, out: str, err: str) -> Smi:
    """The output of the query; output without any card is taken as an error message."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(out.splitlines(), skipinitialspace=True)]
    rows = [row for row in rows if len(row) == len(FIELDS) and row[0].isdigit()]
    if rows:
        return Smi("answered", "", rows[0][2], tuple(map(_card, rows)))
    message = " ".join((out + " " + err).split())
    if "no devices were found" in message.lower() or (code == 0 and not message):
        return Smi("answered", message)
    return Smi("failed", message or f"it ended with code {code}")


def _card(row: list[str]) -> Card:
    """A row of the output; values such as [N/A], [Not Supported] or [Unknown Error] become None."""
    _, name, _, total, version = row
    match = re.fullmatch(r"(\d+)\.(\d+)", version)
    capability = (int(match[1]), int(match[2])) if match else None
    return Card(name, capability, int(total) if total.isdigit() else None)
