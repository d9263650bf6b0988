"""The tables of --join, one after the other: more metadata of images, by the values of a column."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vae.config.declare import nearest
from vae.prepare.blocks import find_files, local_file
from vae.prepare.database import as_json, connect, has_bytes, json_path, literal, quoted, short, sql
from vae.system.errors import DataError, UserError

_READERS = {
    ".parquet": "read_parquet(?)",
    ".jsonl": "read_json(?)",
    ".csv": "read_csv(?, header = true)",
    ".tsv": "read_csv(?, header = true)",
}
_IS_ONE = ("1", "1.0", "true")  # a column that is 1, as text


def shown(texts: Sequence[str]) -> str:
    """The flag with its values, for messages."""
    return f"--join {' '.join(texts)}"


def read_joined(db: Any, texts: Sequence[str], key: str, *, has_paths: bool) -> None:
    """Make a table `joined`: the key of each row, and the row as JSON `more`.

    Each text may name several files with the same columns. The values of a later text are added to the rows
    of the earlier ones with the same key; or, if it has no such column, by the one column that both have.
    With `has_paths`, keys are relative paths, which get forward slashes.
    """
    db.execute("CREATE TABLE joined (key VARCHAR, more JSON)")
    for text in texts:
        db.execute("CREATE OR REPLACE TABLE part (key VARCHAR, more JSON)")
        before = _columns_of_joined(db)
        by = ""
        for file in find_files(text, "--join", tuple(_READERS)):
            by = _append(db, file, key, before)
        if by == key and has_paths:
            db.execute("UPDATE part SET key = regexp_replace(replace(key, '\\', '/'), '^[.]/', '')")
        ((count,),) = db.execute(sql("join_parts"), [None if by == key else json_path(by)]).fetchall()
        if by == key:
            db.execute("INSERT INTO joined FROM part ANTI JOIN joined USING (key)")
        elif not count:
            raise UserError(
                f"--join {text}: none of its values of {by} is in the files before it: make them equal"
            )


def _columns_of_joined(db: Any) -> list[str]:
    return [name for (name,) in db.execute("SELECT DISTINCT unnest(json_keys(more)) FROM joined").fetchall()]


def _append(db: Any, file: Any, key: str, before: Sequence[str]) -> str:
    """Add the rows of a file to the table `part`; returns the column that is their key."""
    import duckdb

    try:
        with local_file(file) as path:
            reader = _READERS[path.suffix.lower()]
            try:
                return _insert(db, path, reader, key, before, str(file))
            except (duckdb.ConversionException, duckdb.InvalidInputException):
                if path.suffix.lower() == ".parquet":
                    raise
            # The first rows have numbers and a later one has a text, such as N/A: then the column is text.
            return _insert(db, path, f"{reader[:-1]}, sample_size = -1)", key, before, str(file))
    except OSError as error:
        raise DataError(f"--join {file} cannot be read: {error.strerror}") from error
    except duckdb.Error as error:
        is_encoding = "utf-8" in str(error).lower()
        remedy = ": write it as UTF-8" if is_encoding else ""
        raise DataError(f"--join {file} cannot be read ({short(error)}){remedy}") from error


def _insert(db: Any, path: Path, table: str, key: str, before: Sequence[str], file: str) -> str:
    rows = db.execute(f"DESCRIBE FROM {table}", [literal(path)]).fetchall()
    kinds = {name: kind for name, kind, *_ in rows if not has_bytes(kind)}
    by = key
    if key not in kinds:
        common = [name for name in kinds if name in before]
        if len(common) != 1:
            columns = ", ".join(kinds)[:500]
            besides = (
                f", and shares {len(common)} columns, not one, with the files before it" if before else ""
            )
            raise UserError(f"--join_on {key}: {file} has no such column{besides} (columns: {columns})")
        by = common[0]
    db.execute(
        f"INSERT INTO part SELECT {quoted(by)}::VARCHAR, {as_json(kinds)} FROM {table}", [literal(path)]
    )
    return by


def read_column(texts: Sequence[str], key: str, columns: Sequence[str], flag: str) -> dict[str, str | None]:
    """The value of a column for each key, which is the path of an image; of several, the one that is 1.

    UserError if there is no such column.
    """
    with TemporaryDirectory(prefix="vae-trainer-") as scratch:
        db = connect(scratch)
        read_joined(db, texts, key, has_paths=True)
        known = sorted(_columns_of_joined(db))
        for column in columns:
            if column not in known:
                raise UserError(
                    f"{flag} {column}: {shown(texts)} has no such column{nearest(column, known)} (columns: "
                    f"{', '.join(known)[:500]})"
                )
        query = "SELECT coalesce(key, ''), json_extract_string(more, ?) FROM joined"
        rows = db.execute(query, [list(map(json_path, columns))]).fetchall()
    values: dict[str, str | None] = {}
    for path, cells in rows:
        value = cells[0] if len(columns) == 1 else _the_one(columns, cells, f"{flag}: {shown(texts)}: {path}")
        if values.setdefault(path, value) != value:
            raise DataError(
                f"{shown(texts)} has two values of {' '.join(columns)} for {path}: remove one row"
            )
    return values


def _the_one(columns: Sequence[str], values: Sequence[str | None], where: str) -> str | None:
    """The name of the column that is 1; None if the row has no values."""
    ones = [column for column, value in zip(columns, values, strict=True) if value in _IS_ONE]
    if len(ones) == 1:
        return ones[0]
    if not any(values):
        return None
    raise DataError(
        f"{where} has {len(ones)} of the columns {', '.join(columns)} with the value 1: it needs one"
    )
