"""Move rejected files to a quarantine folder, with a record of every move so that it can be undone."""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from vae.prepare.ledger import Result
from vae.system import console
from vae.system.console import printable
from vae.system.errors import DataError, UsageError, UserError
from vae.system.files import bounded_lines, parse_json

RECORD_NAME = "quarantine.jsonl"


def move_rejected(results: Iterable[Result], input_dir: str, quarantine_dir: str) -> int:
    """Move rejected files to the same relative path below `quarantine_dir`; returns their number.

    Each move is recorded before it happens, and no file is ever overwritten.
    """
    root, moved = Path(quarantine_dir), 0
    try:
        root.mkdir(parents=True, exist_ok=True)
        with open(root / RECORD_NAME, "a", encoding="utf-8", newline="\n") as record:
            for result in results:
                source = os.path.abspath(os.path.join(input_dir, result.name))
                if not os.path.lexists(source):
                    continue
                target = _free_name(os.path.join(os.path.abspath(root), result.name))
                row = {"from": source, "to": target, "reason": result.reason, "detail": result.detail}
                record.write(json.dumps(row) + "\n")
                record.flush()
                moved += _move(source, target)
    except OSError as error:
        raise UserError(
            f"--quarantine_dir {quarantine_dir} cannot be used: {error.strerror or error}"
        ) from error
    return moved


def undo(quarantine_dir: str, input_dir: str | None) -> tuple[int, int]:
    """Move all files of a quarantine back; returns the numbers of files that were moved and that stay.

    A file stays if another file has its original path. Raises DataError, before any file is moved, if there
    is no record, or if it names a file outside of the two folders: the record may come from someone else.
    """
    path = Path(quarantine_dir) / RECORD_NAME
    rows = _read_record(path, quarantine_dir)
    if input_dir is None:
        folder = os.path.commonpath([os.path.dirname(row["from"]) for row in rows]) if rows else "?"
        raise UsageError(
            "--undo_quarantine needs --input_dir, the folder into which the files go back: the record names "
            f"files in {folder}"
        )
    for number, row in enumerate(rows, 1):
        for key, flag, folder in (("from", "input", input_dir), ("to", "quarantine", quarantine_dir)):
            if not _is_inside(row[key], folder):
                raise DataError(
                    f"{path}: line {number} names {row[key]}, which is not in --{flag}_dir "
                    f"{folder}: no file was moved"
                )
    moved, left = 0, []
    for row in reversed(rows):  # the last move first
        if not os.path.lexists(row["to"]):
            continue  # the recorded move never happened, or was already undone
        if os.path.lexists(row["from"]) or not _move(row["to"], row["from"]):
            left.append(row)
            console.info(
                f"stays in quarantine: {printable(row['to'])}: "
                f"{printable(row['from'])} exists or cannot be written"
            )
        else:
            moved += 1
    if left:
        path.write_text("".join(json.dumps(row) + "\n" for row in reversed(left)), encoding="utf-8")
    else:
        path.unlink()
    return moved, len(left)


def _read_record(path: Path, quarantine_dir: str) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            rows = [parse_json(line) for line in bounded_lines(file)]
    except FileNotFoundError:
        raise DataError(f"--quarantine_dir {quarantine_dir} has no {RECORD_NAME}: nothing to undo") from None
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}") from error
    for number, row in enumerate(rows, 1):
        paths = (row.get("from"), row.get("to")) if isinstance(row, dict) else (None, None)
        if not all(isinstance(one, str) and os.path.isabs(one) and "\0" not in one for one in paths):
            raise DataError(f"{path} is damaged: line {number} is not the record of a move")
    return rows


def _is_inside(path: str, folder: str) -> bool:
    """Whether the file at `path` is below `folder`, whatever links its folders are."""
    parent, root = os.path.realpath(os.path.dirname(path)), os.path.realpath(folder)
    is_below = parent == root or parent.startswith(root.rstrip(os.sep) + os.sep)
    return is_below and os.path.basename(path) not in ("", os.curdir, os.pardir)


def _free_name(target: str) -> str:
    stem, extension = os.path.splitext(target)
    number = 1
    while os.path.lexists(target):
        number += 1
        target = f"{stem}_{number}{extension}"
    return target


def _move(source: str, target: str) -> bool:
    """Rename, or copy if the target is on another disk; prints a line and returns False if not permitted."""
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.move(source, target)
    except PermissionError as error:
        console.info(f"cannot be moved: {printable(source)}: {error.strerror}")
        return False
    return True
