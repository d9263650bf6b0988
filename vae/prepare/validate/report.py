"""What validation found: a summary for the terminal, a JSON file and a CSV file, written as streams."""

import csv
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vae.console import printable
from vae.data.manifest import replace_text
from vae.prepare.check_file import REMEDIES
from vae.prepare.ledger import ACCEPTED, DUPLICATE, EXAMPLES, REJECTED, Ledger, Result, Skips

COLUMNS = ("path", "status", "reason", "detail", "flags", "format", "width", "height", "bytes", "sha256")


@dataclass
class Report:
    """Counts over a ledger; `accepted`, `rejected` and `duplicates` sum to the files looked at."""

    ledger: Ledger
    skips: Skips
    input_dir: str
    found: int
    has_manifest: bool
    seconds: float
    moved: int | None = None
    accepted: int = 0
    duplicates: int = 0
    rejected: int = 0
    flags: Counter[str] = field(default_factory=Counter)
    flagged: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self):
        for result in self.ledger.results():
            self.accepted += result.status == ACCEPTED
            self.duplicates += result.status == DUPLICATE
            self.rejected += result.status == REJECTED
            for flag in result.record.get("flags", ()) if result.status == ACCEPTED else ():
                self.flags[flag] += 1
                examples = self.flagged.setdefault(flag, [])
                if len(examples) < EXAMPLES:
                    examples.append(result.name)

    @property
    def checked(self) -> int:
        """Number of files looked at."""
        return self.accepted + self.duplicates + self.rejected

    def summarize(self) -> None:
        """Print counts grouped by reason, with examples and what to do."""
        rate = self.checked / max(self.seconds, 1e-9) * 60
        print(
            f"{printable(self.input_dir)}: {self.checked} files in {self.seconds:.1f} s ({rate:.0f}/minute): "
            f"{self.accepted} accepted, {self.rejected} rejected, "
            f"{self.duplicates} exact duplicate{'s' * (self.duplicates != 1)}"
        )
        for reason, count in self.ledger.counts(REJECTED):
            print(f"  rejected {count:>7}  {reason}: {REMEDIES.get(reason, 'copy it again or leave it out')}")
            for result in self.ledger.examples(REJECTED, reason)[:3]:
                print(f"                    {printable(result.name)}: {printable(result.detail)}")
        for flag, count in self.flags.most_common():
            print(f"  flagged  {count:>7}  {flag}: {printable(self.flagged[flag][0])}")
        for code, count in self.skips.counts.most_common():
            print(f"  skipped  {count:>7}  {code}: {printable(self.skips.examples[code][0])}")
        if self.moved is not None:
            print(f"  moved    {self.moved:>7}  to quarantine; --undo_quarantine moves them back")
        sys.stdout.flush()


def write_reports(report: Report, output_file: str, with_csv: bool) -> None:
    """Write the JSON file and, beside it, the CSV file; each whole or not at all."""
    replace_text(output_file, _json_parts(report))
    if with_csv:
        replace_text(Path(output_file).with_suffix(".csv"), _csv_parts(report))


def _json_parts(report: Report) -> Iterator[str]:
    ledger = report.ledger
    head = {
        "input_dir": report.input_dir,
        "manifest_checked": report.has_manifest,
        "files_found": report.found,
        "files_checked": report.checked,
        "accepted": report.accepted,
        "rejected": report.rejected,
        "exact_duplicates": report.duplicates,
        "seconds": round(report.seconds, 2),
        "files_per_minute": round(report.checked / max(report.seconds, 1e-9) * 60),
        "reasons": {
            reason: {
                "count": count,
                "remedy": REMEDIES.get(reason, ""),
                "examples": [result.name for result in ledger.examples(REJECTED, reason)],
            }
            for reason, count in ledger.counts(REJECTED)
        },
        "flags": {
            flag: {"count": count, "examples": report.flagged[flag]}
            for flag, count in report.flags.most_common()
        },
        "skipped": {
            code: {"count": count, "examples": report.skips.examples[code]}
            for code, count in report.skips.counts.most_common()
        },
    }
    yield json.dumps(head, indent=1)[:-2]  # without the closing brace: the long lists follow as they come
    lists = (
        ("rejected_files", REJECTED, lambda r: {"path": r.name, "reason": r.reason, "detail": r.detail}),
        ("duplicate_files", DUPLICATE, lambda r: {"path": r.name, "detail": r.detail}),
        (
            "flagged_files",
            ACCEPTED,
            lambda r: r.record["flags"] and {"path": r.name, "flags": r.record["flags"]},
        ),
    )
    for key, status, describe in lists:
        rows = (row for row in map(describe, ledger.results(status)) if row)
        yield f',\n "{key}": ['
        for number, row in enumerate(rows):
            yield (",\n  " if number else "\n  ") + json.dumps(row)
        yield "\n ]"
    yield "\n}\n"


class _Line:
    """What csv.writer writes to: keeps the last line."""

    def write(self, text: str) -> None:
        self.text = text


def _csv_parts(report: Report) -> Iterator[str]:
    line = _Line()
    writer = csv.writer(line)
    for row in _csv_rows(report):
        writer.writerow(row)
        yield line.text.replace("\r\n", "\n")


def _csv_rows(report: Report) -> Iterator[tuple]:
    yield COLUMNS
    for result in report.ledger.results():
        yield _csv_row(result)


def _csv_row(result: Result) -> tuple:
    record = result.record
    return (
        printable(result.name),
        result.status,
        result.reason,
        printable(result.detail),
        " ".join(record.get("flags", ())),
        record.get("format", ""),
        record.get("width", ""),
        record.get("height", ""),
        result.size,
        result.sha256 or "",
    )
