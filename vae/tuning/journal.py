"""Optuna's journal in a shared folder. A killed process or a full disk cannot damage it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from vae.config.tune_flags import DIRECTIONS
from vae.system import console
from vae.system.errors import UserError
from vae.system.files import NotRegularError, open_appending
from vae.tuning.claims import wait_for_claim

JOURNAL_NAME = "journal.log"
STUDY_NAME = "vae"


class JournalLock(JournalFileOpenLock):
    """Ends with its process; Optuna's own locks stay for 30 s after theirs was killed.

    While it is held, an incomplete last record is removed, so that no record is written behind it.
    """

    def __init__(self, journal: Path) -> None:
        super().__init__(str(journal))
        self._journal = journal
        self._file: BinaryIO | None = None

    def acquire(self) -> bool:
        self._file = wait_for_claim(self._journal.parent / ".journal.lock")
        cut_torn_record(self._journal)
        return True

    def release(self) -> None:
        assert self._file is not None
        cut_torn_record(self._journal)  # of a full disk
        self._file.close()


def open_study(folder: Path, objectives: Sequence[str]) -> optuna.Study:
    """The study in the folder, or a new one; UserError for a link, damage or other objectives."""
    path = folder / JOURNAL_NAME
    try:
        open_appending(path).close()
    except NotRegularError as error:
        raise UserError(f"--output_dir {folder}: {JOURNAL_NAME}: {error.strerror}: remove it") from None
    directions: list[Any] = [DIRECTIONS[name] for name in objectives]
    try:
        study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(path), JournalLock(path))),
            study_name=STUDY_NAME,
            directions=directions,
            load_if_exists=True,
        )
    except (ValueError, LookupError, AssertionError, TypeError, RecursionError) as error:
        raise UserError(
            f"--output_dir: the journal {path} is damaged: its records do not fit together "
            f"({type(error).__name__}): restore it from a copy, or search in another folder"
        ) from None
    if [direction.name.lower() for direction in study.directions] != directions:
        raise UserError(
            f"--objective {' '.join(objectives)}: --output_dir {folder} contains a search with other "
            "objectives: use another folder"
        )
    return study


def cut_torn_record(path: Path) -> None:
    """Remove an incomplete last line, of a killed process or a full disk."""
    with open_appending(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if file.read() in (b"", b"\n"):
            return
        console.warning(f"{path}: removes the incomplete last record, of a killed process or a full disk")
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
