"""Move rejected files to a quarantine folder, with a CSV file that lists every move."""

import csv
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from vae.prepare.folders import write_error
from vae.system import console
from vae.system.console import printable
from vae.system.files import csv_cell
from vae.system.folder_marker import claim_folder

RECORD_NAME = "quarantine.csv"
VERB = "quarantine"
FLAG = "--quarantine_dir"


def move_rejected(files: Iterable[tuple[str, str, str]], input_dir: str, quarantine_dir: str) -> int:
    """Move files, as (name, reason, detail), to the same relative path; returns their number.

    Each move is listed before it happens. A file stays, with a printed line, if its path in the quarantine is
    taken or if moving is not permitted.
    """
    root = Path(quarantine_dir)
    moved = 0
    try:
        claim_folder(root, VERB, FLAG)
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
                record.writerow(map(csv_cell, row))
                file.flush()
                try:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.move(source, target)
                    moved += 1
                except PermissionError as error:
                    _print_not_moved(source, str(error.strerror))
    except OSError as error:
        raise write_error(error, quarantine_dir, FLAG) from error
    return moved


def _print_not_moved(source: Path, why: str) -> None:
    console.info(f"cannot be moved: {printable(str(source))}: {printable(why)}")
