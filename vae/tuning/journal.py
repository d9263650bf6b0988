"""Optuna's journal in a shared folder. A killed process or a full disk cannot damage it."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from vae.config.tune_flags import DIRECTIONS
from vae.system import console
from vae.system.errors import UserError
from vae.system.files import parse_json
from vae.tuning.claims import claimed

JOURNAL_NAME = "journal.log"
STUDY_NAME = "vae"


class Journal(JournalFileBackend):
    """Optuna's file of records, with our lock: Optuna's own stays for 30 s after its process was killed."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append records, all or none. OSError, for example of a full disk, leaves the file as it was."""
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        with claimed(_lock_path(self._path)), self._path.open("r+b", buffering=0) as file:
            end = cut_torn_record(self._path)
            file.seek(end)
            try:
                while lines:
                    lines = lines[file.write(lines) :]
                os.fsync(file.fileno())
            except OSError:
                os.truncate(self._path, end)
                raise


def open_study(folder: Path, objectives: Sequence[str]) -> optuna.Study:
    """The study in the folder, or a new one; UserError if it is damaged or has other objectives."""
    path = folder / JOURNAL_NAME
    directions: list[Any] = [DIRECTIONS[name] for name in objectives]
    if path.exists():
        with claimed(_lock_path(path)):
            cut_torn_record(path)
            _check_records(path)
    try:
        found = optuna.create_study(
            storage=JournalStorage(Journal(path)),
            study_name=STUDY_NAME,
            directions=directions,
            load_if_exists=True,
        )
    except (ValueError, KeyError, AssertionError, TypeError) as error:
        raise _damaged(path, f"its records do not fit together ({type(error).__name__})") from None
    if [direction.name.lower() for direction in found.directions] != directions:
        raise UserError(
            f"--objective {' '.join(objectives)}: --output_dir {folder} contains a search with other "
            "objectives: use another folder"
        )
    return found


def _lock_path(journal: Path) -> Path:
    return journal.parent / ".journal.lock"


def cut_torn_record(path: Path) -> int:
    """Remove an incomplete last line, of a killed process or a full disk; returns the size of the rest."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if file.read() in (b"", b"\n"):
            return size
    end = path.read_bytes().rfind(b"\n") + 1
    console.warning(f"{path}: removes the incomplete last record, of a killed process or a full disk")
    os.truncate(path, end)
    return end


def _check_records(path: Path) -> None:
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            record = parse_json(line.decode())
        except ValueError:
            record = None
        if not (isinstance(record, dict) and "op_code" in record and "worker_id" in record):
            raise _damaged(path, f"line {number} is not a record")


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(
        f"--output_dir: the journal {path} is damaged: {reason}: restore it from a copy, or search in "
        "another folder"
    )
