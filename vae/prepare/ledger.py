"""A database on disk with the names of all files and the result for each, so that memory does not grow.

Names are stored as the bytes they have on disk, so every name is allowed. They are returned in the order of
these bytes.
"""

import json
import os
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from vae.system.console import printable
from vae.system.errors import UserError
from vae.system.files import parse_json

ACCEPTED, REJECTED, DUPLICATE = "accepted", "rejected", "duplicate"
EXACT_DUPLICATE, NEAR_DUPLICATE = "exact_duplicate", "near_duplicate"  # reasons of DUPLICATE
KNOWN = "known"  # an image of the parent of a dataset of shards
INPUT_DIR = "input_dir"  # key of a note: the folder of the files
OF_PART = "of part "  # the beginning of keys of notes that a merge needs
PAGE = 1000  # rows read at a time, so that the caller can write in between
EXAMPLES = 5

TABLES = """
CREATE TABLE IF NOT EXISTS files (name BLOB PRIMARY KEY, output BLOB, key TEXT) WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS files_by_key ON files (key);
CREATE TABLE IF NOT EXISTS results (
    name BLOB PRIMARY KEY, status TEXT, reason TEXT, detail TEXT,
    size INTEGER, mtime_ns INTEGER, sha256 TEXT, record TEXT) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS results_by_hash ON results (sha256, name) WHERE sha256 IS NOT NULL;
CREATE TABLE IF NOT EXISTS contents (
    name BLOB PRIMARY KEY, size INTEGER, mtime_ns INTEGER, sha256 TEXT, pending INTEGER) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS contents_by_size ON contents (size, pending);
CREATE INDEX IF NOT EXISTS contents_by_hash ON contents (sha256, name) WHERE sha256 IS NOT NULL;
CREATE TABLE IF NOT EXISTS notes (key BLOB PRIMARY KEY, value TEXT) WITHOUT ROWID;
"""

SAME_SIZE = "SELECT 1 FROM contents AS other WHERE other.size = contents.size AND other.name != contents.name"
POSSIBLE_DUPLICATES = (
    "FROM contents WHERE sha256 IS NULL AND size >= 0 "
    f"AND (EXISTS ({SAME_SIZE} AND other.pending) OR pending AND EXISTS ({SAME_SIZE}))"
)


class Result(NamedTuple):
    """The outcome for one file."""

    name: str
    status: str
    reason: str = ""
    detail: str = ""
    size: int = 0  # of the file, bytes
    mtime_ns: int = 0
    sha256: str | None = None  # of the file
    record: dict[str, Any] = {}  # noqa: RUF012 - never modified; further values of the mode


class Content(NamedTuple):
    """The content of a file on disk, and whether it still has to be processed."""

    name: str
    size: int  # bytes; -1 if the file cannot be examined
    mtime_ns: int
    sha256: str | None  # None: not computed
    pending: bool


class Skips:
    """Counts and a few examples of entries that a walk skips; pass `add` to walk_images."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = defaultdict(list)

    def add(self, name: str, code: str) -> None:
        """Count one entry."""
        self.counts[code] += 1
        if len(self.examples[code]) < EXAMPLES:
            self.examples[code].append(name)


class Ledger:
    """A listing of files and their results. Every change is on disk at once and survives a killed process."""

    def __init__(self, path: str | os.PathLike[str], lock_seconds: float = 2.0):
        """Open or create it; UserError if another process has it for longer than `lock_seconds`."""
        uri = Path(path).absolute().as_uri()  # so that `inherit` can give options
        self._db = sqlite3.connect(
            uri, timeout=lock_seconds, isolation_level=None, uri=True
        )  # each statement is a transaction
        self._db.create_function("of", 1, lambda name: f"of {printable(os.fsdecode(name))}")
        try:
            # one writer; committed changes survive the end of the process, but not always a power cut
            self._db.executescript("PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=WAL;")
            self._db.executescript("PRAGMA synchronous=NORMAL; PRAGMA cache_size=-8000;" + TABLES)
        except sqlite3.OperationalError as error:
            self._db.close()
            if "locked" in str(error):
                raise UserError(
                    f"{Path(path).parent} is in use by another run: wait until that run ends"
                ) from None
            raise

    def close(self) -> None:
        """Close the database file."""
        self._db.close()

    def list_files(self, names: Iterable[str]) -> int:
        """Replace the listing; returns the number of names."""
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

    def files(self, limit: int | None = None) -> Iterator[tuple[str, str | None]]:
        """The first (name, output) in the order of names; results and outputs may be written in between."""
        rows = self._pages("SELECT name, output FROM files WHERE name > ? ORDER BY name LIMIT ?")
        for name, output in islice(rows, limit):
            yield os.fsdecode(name), None if output is None else os.fsdecode(output)

    def claim(self, name: str, output: str, key: str) -> bool:
        """Assign an output name to a listed file; returns False if another file has the same key."""
        try:
            self._db.execute(
                "UPDATE files SET output = ?, key = ? WHERE name = ?",
                (os.fsencode(output), key, os.fsencode(name)),
            )
        except sqlite3.IntegrityError:
            return False
        return True

    def inherit(self, path: Path) -> None:
        """Take over the results of listed files from another ledger about the same input folder.

        The other one must be closed; it is not changed.
        """
        if not path.is_file() or path.with_name(f"{path.name}-wal").exists():
            return  # a killed run has left it incomplete
        self._db.execute("ATTACH DATABASE ? AS other", (f"{path.absolute().as_uri()}?immutable=1",))
        self._db.execute(
            "INSERT OR IGNORE INTO main.results SELECT theirs.* FROM main.files "
            "JOIN other.results AS theirs USING (name) WHERE EXISTS "
            "(SELECT 1 FROM main.notes JOIN other.notes USING (key, value) WHERE key = ?)",
            (os.fsencode(INPUT_DIR),),
        )
        self._db.execute("DETACH DATABASE other")

    def join(self, path: Path) -> None:
        """Add the files of another, closed ledger to the listing, their results, and its notes OF_PART."""
        self._db.execute("ATTACH DATABASE ? AS other", (f"{path.absolute().as_uri()}?immutable=1",))
        self._db.execute("INSERT OR IGNORE INTO main.files (name) SELECT name FROM other.files")
        self._db.execute(
            "INSERT OR REPLACE INTO main.results SELECT theirs.* FROM other.files "
            "JOIN other.results AS theirs USING (name)"
        )
        self._db.execute(
            "INSERT OR REPLACE INTO main.notes SELECT * FROM other.notes WHERE key >= ? AND key < ?",
            _keys(OF_PART),
        )
        self._db.execute("DETACH DATABASE other")

    def is_claimed(self, key: str) -> bool:
        """Whether a listed file has this key."""
        return self._db.execute("SELECT 1 FROM files WHERE key = ?", (key,)).fetchone() is not None

    def record(self, result: Result) -> None:
        """Store a file's result; it replaces an earlier one."""
        self._db.execute("INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?)", _to_row(result))

    def result(self, name: str) -> Result | None:
        """A file's result, or None."""
        row = self._db.execute("SELECT * FROM results WHERE name = ?", (os.fsencode(name),)).fetchone()
        return None if row is None else _from_row(row)

    def results(self, *statuses: str) -> Iterator[Result]:
        """Results of listed files in the order of names, with one of these statuses or with any."""
        wanted = f"AND status IN ({','.join('?' * len(statuses))})" if statuses else ""
        query = (
            f"SELECT results.* FROM results JOIN files USING (name) WHERE name > ? {wanted} "
            "ORDER BY name LIMIT ?"
        )
        yield from map(_from_row, self._pages(query, *statuses))

    def accepted_by_hash(self) -> Iterator[Result]:
        """Results of accepted, listed files in the order of the hashes of their bytes."""
        query = (
            "SELECT results.* FROM results JOIN files USING (name) WHERE sha256 > ? AND status = 'accepted' "
            "ORDER BY sha256 LIMIT ?"
        )
        last = ""
        while rows := self._db.execute(query, (last, PAGE)).fetchall():
            yield from map(_from_row, rows)
            last = _from_row(rows[-1]).sha256 or ""

    def accepted_with_hash(self, start: str) -> Result | None:
        """The accepted, listed file whose hash begins with these hexadecimal digits."""
        row = self._db.execute(
            "SELECT results.* FROM results JOIN files USING (name) WHERE sha256 >= ? AND sha256 < ? "
            "AND status = 'accepted' LIMIT 1",
            (start, f"{start}g"),
        ).fetchone()
        return None if row is None else _from_row(row)

    def counts(self, status: str) -> list[tuple[str, int]]:
        """(reason, number of listed files) for a status, most frequent first."""
        return self._db.execute(
            "SELECT reason, count(*) AS n FROM results JOIN files USING (name) WHERE status = ? "
            "GROUP BY reason ORDER BY n DESC, reason",
            (status,),
        ).fetchall()

    def rejected_examples(self, reason: str) -> list[Result]:
        """Results of the first few listed files that were rejected for this reason."""
        rows = self._db.execute(
            "SELECT results.* FROM results JOIN files USING (name) WHERE status = 'rejected' AND reason = ? "
            "LIMIT ?",
            (reason, EXAMPLES),
        )
        return [_from_row(row) for row in rows]

    def forget(self, name: str) -> None:
        """Delete a file's result, so that it is processed again."""
        self._db.execute("DELETE FROM results WHERE name = ?", (os.fsencode(name),))

    def drop_unlisted(self) -> int:
        """Delete results of files that are not listed; returns their number."""
        return self._db.execute("DELETE FROM results WHERE name NOT IN (SELECT name FROM files)").rowcount

    def settle_duplicates(self) -> int:
        """Mark accepted files with equal bytes as duplicates of the first of them by name.

        If the first file of earlier duplicates no longer exists, their results are deleted, so that they are
        processed again. Returns the number of deleted results.
        """
        first = (
            "(SELECT other.name FROM results AS other WHERE other.sha256 = results.sha256 "
            "AND (other.status = 'accepted' OR other.reason = 'near_duplicate') ORDER BY other.name LIMIT 1)"
        )
        lost = self._db.execute(
            f"DELETE FROM results WHERE reason = 'exact_duplicate' AND ifnull({first} > name, 1)"
        ).rowcount
        self._db.execute(
            f"UPDATE results SET status = 'duplicate', reason = 'exact_duplicate', detail = of({first}) "
            f"WHERE status IN ('accepted', 'duplicate') AND {first} < name"
        )
        return lost

    def list_contents(self, contents: Iterable[Content]) -> None:
        """Replace the list of contents; a file with the same size and time as before keeps its hash."""
        with self.transaction():
            self._db.execute("UPDATE contents SET pending = NULL")
            for content in contents:
                self._db.execute(
                    "INSERT INTO contents VALUES (?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
                    "size = excluded.size, mtime_ns = excluded.mtime_ns, pending = excluded.pending, "
                    "sha256 = CASE WHEN excluded.sha256 IS NULL AND size = excluded.size "
                    "AND mtime_ns = excluded.mtime_ns THEN sha256 ELSE excluded.sha256 END",
                    (os.fsencode(content.name), *content[1:]),
                )
            self._db.execute("DELETE FROM contents WHERE pending IS NULL")

    def pending(self) -> Iterator[Content]:
        """The contents that have to be processed, in the order of names."""
        for row in self._pages("SELECT * FROM contents WHERE pending AND name > ? ORDER BY name LIMIT ?"):
            yield Content(os.fsdecode(row[0]), *row[1:])

    def count_pending(self) -> int:
        """Number of contents that have to be processed."""
        return self._db.execute("SELECT count(*) FROM contents WHERE pending").fetchone()[0]

    def possible_duplicates(self) -> Iterator[str]:
        """Names without a hash that have the size of another file, if one of the two is pending."""
        query = f"SELECT name {POSSIBLE_DUPLICATES} AND name > ? ORDER BY name LIMIT ?"
        yield from (os.fsdecode(name) for (name,) in self._pages(query))

    def count_possible_duplicates(self) -> int:
        """Number of names that `possible_duplicates` yields."""
        return self._db.execute(f"SELECT count(*) {POSSIBLE_DUPLICATES}").fetchone()[0]

    def set_hash(self, name: str, sha256: str) -> None:
        """Store the hash of a listed content."""
        self._db.execute("UPDATE contents SET sha256 = ? WHERE name = ?", (sha256, os.fsencode(name)))

    def first_with_hash(self, sha256: str) -> Content:
        """The first listed content by name with this hash."""
        row = self._db.execute(
            "SELECT * FROM contents WHERE sha256 = ? ORDER BY name LIMIT 1", (sha256,)
        ).fetchone()
        return Content(os.fsdecode(row[0]), *row[1:])

    def output_of(self, name: str) -> str:
        """The output name of a listed file."""
        (output,) = self._db.execute(
            "SELECT output FROM files WHERE name = ?", (os.fsencode(name),)
        ).fetchone()
        return os.fsdecode(output)

    def note(self, key: str, value: str) -> None:
        """Store a text under a key."""
        self._db.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (os.fsencode(key), value))

    def noted(self, key: str) -> str | None:
        """The text stored under a key, or None."""
        row = self._db.execute("SELECT value FROM notes WHERE key = ?", (os.fsencode(key),)).fetchone()
        return None if row is None else row[0]

    def notes(self, prefix: str) -> list[str]:
        """All texts whose key begins like this."""
        rows = self._db.execute(
            "SELECT value FROM notes WHERE key >= ? AND key < ? ORDER BY key", _keys(prefix)
        )
        return [value for (value,) in rows]

    def forget_notes(self, prefix: str) -> None:
        """Remove all texts whose key begins like this."""
        self._db.execute("DELETE FROM notes WHERE key >= ? AND key < ?", _keys(prefix))

    def load(self, results: Iterable[Result]) -> None:
        """Store many results, all of them or none."""
        with self.transaction():
            self._db.executemany(
                "INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?)", map(_to_row, results)
            )

    def _pages(self, query: str, *values: str) -> Iterator[tuple[Any, ...]]:
        last = b""
        while rows := self._db.execute(query, (last, *values, PAGE)).fetchall():
            yield from rows
            last = rows[-1][0]

    def transaction(self) -> sqlite3.Connection:
        """A context manager: changes within it are committed at its end, or discarded if it raises."""
        self._db.execute("BEGIN")
        return self._db


def _keys(prefix: str) -> tuple[bytes, bytes]:
    """The first key that begins like this, and one that is after all of them."""
    return os.fsencode(prefix), os.fsencode(prefix) + b"\xff"


def _to_row(result: Result) -> tuple[Any, ...]:
    return (os.fsencode(result.name), *result[1:-1], json.dumps(result.record))


def _from_row(row: tuple[Any, ...]) -> Result:
    return Result._make((os.fsdecode(row[0]), *row[1:-1], parse_json(row[-1])))
