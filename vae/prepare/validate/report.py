"""The result of a validation: a summary for the terminal, a JSON file and a CSV file, written as streams."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vae.prepare.ledger import ACCEPTED, DUPLICATE, EXAMPLES, REJECTED, Ledger, Result, Skips
from vae.prepare.rejections import REMEDIES, duplicates_text, rejection_lines, skip_lines
from vae.system import console
from vae.system.console import printable
from vae.system.files import replace_text, write_csv_rows

COLUMNS = ("path", "status", "reason", "detail", "flags", "format", "width", "height", "bytes", "sha256")


@dataclass
class Report:
    """Counts of a ledger's results; `accepted`, `rejected` and `duplicates` sum to the checked files."""

    ledger: Ledger
    skips: Skips
    input_dir: str
    num_files: int
    has_manifest: bool
    seconds: float
    moved: int | None = None  # files moved to the quarantine; None without a quarantine
    accepted: int = 0
    duplicates: int = 0
    rejected: int = 0
    flags: Counter[str] = field(default_factory=Counter)
    flagged: dict[str, list[str]] = field(default_factory=dict)  # a few names for each flag

    def __post_init__(self) -> None:
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
        """Number of checked files."""
        return self.accepted + self.duplicates + self.rejected

    @property
    def files_per_minute(self) -> int:
        """Checked files per minute."""
        return round(self.checked / max(self.seconds, 1e-9) * 60)


def print_summary(report: Report, output_file: str, with_csv: bool) -> None:
    """Print the counts, with a remedy and examples for each reason, and the names of the reports."""
    lines = [
        f"{printable(report.input_dir)}: {report.checked} files in {report.seconds:.1f} s "
        f"({report.files_per_minute}/minute): {report.accepted} accepted, {report.rejected} rejected, "
        f"{duplicates_text(report.duplicates)}",
        *rejection_lines(report.ledger),
    ]
    for flag, count in report.flags.most_common():
        lines.append(f"  flagged  {count:>7}  {flag}: {printable(report.flagged[flag][0])}")
    lines += skip_lines(report.skips)
    if report.moved is not None:
        lines.append(f"  moved    {report.moved:>7}  to quarantine; --undo_quarantine moves them back")
    table = f", table: {printable(str(_csv_path(output_file)))}" if with_csv else ""
    lines.append(f"  report: {printable(output_file)}{table}")
    console.info("\n".join(lines))


def write_reports(report: Report, output_file: str, with_csv: bool) -> None:
    """Write the JSON file and, beside it, the CSV file; each file is written atomically."""
    replace_text(Path(output_file), _json_parts(report))
    if with_csv:
        write_csv_rows(_csv_path(output_file), _csv_rows(report))


def _csv_path(output_file: str) -> Path:
    return Path(output_file).with_suffix(".csv")


def _json_parts(report: Report) -> Iterator[str]:
    yield json.dumps(_counts(report), indent=1)[:-2]  # the lists follow before the closing brace
    for key, status, describe in (
        ("rejected_files", REJECTED, _describe_rejected),
        ("duplicate_files", DUPLICATE, _describe_duplicate),
        ("flagged_files", ACCEPTED, _describe_flagged),
    ):
        yield from _json_list(key, report.ledger.results(status), describe)
    yield "\n}\n"


def _json_list(
    key: str, results: Iterator[Result], describe: Callable[[Result], dict[str, Any] | None]
) -> Iterator[str]:
    rows = (row for row in map(describe, results) if row)
    yield f',\n "{key}": ['
    for number, row in enumerate(rows):
        yield (",\n  " if number else "\n  ") + json.dumps(row)
    yield "\n ]"


def _counts(report: Report) -> dict[str, Any]:
    ledger = report.ledger
    return {
        "input_dir": report.input_dir,
        "manifest_checked": report.has_manifest,
        "files_found": report.num_files,
        "files_checked": report.checked,
        "accepted": report.accepted,
        "rejected": report.rejected,
        "exact_duplicates": report.duplicates,
        "seconds": round(report.seconds, 2),
        "files_per_minute": report.files_per_minute,
        "reasons": {
            reason: {
                "count": count,
                "remedy": REMEDIES.get(reason, ""),
                "examples": [result.name for result in ledger.rejected_examples(reason)],
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


def _describe_rejected(result: Result) -> dict[str, Any]:
    return {"path": result.name, "reason": result.reason, "detail": result.detail}


def _describe_duplicate(result: Result) -> dict[str, Any]:
    return {"path": result.name, "detail": result.detail}


def _describe_flagged(result: Result) -> dict[str, Any] | None:
    return {"path": result.name, "flags": result.record["flags"]} if result.record["flags"] else None


def _csv_rows(report: Report) -> Iterator[tuple[object, ...]]:
    yield COLUMNS
    for result in report.ledger.results():
        record = result.record
        yield (
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
