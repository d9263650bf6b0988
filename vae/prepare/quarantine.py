"""Move rejected files to a quarantine folder, with a record of every move so that it can be undone."""

import io
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from vae.prepare.folders import inside, write_error
from vae.system import console
from vae.system.console import printable
from vae.system.errors import DataError
from vae.system.files import bounded_lines, open_appending, open_regular, parse_json, replace_text
from vae.system.folder_marker import check_folder, claim_folder

RECORD_NAME = "quarantine.jsonl"
VERB = "quarantine"


def move_rejected(files: Iterable[tuple[str, str, str]], input_dir: str, quarantine_dir: str) -> int:
    """Move files, as (name, reason, detail), to the same relative path; returns their number.

    Each move is recorded before it happens, and no file is ever overwritten.
    """
    root = Path(quarantine_dir)
    moved = 0
    try:
        claim_folder(root, VERB, "--quarantine_dir")
        with open_appending(inside(root, RECORD_NAME, "--quarantine_dir")) as record:
            _end_last_line(record)
            for name, reason, detail in files:
                source = inside(input_dir, name, "--input_dir")
                if not os.path.lexists(source):
                    continue
                target = _free_name(inside(root, name, "--quarantine_dir"))
                relative = os.path.relpath(target, os.path.realpath(root)).replace(os.sep, "/")
                row = {"from": name, "to": relative, "reason": reason, "detail": detail}
                _write_line(record, json.dumps(row).encode() + b"\n")  # before the file moves
                moved += _move(source, target)
    except OSError as error:
        raise write_error(error, quarantine_dir, "--quarantine_dir") from error
    return moved


def undo(quarantine_dir: str, input_dir: str) -> tuple[int, int]:
    """Move all files of a quarantine back; returns the numbers of files that were moved and that stay.

    A file stays if another file has its original path. DataError, before any file is moved, if there is no
    record, or if it names a file outside of the two folders: the record may come from someone else.
    """
    root = Path(quarantine_dir)
    check_folder(root, VERB, "--quarantine_dir")
    path = root / RECORD_NAME
    rows = _read_record(path, quarantine_dir)
    for number, (source, target) in enumerate(rows, 1):
        inside(input_dir, source, f"{path}: line {number}")
        inside(root, target, f"{path}: line {number}")
    moved, left = 0, []
    for source, target in reversed(rows):  # the last move first
        there, back = (
            inside(root, target, str(path)),
            inside(input_dir, source, str(path)),
        )
        if not os.path.lexists(there):
            continue  # the recorded move never happened, or was already undone
        if os.path.lexists(back) or not _move(there, back):
            left.append((source, target))
            console.info(
                f"stays in quarantine: {printable(target)}: {printable(source)} exists or cannot be written"
            )
        else:
            moved += 1
    if left:
        replace_text(path, (json.dumps({"from": one, "to": other}) + "\n" for one, other in reversed(left)))
    else:
        path.unlink()
    return moved, len(left)


def _read_record(path: Path, quarantine_dir: str) -> list[tuple[str, str]]:
    """The moves. A last line without an end was cut by a full disk, before its move."""
    try:
        return list(_parse(path))
    except FileNotFoundError:
        raise DataError(f"--quarantine_dir {quarantine_dir} has no {RECORD_NAME}: nothing to undo") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}") from None


def _parse(path: Path) -> Iterator[tuple[str, str]]:
    with io.TextIOWrapper(open_regular(path), encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(bounded_lines(file), 1):
            if not line.endswith("\n"):
                return
            row = parse_json(line)
            source, target = (row.get("from"), row.get("to")) if isinstance(row, dict) else (None, None)
            if not isinstance(source, str) or not isinstance(target, str):
                raise ValueError(f"line {number} is not the record of a move")
            yield source, target


def _write_line(record: BinaryIO, line: bytes) -> None:
    """Append a whole line; OSError if the disk is full. An unbuffered file may take a part of it only."""
    while line:
        line = line[record.write(line) :]


def _end_last_line(record: BinaryIO) -> None:
    """Remove a last line that was cut."""
    record.seek(0)
    record.truncate(record.read().rfind(b"\n") + 1)


def _free_name(target: Path) -> Path:
    stem, extension = os.path.splitext(target)
    number = 1
    while os.path.lexists(target):
        number += 1
        target = Path(f"{stem}_{number}{extension}")
    return target


def _move(source: Path, target: Path) -> bool:
    """Rename, or copy if the target is on another disk; prints a line and returns False if not permitted."""
    try:
        os.makedirs(target.parent, exist_ok=True)
        shutil.move(source, target)
    except PermissionError as error:
        console.info(f"cannot be moved: {printable(str(source))}: {error.strerror}")
        return False
    return True
