"""Parquet files with image bytes, as Hugging Face `datasets` and img2dataset write them; DuckDB reads them.

A block is a row group, or a whole file on a remote store, which is copied to this machine while it is read.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from vae.images.formats import EXTENSIONS_OF, BadImageError, sniff_format
from vae.prepare.blocks import FLAG, Block, File, Item, block_id, common_folder, stamp_of
from vae.prepare.database import as_json, connect, has_bytes, literal, quoted, short, sql
from vae.shards.store import StoreFile
from vae.system.console import printable
from vae.system.errors import DataError, UserError


def parquet_blocks(files: Sequence[File], image_column: str | None) -> Iterator["ParquetBlock"]:
    """The row groups of all files; DataError for a file that is no Parquet, or has no images."""
    names = common_folder(files, FLAG)[1] if files else []
    for file, name in zip(files, names, strict=True):
        first = 0
        for rows in [0] if isinstance(file, StoreFile) else _row_groups(file, image_column):
            yield ParquetBlock(
                id=block_id("parquet", "columns as JSON", stamp_of(file), first, rows, image_column),
                file=file,
                name=printable(name),
                count=rows,
                first=first,
                image_column=image_column,
            )
            first += rows


def _row_groups(file: Path, image_column: str | None) -> list[int]:
    """The number of rows of each row group."""
    with _reading(file):
        db = connect()
        _columns(db, file, image_column, file)  # an error, if it has no images
        return [rows for _, rows in db.execute(sql("row_groups"), [literal(file)]).fetchall()]


class _Columns(NamedTuple):
    """The expressions of a row in SQL."""

    data: str  # the bytes of its image
    source: str  # the path of its image, if there is one beside the bytes
    images: str  # how many there are
    others: str  # all other columns, as JSON


def _columns(db: Any, path: Path, image_column: str | None, file: File) -> _Columns:
    """Return what a query reads of a file; UserError if no column, or more than one, has images.

    `path` is the local copy of the `file` that messages name.
    """
    table = db.sql("SELECT * FROM read_parquet(?)", params=[literal(path)])
    kinds = dict(zip(table.columns, table.types, strict=True))
    images = {name: image for name, kind in kinds.items() if (image := _image_in(quoted(name), kind))}
    if image_column is not None:
        if image_column not in images:
            raise UserError(
                f"--image_column {image_column}: {file} has no such column of images (columns: "
                f"{', '.join(f'{name} {kind}' for name, kind in kinds.items())[:500]})"
            )
        images = {image_column: images[image_column]}
    if not images:
        raise DataError(
            f"{FLAG} {file} has no column with the bytes of images (columns: {', '.join(kinds)[:500]}): give "
            "the image files or tar files that it names, and the table as --join"
        )
    if len(images) > 1:
        raise UserError(
            f"{FLAG} {file} has several columns of images: choose one by --image_column {next(iter(images))}"
        )
    (image,) = images.values()
    return _Columns(*image, as_json({name: kind for name, kind in kinds.items() if not has_bytes(kind)}))


def _image_in(value: str, kind: Any) -> tuple[str, str, str] | None:
    """Bytes, path and count of the images that values of this type are; None if they are none.

    Bytes, a struct with the field `bytes`, as `datasets` writes it in any order, or a list of one of these.
    """
    if kind.id == "blob":
        return value, "NULL", "1"
    if kind.id == "list":
        inner = _image_in(f"({value})[1]", kind.child)
        return inner and (inner[0], inner[1], f"len({value})")
    if kind.id == "struct":
        fields = {name.lower(): (f"{value}.{quoted(name)}", of.id) for name, of in kind.children}
        data, of = fields.get("bytes", ("", ""))
        path, text = fields.get("path", ("", ""))
        return (data, path if text == "varchar" else "NULL", "1") if of == "blob" else None
    return None


def _label_names(db: Any, path: Path) -> dict[str, dict[int, str]]:
    """The names of the numbers of each column of labels, which `datasets` writes into the file's metadata."""
    query = "SELECT decode(value) FROM parquet_kv_metadata(?) WHERE decode(key) = 'huggingface'"
    row = db.execute(query, [literal(path)]).fetchone()
    try:
        features = json.loads(row[0])["info"]["features"] if row else {}
        return {
            column: dict(enumerate(map(str, feature["names"])))
            for column, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        }
    except (ValueError, KeyError, TypeError, AttributeError):  # another program wrote them
        return {}


@contextmanager
def _reading(file: File) -> Iterator[None]:
    """Raise errors of reading a file within this context as DataError."""
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        raise _unreadable(file, error) from error
    except OSError as error:
        raise DataError(f"{FLAG} {file} cannot be read: {error.strerror}") from error


def _unreadable(file: File, error: Exception) -> DataError:
    import duckdb

    # DuckDB has no class of its own for a file with a wrong content.
    is_damaged = isinstance(error, duckdb.InvalidInputException) or type(error) is duckdb.Error
    reason = "is no Parquet file, or is damaged: copy it again" if is_damaged else "cannot be read"
    return DataError(f"{FLAG} {file} {reason} ({short(error)})")


@dataclass(frozen=True, kw_only=True)
class ParquetBlock(Block):
    """A row group of a Parquet file, or all of a remote one."""

    first: int
    image_column: str | None

    def items(self, facts: dict[str, Any] | None = None) -> Iterator[Item]:
        """Yield its images with the other columns; DataError if it cannot be read."""
        scratch = TemporaryDirectory(prefix="vae-trainer-")
        with self.local_file() as path, scratch as folder, _reading(self.file):
            yield from self._items(connect(folder), path)

    def _items(self, db: Any, path: Path) -> Iterator[Item]:
        columns = _columns(db, path, self.image_column, self.file)
        labels = _label_names(db, path)
        last = self.first + self.count - 1 if self.count else 2**62
        rows = db.execute(
            f"SELECT {', '.join(columns)} FROM read_parquet(?, file_row_number = true) "
            "WHERE file_row_number BETWEEN ? AND ? ORDER BY file_row_number",
            [literal(path), self.first, last],
        )
        number = self.first
        while (row := rows.fetchone()) is not None:
            data, source, count, others = row
            metadata = {name: value for name, value in json.loads(others).items() if value is not None}
            metadata |= {k: of[metadata[k]] for k, of in labels.items() if metadata.get(k) in of}
            if source is not None:
                metadata.setdefault("path", source)
            content: bytes | BadImageError
            if (count or 0) > 1:
                content = BadImageError("several_images", f"the row has a list of {count}")
            elif data is None:
                content = BadImageError("empty", "the column is null in this row")
            else:
                content = bytes(data)
            yield Item(f"{self.name}/{number:08}{_extension(data)}", content, metadata)
            number += 1


def _extension(data: bytes | None) -> str:
    try:
        return EXTENSIONS_OF[sniff_format(data or b"", first_frame=True)][0]
    except BadImageError:
        return ""
