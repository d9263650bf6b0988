"""Names of files and what became of each, in a database on disk, so that millions take no more memory.

Names are kept as the bytes they have on disk, so any name fits, and come in the order of these bytes.
"""

import json
import os
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from vae.config.errors import UserError
from vae.console import printable

ACCEPTED, REJECTED, DUPLICATE = "accepted", "rejected", "duplicate"
PAGE = 1000  # rows read at a time, so that writing may go on between
EXAMPLES = 5

TABLES = """
CREATE TABLE IF NOT EXISTS files (name BLOB PRIMARY KEY, output BLOB, key TEXT) WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS files_by_key ON files (key);
CREATE TABLE IF NOT EXISTS results (
    name BLOB PRIMARY KEY, status TEXT, reason TEXT, detail TEXT,
    size INTEGER, mtime_ns INTEGER, sha256 TEXT, record TEXT) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS results_by_hash ON results (sha256, name) WHERE sha256 IS NOT NULL;
CREATE TABLE IF NOT EXISTS notes (key BLOB PRIMARY KEY, value TEXT) WITHOUT ROWID;
"""


class Result(NamedTuple):
    """What became of one file."""

    name: str
    status: str
    reason: str = ""
    detail: str = ""
    size: int = 0  # of the file, bytes
    mtime_ns: int = 0
    sha256: str | None = None  # of the file
    record: dict[str, Any] = {}  # noqa: RUF012 - never changed; what else a verb wants to keep


class Skips:
    """Counts and a few examples of what a walk passes over; hand `add` to walk_images."""

    def __init__(self):
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = defaultdict(list)

    def add(self, name: str, code: str) -> None:
        """Count one."""
        self.counts[code] += 1
        if len(self.examples[code]) < EXAMPLES:
            self.examples[code].append(name)


class Ledger:
    """A listing of files and a result for each that has one. Every change is kept at once, come what may."""

    def __init__(self, path: str | os.PathLike):
        self._db = sqlite3.connect(path, timeout=2, isolation_level=None)  # each statement is a transaction
        self._db.create_function("of", 1, lambda name: f"of {printable(os.fsdecode(name))}")
        try:
            # one writer; what is written outlives the process, though not always a power cut
            self._db.executescript("PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=WAL;")
            self._db.executescript("PRAGMA synchronous=NORMAL; PRAGMA cache_size=-8000;" + TABLES)
        except sqlite3.OperationalError as error:
            self._db.close()
            if "locked" in str(error):
                raise UserError(f"{Path(path).parent} is in use by another run: wait until it ends") from None
            raise

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    def list_files(self, names: Iterable[str]) -> int:
        """Replace the listing; returns how many names there are."""
        with self.transaction():
            self._db.execute("DELETE FROM files")
            self._db.executemany(
                "INSERT OR IGNORE INTO files (name) VALUES (?)", ((os.fsencode(n),) for n in names)
            )
        return self.count_files()

    def add_file(self, name: str) -> None:
        """Add one name to the listing."""
        self._db.execute("INSERT OR IGNORE INTO files (name) VALUES (?)", (os.fsencode(name),))

    def count_files(self) -> int:
        """Number of names in the listing."""
        return self._db.execute("SELECT count(*) FROM files").fetchone()[0]

    def files(self) -> Iterator[tuple[str, str | None]]:
        """(name, output) in order of names; results and outputs may be written meanwhile."""
        for name, output in self._pages(
            "SELECT name, output FROM files WHERE name > ? ORDER BY name LIMIT ?"
        ):
            yield os.fsdecode(name), None if output is None else os.fsdecode(output)

    def claim(self, name: str, output: str, key: str) -> bool:
        """Give a listed file its output's name, unless another has one of the same key."""
        try:
            self._db.execute(
                "UPDATE files SET output = ?, key = ? WHERE name = ?",
                (os.fsencode(output), key, os.fsencode(name)),
            )
        except sqlite3.IntegrityError:
            return False
        return True

    def is_claimed(self, key: str) -> bool:
        """Whether a listed file has this key."""
        return self._db.execute("SELECT 1 FROM files WHERE key = ?", (key,)).fetchone() is not None

    def record(self, result: Result) -> None:
        """Keep a file's result in place of an earlier one."""
        self._db.execute("INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?)", _to_row(result))

    def result(self, name: str) -> Result | None:
        """A file's result, if it has one."""
        row = self._db.execute("SELECT * FROM results WHERE name = ?", (os.fsencode(name),)).fetchone()
        return None if row is None else _from_row(row)

    def results(self, *statuses: str) -> Iterator[Result]:
        """Results of listed files in order of names, of these statuses or of all."""
        wanted = f"AND status IN ({','.join('?' * len(statuses))})" if statuses else ""
        query = (
            f"SELECT results.* FROM results JOIN files USING (name) WHERE name > ? {wanted} "
            "ORDER BY name LIMIT ?"
        )
        yield from map(_from_row, self._pages(query, *statuses))

    def counts(self, status: str) -> list[tuple[str, int]]:
        """(reason, number) of listed files of a status, most frequent first."""
        return self._db.execute(
            "SELECT reason, count(*) AS n FROM results JOIN files USING (name) WHERE status = ? "
            "GROUP BY reason ORDER BY n DESC, reason",
            (status,),
        ).fetchall()

    def examples(self, status: str, reason: str) -> list[Result]:
        """The first few listed files of a status and reason."""
        rows = self._db.execute(
            "SELECT results.* FROM results JOIN files USING (name) WHERE status = ? AND reason = ? LIMIT ?",
            (status, reason, EXAMPLES),
        )
        return [_from_row(row) for row in rows]

    def drop_unlisted(self) -> int:
        """Forget results of files that are not listed; returns how many there were."""
        return self._db.execute("DELETE FROM results WHERE name NOT IN (SELECT name FROM files)").rowcount

    def settle_duplicates(self) -> int:
        """Make all accepted files of equal bytes duplicates of the first by name.

        Returns how many former duplicates have lost their first: they are forgotten, to be looked at again.
        """
        first = (
            "(SELECT other.name FROM results AS other WHERE other.sha256 = results.sha256 "
            "AND other.status = 'accepted' ORDER BY other.name LIMIT 1)"
        )
        lost = self._db.execute(
            f"DELETE FROM results WHERE status = 'duplicate' AND ifnull({first} > name, 1)"
        ).rowcount
        self._db.execute(
            f"UPDATE results SET status = 'duplicate', reason = 'exact_duplicate', detail = of({first}) "
            f"WHERE status = 'accepted' AND {first} < name"
        )
        return lost

    def note(self, key: str, value: str) -> None:
        """Keep a text under a key."""
        self._db.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (os.fsencode(key), value))

    def noted(self, key: str) -> str | None:
        """The text kept under a key."""
        row = self._db.execute("SELECT value FROM notes WHERE key = ?", (os.fsencode(key),)).fetchone()
        return None if row is None else row[0]

    def load(self, results: Iterable[Result]) -> None:
        """Keep many results, all or none of them."""
        with self.transaction():
            self._db.executemany(
                "INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?)", map(_to_row, results)
            )

    def _pages(self, query: str, *values: str) -> Iterator[tuple]:
        last = b""
        while rows := self._db.execute(query, (last, *values, PAGE)).fetchall():
            yield from rows
            last = rows[-1][0]

    def transaction(self) -> sqlite3.Connection:
        """As a context: what happens in it is kept at its end, or not at all where it raises."""
        self._db.execute("BEGIN")
        return self._db


def first_names(ledger: Ledger, limit: int | None) -> Iterator[tuple[str, str | None]]:
    """The listing, or its first `limit` names."""
    return islice(ledger.files(), limit)


def _to_row(result: Result) -> tuple:
    name, *middle, record = result
    return (os.fsencode(name), *middle, json.dumps(record))


def _from_row(row: tuple) -> Result:
    name, *middle, record = row
    return Result(os.fsdecode(name), *middle, json.loads(record))
