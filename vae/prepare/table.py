"""The rows of a job as one table of DuckDB, which sorts and joins more than fits into memory.

A row is accepted while its `reason` is empty. Selecting sets reasons; nothing is removed.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from vae.data.manifest import IMAGE_KEYS, SPLIT_KEYS
from vae.prepare.blocks import Block
from vae.prepare.database import connect_for_all, literal, sql
from vae.prepare.rows import RowFolder
from vae.prepare.source import Source
from vae.system.errors import DataError
from vae.system.files import open_new_text, utf8_text

OWN_KEYS = (*IMAGE_KEYS, *SPLIT_KEYS)  # of a manifest; others are metadata
FETCHED = 5000  # rows at a time


class Table:
    """All rows of some blocks: `images`, one row for each image, and `blocks`, one for each block.

    `n` orders the images: by the number of their block, and then by their number in it.
    """

    def __init__(self, folder: RowFolder, blocks: Sequence[Block]) -> None:
        """DataError for a file of rows that is damaged."""
        import duckdb

        self.scratch = folder.scratch
        self.error = duckdb.Error
        self.db = connect_for_all(self.scratch / "duckdb")
        self.blocks = blocks
        files = folder.files(blocks)
        columns = {
            "pattern": np.array(list(map(literal, files)), object),
            "path": np.array(list(map(str, files)), object),
            "block": np.arange(len(files)),
            "name": np.array([block.name for block in blocks], object),
        }
        try:
            with self.arrays("files", **columns):
                self.db.execute(sql("load"))
        except self.error as error:
            text = " ".join(str(error).split())
            path = next((path for path in files if str(path) in text), None)
            if path is None:  # a full disk, or too little memory
                raise
            raise DataError(f"{path} is damaged ({text[:200]}): delete it, and repeat the command") from error

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

    def load_manifest(self, source: Source) -> None:
        """Make a table `manifest` of path, sha256, split, and `more`: what others have written."""

        def rows() -> Iterator[dict[str, Any]]:
            for row in source.manifest():
                more = {utf8_text(k): v for k, v in row.items() if k not in OWN_KEYS and v is not None}
                path, sha256 = utf8_text(row["path"]), utf8_text(row["sha256"])
                yield {"path": path, "sha256": sha256, "split": row.get("split"), "more": more or None}

        path = self.scratch / "manifest.jsonl"
        with open_new_text(path) as file:
            file.writelines(json.dumps(row) + "\n" for row in rows())
        self.run(sql("manifest"), literal(path))
        path.unlink()

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
