"""The rows of a job as one table of DuckDB, which sorts and joins more than fits into memory.

A row is accepted while its `reason` is empty. Selecting sets reasons; nothing is removed.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from vae.prepare.blocks import Block
from vae.prepare.parquet_source import OFFLINE, literal
from vae.prepare.rows import OF_BLOCK, RowFolder
from vae.system.errors import DataError, UserError
from vae.system.host import GIB, free_memory

COLUMNS = {
    "number": "INTEGER", "name": "VARCHAR", "bytes": "BIGINT", "sha256": "VARCHAR", "format": "VARCHAR",
    "width": "INTEGER", "height": "INTEGER", "phash": "VARCHAR", "flags": "VARCHAR[]", "reason": "VARCHAR",
    "detail": "VARCHAR", "metadata": "JSON", "stats": "JSON", "made": "JSON", "position": "BIGINT",
    "crc32": "BIGINT", "text_start": "BIGINT", "text_end": "BIGINT",
}  # fmt: skip
MEMORY_SHARE, MAX_MEMORY = 0.5, 8 * GIB  # of free memory; more rows go to the scratch folder
FETCHED = 5000  # rows at a time
# What a row that is accepted must have: the file may be damaged, or from a stranger.
_WRONG = """
    number < 0 OR name IS NULL OR reason IS NULL AND (
        sha256 IS NULL OR NOT regexp_full_match(sha256, '[0-9a-f]{64}') OR bytes IS NULL OR bytes < 1
        OR width IS NULL OR height IS NULL OR width < 1 OR height < 1 OR format IS NULL
        OR phash IS NOT NULL AND NOT regexp_full_match(phash, '[0-9a-f]{32}')
    )
"""


class Table:
    """All rows of some blocks: `images`, one row for each image, and `blocks`, one for each block.

    `n` orders the images: by the number of their block, and then by their number in it.
    """

    def __init__(self, folder: RowFolder, blocks: Sequence[Block], scratch: Path) -> None:
        """DataError for a file of rows that is damaged."""
        import duckdb

        self.scratch, self.error = scratch, duckdb.Error
        memory = int(max(0.5 * GIB, min(MAX_MEMORY, free_memory() * MEMORY_SHARE)))
        self.db = duckdb.connect(
            config={
                "memory_limit": f"{memory // 2**20}MiB",
                "temp_directory": str(scratch / "duckdb"),
                **OFFLINE,
            }
        )
        self.blocks = blocks
        self._load([folder.path(block) for block in blocks])

    def _load(self, files: list[Path]) -> None:
        columns = ", ".join(f"\"{name}\": '{kind}'" for name, kind in COLUMNS.items())
        numbers = {"path": np.array([str(path) for path in files], object), "block": np.arange(len(files))}
        self.db.register("files", numbers)
        try:
            self.db.execute(
                "CREATE TEMP TABLE rows AS SELECT f.block, r.* EXCLUDE (filename) FROM "
                f"read_json(?, columns = {{{columns}}}, format = 'newline_delimited', filename = true, "
                "maximum_object_size = 67108864) r JOIN files f ON f.path = r.filename",
                [[literal(path) for path in files]],
            )
        except self.error as error:
            text = " ".join(str(error).split())
            path = next((path for path in files if str(path) in text), files[0].parent)
            raise DataError(f"{path} is damaged ({text[:200]}): delete it, and repeat the command") from error
        wrong = self.one(
            f"SELECT block FROM (SELECT block, number, bool_or({_WRONG}) AS wrong, count(*) AS rows FROM "
            "rows "
            f"WHERE number IS DISTINCT FROM {OF_BLOCK} GROUP BY block, number) WHERE wrong IS NOT FALSE OR "
            "rows > 1 "
            "OR number IS NULL LIMIT 1"
        )
        counts = dict(self.all(f"SELECT block, count(*) FROM rows WHERE number <> {OF_BLOCK} GROUP BY block"))
        short = [n for n, block in enumerate(self.blocks) if block.count not in (0, counts.get(n, 0))]
        whole = {n for (n,) in self.all(f"SELECT block FROM rows WHERE number = {OF_BLOCK}")}
        short += [n for n in range(len(files)) if n not in whole]
        broken = {
            n for (n,) in self.all(f"SELECT block FROM rows WHERE number = {OF_BLOCK} AND reason IS NOT NULL")
        }
        bad = [wrong[0]] if wrong else [n for n in short if n not in broken]
        if bad:
            raise DataError(f"{files[bad[0]]} is damaged: delete it, and repeat the command")
        self.db.execute(
            f"CREATE TABLE images AS SELECT (row_number() OVER (ORDER BY block, number) - 1)::BIGINT AS n, "
            "* REPLACE (coalesce(reason, '') AS reason, coalesce(flags, []) AS flags), '' AS duplicates, "
            f"'' AS subset FROM rows WHERE number <> {OF_BLOCK} ORDER BY block, number"
        )
        self.db.execute(
            "CREATE TABLE blocks AS SELECT block, reason, detail, metadata FROM rows WHERE number = "
            f"{OF_BLOCK}"
        )
        self.db.execute("DROP TABLE rows")

    def run(self, query: str, *values: Any) -> None:
        """Execute a statement."""
        self.db.execute(query, list(values))

    def all(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        return self.db.execute(query, list(values)).fetchall()

    def one(self, query: str, *values: Any) -> tuple[Any, ...] | None:
        """The first row of a query."""
        return self.db.execute(query, list(values)).fetchone()

    def stream(self, query: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        """The rows of a query, some at a time; other queries may run meanwhile."""
        cursor = self.db.cursor()
        cursor.execute(query, list(values))
        while rows := cursor.fetchmany(FETCHED):
            yield from rows

    def columns(self, query: str, *values: Any) -> dict[str, np.ndarray]:
        """The columns of a query."""
        return self.db.execute(query, list(values)).fetchnumpy()

    @contextmanager
    def arrays(self, name: str, **columns: np.ndarray) -> Iterator[None]:
        """Arrays as a table within this context."""
        self.db.register(name, columns)
        try:
            yield
        finally:
            self.db.unregister(name)

    def lines(self, name: str, rows: Iterator[dict[str, Any]], columns: dict[str, str]) -> None:
        """Make a table of rows, which are streamed through a file."""
        path = self.scratch / f"{name}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        listed = ", ".join(f"\"{column}\": '{kind}'" for column, kind in columns.items())
        self.db.execute(
            f"CREATE TABLE {name} AS SELECT * FROM read_json(?, columns = {{{listed}}}, "
            "format = 'newline_delimited', maximum_object_size = 67108864)",
            [literal(path)],
        )
        path.unlink()

    def lock(self) -> None:
        """Refuse everything outside of the tables from now on: an expression of the user follows."""
        self.db.execute("SET enable_external_access = false")
        self.db.execute("SET lock_configuration = true")

    @property
    def accepted(self) -> int:
        """Number of accepted images."""
        row = self.one("SELECT count(*) FROM images WHERE reason = ''")
        assert row is not None
        return int(row[0])

    def counts(self) -> list[tuple[str, int]]:
        """(reason, number of images), most frequent first."""
        query = "SELECT reason, count(*) AS c FROM images WHERE reason <> '' GROUP BY reason"
        return [(reason, count) for reason, count in self.all(f"{query} ORDER BY c DESC, reason")]

    def examples(self, reason: str, count: int) -> list[tuple[str, str]]:
        """Name and detail of the first images with a reason."""
        query = "SELECT name, coalesce(detail, '') FROM images WHERE reason = ? ORDER BY n LIMIT ?"
        return [(name, detail) for name, detail in self.all(query, reason, count)]

    def broken_blocks(self) -> list[tuple[int, str, str]]:
        """Number, reason and detail of the blocks that could not be read to their end."""
        query = "SELECT block, reason, detail FROM blocks WHERE reason IS NOT NULL ORDER BY block"
        return [(block, reason, detail or "") for block, reason, detail in self.all(query)]


def refuse_where(text: str, reason: str) -> UserError:
    """The error about --where."""
    return UserError(
        f'--where {text}: {reason}: give an SQL expression of columns, such as "aesthetic >= 5 and lang = '
        "'en'\""
    )
