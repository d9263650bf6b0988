"""`--mode validate`: decode every image as the trainer does, and report those that cannot be used."""

import csv
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from vae.config.prepare_flags import ValidateConfig
from vae.data.manifest import MANIFEST_NAME
from vae.prepare.blocks import FileBlock
from vae.prepare.check import Check
from vae.prepare.database import sql
from vae.prepare.output_folders import check_apart, check_output_file, output_folder, write_error
from vae.prepare.rejection_reasons import NOT_REJECTED, count_rejected, print_summary, remedy
from vae.prepare.rows import RowFolder, parse_part, rules_of
from vae.prepare.source import open_source
from vae.prepare.table import EXACT, Table, drop_exact, flags
from vae.system import console
from vae.system.console import printable
from vae.system.errors import EXIT_DATA, UserError
from vae.system.files import check_folder, claim_folder, replace_text, utf8_text

EXAMPLES = 6  # files named per reason in the report
LISTS = ("rejected_files", "duplicate_files", "flagged_files")


def run_validate(config: ValidateConfig) -> int:
    """Validate images, and print a summary; returns the exit code.

    DataError if there are no images, and UserError for unusable folders or flags.
    """
    check_output_file(config.output_file, "--output_file", overwrite=config.overwrite)
    began = time.monotonic()
    source = open_source(config)
    if config.quarantine_dir:
        if source.folder is None:
            raise UserError(
                f"--quarantine_dir {config.quarantine_dir} needs a folder of image files as --input_dir: "
                "leave it out"
            )
        check_apart(config.input_dir, config.quarantine_dir, "--quarantine_dir")
        check_folder(Path(config.quarantine_dir), QUARANTINE, QUARANTINE_FLAG)
    list(source.manifest())  # a damaged manifest is an error now, not after hours
    with ExitStack() as stack:
        if config.rows_dir:
            check_apart(config.input_dir, config.rows_dir, "--rows_dir")
            root = stack.enter_context(output_folder(config.rows_dir, "validate", "--rows_dir"))
        else:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vae-trainer-")))
        owner = f"--rows_dir {config.rows_dir}"
        part = parse_part(config.part)
        folder = stack.enter_context(RowFolder(root, owner, rules_of(config, source), part).claimed())
        folder.run(source, Check(config), "validate")
        if config.part:
            console.info(folder.part_text(source))
            return 0
        table = Table(folder, source)
        has_manifest = compare_with_manifest(table, config.limit is None)
        drop_exact(table)
        summary = _summarize(table, has_manifest, time.monotonic() - began)
        try:
            replace_text(Path(config.output_file), _json_parts(table, summary))
        except OSError as error:
            raise write_error(error, config.output_file, "--output_file") from error
        last = [
            f"  flagged  {flag['count']:>7}  {name}: {printable(flag['examples'][0])}"
            for name, flag in summary["flags"].items()
        ]
        if config.quarantine_dir:
            moved = move_rejected(_files_to_move(table), config.input_dir, config.quarantine_dir)
            last.append(f"  moved    {moved:>7}  to quarantine; {RECORD_NAME} in it lists them")
        print_summary(
            table,
            f"{printable(config.input_dir)}: {summary['files_checked']} files "
            f"({summary['files_per_minute']}/minute), {summary['accepted']} accepted",
            began,
            *last,
            f"  report: {printable(config.output_file)}",
        )
        return EXIT_DATA if config.strict and summary["rejected"] else 0


def compare_with_manifest(table: Table, is_whole: bool) -> bool:
    """Reject what differs from the folder's manifest; returns whether it has one."""
    table.load_manifest()
    source = table.source
    table.leave_out(
        "changed_since_manifest",
        "EXISTS (FROM manifest AS m WHERE m.path = name AND m.sha256 <> images.sha256)",
        "its bytes differ from those in the manifest",
    )
    if is_whole and source.folder is not None:
        listed = table.all("SELECT path FROM manifest ANTI JOIN images ON name = path ORDER BY path")
        missing = [n for (n,) in listed if not os.path.lexists(os.path.join(source.folder, n))]
        with table.arrays("missing", name=np.array(missing, object)):
            table.run(sql("missing_files"))
    return source.folder is not None and (Path(source.folder) / MANIFEST_NAME).is_file()


def _files_to_move(table: Table) -> Iterator[tuple[str, str, str]]:
    """Rejected files, with the names that the folder has them under."""
    query = (
        "SELECT block, number, reason, detail FROM images WHERE block >= 0 AND reason NOT IN $1 ORDER BY n"
    )
    for number, at, reason, detail in table.all(query, ["", *NOT_REJECTED]):
        block = table.blocks[number]
        assert isinstance(block, FileBlock)
        yield block.names[at], reason, detail


def _summarize(table: Table, has_manifest: bool, seconds: float) -> dict[str, Any]:
    """The report without its lists: `accepted`, `rejected` and `exact_duplicates` are all checked files."""
    source, checked = table.source, table.count()
    rejected = count_rejected(table)
    return {
        "input_dir": source.text,
        "manifest_checked": has_manifest,
        "files_found": max(source.listed, checked),
        "files_checked": checked,
        "accepted": table.accepted,
        "rejected": rejected,
        "exact_duplicates": checked - table.accepted - rejected,
        "seconds": round(seconds, 2),
        "files_per_minute": round(checked / max(seconds, 1e-9) * 60),
        "broken_files": [
            {"path": str(source.blocks[number].file), "reason": reason, "detail": detail}
            for number, reason, detail in table.broken_blocks()
        ],
        "reasons": {
            reason: {
                "count": count,
                "remedy": remedy(reason),
                "examples": [name for name, _ in table.examples(reason, EXAMPLES)],
            }
            for reason, count in table.counts()
            if reason != EXACT
        },
        "flags": {flag: {"count": count, "examples": names} for flag, count, names in flags(table)},
        "skipped": {
            code: {"count": count, "examples": [utf8_text(name) for name in table.skips.examples[code]]}
            for code, count in table.skips.counts.items()
        },
    }


def _json_parts(table: Table, summary: dict[str, Any]) -> Iterator[str]:
    """The text of the report."""
    yield json.dumps(summary, indent=1)[:-2]  # the lists follow before the closing brace
    for name in LISTS:
        yield f',\n "{name}": ['
        for number, row in enumerate(table.json_rows(sql(name))):
            yield (",\n  " if number else "\n  ") + row
        yield "\n ]"
    yield "\n}\n"


# ---- Quarantine --------------------------------------------------------------------------------------------

RECORD_NAME = "quarantine.csv"
QUARANTINE, QUARANTINE_FLAG = "quarantine", "--quarantine_dir"


def move_rejected(files: Iterable[tuple[str, str, str]], input_dir: str, quarantine_dir: str) -> int:
    """Move files, as (name, reason, detail), to the same relative path; returns their number.

    Each move is listed before it happens. A file stays, with a printed line, if its path in the quarantine is
    taken or if moving is not permitted.
    """
    root = Path(quarantine_dir)
    moved = 0
    try:
        claim_folder(root, QUARANTINE, QUARANTINE_FLAG)
        is_new = not (root / RECORD_NAME).exists()
        with open(root / RECORD_NAME, "a", encoding="utf-8", errors="backslashreplace", newline="") as file:
            record = csv.writer(file)
            if is_new:
                record.writerow(("path", "reason", "detail"))
            for row in files:
                source = Path(input_dir, row[0])
                target = root / row[0]
                if not os.path.lexists(source):
                    continue
                if os.path.lexists(target):
                    _print_not_moved(source, f"{target} exists")
                    continue
                record.writerow(row)
                file.flush()
                try:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.move(source, target)
                    moved += 1
                except PermissionError as error:
                    _print_not_moved(source, str(error.strerror))
    except OSError as error:
        raise write_error(error, quarantine_dir, QUARANTINE_FLAG) from error
    return moved


def _print_not_moved(source: Path, why: str) -> None:
    console.info(f"cannot be moved: {printable(str(source))}: {printable(why)}")
