"""The rows of a job as one table of DuckDB, which sorts and joins more than fits into memory.

A row is accepted while its `reason` is empty. Selecting sets reasons; nothing is removed.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from vae.prepare.blocks import Block, Source
from vae.prepare.parquet_source import OFFLINE, literal
from vae.prepare.rows import OF_BLOCK, RowFolder
from vae.system.errors import DataError
from vae.system.files import open_new_text, utf8_text
from vae.system.host import GIB, free_memory

STATS = (  # of vae/prepare/measures.py
    "STRUCT(channel_means DOUBLE[3], channel_squares DOUBLE[3], brightness DOUBLE, contrast DOUBLE, "
    "sharpness DOUBLE, jpeg_quality DOUBLE)"
)
COLUMNS = {
    "number": "INTEGER", "name": "VARCHAR", "bytes": "BIGINT", "sha256": "VARCHAR", "format": "VARCHAR",
    "width": "INTEGER", "height": "INTEGER", "phash": "VARCHAR", "flags": "VARCHAR[]", "reason": "VARCHAR",
    "detail": "VARCHAR", "metadata": "JSON", "stats": STATS,
    "made": "STRUCT(path VARCHAR, sha256 VARCHAR, bytes BIGINT, width INTEGER, height INTEGER)",
    "position": "BIGINT", "crc32": "BIGINT", "text_start": "BIGINT", "text_end": "BIGINT",
}  # fmt: skip
# Of a manifest: what --mode preprocess and --mode split write.
MANIFEST_KEYS = {"path", "sha256", "width", "height", "source", "flags", "split", "fold", "phash"}
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

    def __init__(self, folder: RowFolder, blocks: Sequence[Block]) -> None:
        """DataError for a file of rows that is damaged."""
        import duckdb

        self.scratch = folder.scratch
        self.error = duckdb.Error
        memory = int(max(0.5 * GIB, min(MAX_MEMORY, free_memory() * MEMORY_SHARE)))
        self.db = duckdb.connect(
            config={
                "memory_limit": f"{memory // 2**20}MiB",
                "temp_directory": str(self.scratch / "duckdb"),
                **OFFLINE,
            }
        )
        self.blocks = blocks
        self._load([folder.path(block) for block in blocks])

    def _load(self, files: list[Path]) -> None:
        self.db.register("files", {"path": np.array([str(path) for path in files], object),
                                   "block": np.arange(len(files)),
                                   "name": np.array([block.name for block in self.blocks], object),
                                   "count": np.array([block.count for block in self.blocks])})  # fmt: skip
        try:
            rows = f"SELECT * FROM {_reader(COLUMNS, 'filename = true')}"
            self.run(
                f"CREATE TEMP TABLE rows AS SELECT f.block, r.* EXCLUDE (filename) FROM ({rows}) r "
                "JOIN files f ON f.path = r.filename",
                [literal(path) for path in files],
            )
        except self.error as error:
            text = " ".join(str(error).split())
            path = next((path for path in files if str(path) in text), files[0].parent)
            raise DataError(f"{path} is damaged ({text[:200]}): delete it, and repeat the command") from error
        # A file must have a row about the block and, unless the block is broken, as many as it has images.
        damaged = self.one(f"""
            WITH numbers AS (
                SELECT block, number, count(*) > 1 OR number IS NULL OR
                    number <> {OF_BLOCK} AND bool_or({_WRONG}) IS NOT FALSE AS wrong
                FROM rows GROUP BY block, number
            ), found AS (
                SELECT block, bool_or(wrong) AS wrong, bool_or(number = {OF_BLOCK}) AS is_whole,
                    count(*) - 1 AS images
                FROM numbers GROUP BY block
            ), broken AS (SELECT block FROM rows WHERE number = {OF_BLOCK} AND reason IS NOT NULL)
            SELECT path FROM files LEFT JOIN found USING (block)
            WHERE wrong IS NOT FALSE OR NOT is_whole
                OR files.count NOT IN (0, images) AND block NOT IN (SELECT block FROM broken)
            ORDER BY block LIMIT 1
        """)
        if damaged:
            raise DataError(f"{damaged[0]} is damaged: delete it, and repeat the command")
        self.run(
            "CREATE TABLE images AS SELECT (row_number() OVER (ORDER BY block, number) - 1)::BIGINT AS n, "
            "* REPLACE (coalesce(reason, '') AS reason, coalesce(flags, []) AS flags), "
            f"'' AS subset, NULL::VARCHAR AS grp FROM rows WHERE number <> {OF_BLOCK} ORDER BY block, number"
        )
        self.run(
            "CREATE TABLE blocks AS SELECT block, files.name, reason, detail, metadata FROM rows "
            f"JOIN files USING (block) WHERE number = {OF_BLOCK}"
        )
        self.run("DROP TABLE rows")

    def run(self, query: str, *values: Any) -> None:
        """Execute a statement."""
        self.db.execute(query, list(values))

    def leave_out(self, reason: str, where: str, *values: Any, detail: str = "''", source: str = "") -> None:
        """Set the reason of the accepted images for which a condition is true, with a table to join."""
        joined = f"FROM {source}" if source else ""
        self.run(
            f"UPDATE images SET reason = '{reason}', detail = {detail} {joined} "
            f"WHERE images.reason = '' AND ({where})",
            *values,
        )

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

    def json_rows(self, query: str, *values: Any) -> Iterator[str]:
        """The rows of a query as JSON objects, by the names of its columns."""
        names = [name for name, *_ in self.all(f"DESCRIBE {query}", *values)]
        for row in self.stream(query, *values):
            yield json.dumps(dict(zip(names, row, strict=True)))

    def digest(self, settings: Any, *queries: str) -> str:
        """A hash of settings and of the rows of some queries."""
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for query in queries:
            for row in self.stream(query):
                digest.update(repr(row).encode())
        return digest.hexdigest()

    def columns(self, query: str, *values: Any) -> dict[str, np.ndarray]:
        """The columns of a query."""
        return self.db.execute(query, list(values)).fetchnumpy()

    @contextmanager
    def arrays(self, table: str, **columns: np.ndarray) -> Iterator[None]:
        """Arrays as a table within this context."""
        self.db.register(table, columns)
        try:
            yield
        finally:
            self.db.unregister(table)

    def lines(self, name: str, rows: Iterator[dict[str, Any]], columns: dict[str, str]) -> None:
        """Make a table of rows, which are streamed through a file."""
        path = self.scratch / f"{name}.jsonl"
        with open_new_text(path) as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        self.run(f"CREATE TABLE {name} AS SELECT * FROM {_reader(columns)}", literal(path))
        path.unlink()

    def load_manifest(self, source: Source) -> None:
        """Make a table `manifest` of path, sha256, split, and `more`: what others have written."""

        def rows() -> Iterator[dict[str, Any]]:
            for row in source.manifest():
                more = {utf8_text(k): v for k, v in row.items() if k not in MANIFEST_KEYS and v is not None}
                path, sha256 = utf8_text(row["path"]), utf8_text(row["sha256"])
                yield {"path": path, "sha256": sha256, "split": row.get("split"), "more": more or None}

        columns = {"path": "VARCHAR", "sha256": "VARCHAR", "split": "VARCHAR", "more": "JSON"}
        self.lines("manifest", rows(), columns)

    def lock(self) -> None:
        """Refuse everything outside of the tables from now on: an expression of the user follows."""
        self.db.execute("SET enable_external_access = false")
        self.db.execute("SET lock_configuration = true")

    def count(self, where: str = "true", *values: Any) -> int:
        """Number of images for which a condition is true."""
        return int(self.all(f"SELECT count(*) FROM images WHERE {where}", *values)[0][0])

    @property
    def accepted(self) -> int:
        """Number of accepted images."""
        return self.count("reason = ''")

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


def _reader(columns: dict[str, str], more: str = "") -> str:
    """SQL that reads JSON lines with these columns; the path is its parameter."""
    listed = ", ".join(f"\"{name}\": '{kind}'" for name, kind in columns.items())
    return (
        f"read_json(?, columns = {{{listed}}}, format = 'newline_delimited', "
        f"maximum_object_size = 67108864{', ' if more else ''}{more})"
    )
