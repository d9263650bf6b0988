"""From the results of all parts: Markdown for docs/measurements.md, and values for this card."""

import json
from pathlib import Path
from typing import Any

from benchmarks.first_hour.record import DONE, Record

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs" / "measurements.md"
NUMBERS = range(1, 9)
BEGIN, END = "<!-- first hour: begin -->", "<!-- first hour: end -->"


def write_summary(folder: Path, write_docs: bool) -> None:
    """Write measurements.md and measured.json to `folder`, and the tables to the docs if `write_docs`."""
    records = {number: record for number in NUMBERS if (record := Record.read(folder, number))}
    if not records:
        return
    from benchmarks.first_hour.choose import choose  # imports PyTorch
    from benchmarks.first_hour.parts import PARTS

    machine = next(iter(records.values())).content["machine"]
    text = "\n".join(markdown_lines(records, machine, PARTS)) + "\n"
    origin = {
        name: machine[name] for name in ("card", "driver", "cuda", "cudnn", "versions", "commit", "date")
    }
    values = json.dumps({**origin, **choose(records)}, indent=1) + "\n"
    _write(folder / "measurements.md", text)
    _write(folder / "measured.json", values)
    print(f"values for this card: {values}", end="")
    if write_docs and (machine["quick"] or machine["arithmetic"] != "yes"):
        print("--write_docs: not with results of --quick or of a device that computes nothing")
        return
    if write_docs:
        _write(DOCS, between_markers(DOCS.read_text(encoding="utf-8"), text))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"written: {path}")


def between_markers(page: str, text: str) -> str:
    """The page with `text` in the place of what is between the markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"{DOCS} has no marker {BEGIN}"
    assert end, f"{DOCS} has no marker {END}"
    return f"{before}{BEGIN}\n{text}{END}{after}"


def markdown_lines(records: dict[int, Record], machine: dict[str, Any], parts: dict[int, Any]) -> list[str]:
    """A section for each part, with the machine above them and unfinished cases below each."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"{machine['card']}, driver {machine['driver']}, CUDA {machine['cuda']}, cuDNN {machine['cudnn']}, "
        f"{versions}, commit {machine['commit']}, {machine['date']}.",
    ]
    if machine["arithmetic"] != "yes":
        lines += ["", "**This device computes nothing: the figures below mean nothing.**"]
    if problems := [f"- part {n}, {text}" for n, record in records.items() for text in record.problems()]:
        lines += ["", "To mend, or to run again:", "", *problems]
    for number, record in records.items():
        lines += ["", f"### {number}. {parts[number].TITLE}", "", *parts[number].table(record.results())]
        for name, case in record.cases.items():
            if case["status"] != DONE:
                lines += ["", f"{name}: **{case['status']}** {case.get('error', '')}".rstrip()]
    return lines
