"""DuckDB: connections, texts in its queries, the .sql files of this folder, and the tables of --join."""

import glob
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vae.config.declare import nearest
from vae.prepare.blocks import find_files, local_file
from vae.system.errors import DataError, UserError
from vae.system.files import check_utf8
from vae.system.host import GIB, free_memory

OFFLINE = {"autoinstall_known_extensions": False, "autoload_known_extensions": False}
READER_MEMORY = 2 * GIB  # of a connection that reads one file; more goes through its temporary folder
MEMORY_SHARE, MAX_MEMORY = 0.5, 8 * GIB  # of free memory, for all rows of a job


def connect(scratch: str | os.PathLike[str] | None = None, *, for_all: bool = False) -> Any:
    """A database in memory, with one thread; `for_all` rows of a job, with all cores and more memory.

    What does not fit into memory goes to `scratch`.
    """
    import duckdb

    memory = max(0.5 * GIB, min(MAX_MEMORY, free_memory() * MEMORY_SHARE)) if for_all else READER_MEMORY
    config: dict[str, Any] = {"memory_limit": f"{int(memory) // 2**20}MiB", **OFFLINE}
    if not for_all:
        config["threads"] = 1  # processes share the cores
    if scratch is not None:
        config["temp_directory"] = os.fspath(scratch)
    return duckdb.connect(config=config)


def sql(name: str) -> str:
    """The content of `name`.sql."""
    return Path(__file__).with_name(f"{name}.sql").read_text(encoding="utf-8")


def literal(path: str | os.PathLike[str]) -> str:
    """A path as DuckDB reads it: not as a pattern. UserError if DuckDB cannot read it."""
    check_utf8(path, "file", "DuckDB")
    return glob.escape(os.fspath(path))


def quoted(name: str) -> str:
    """A name of a column in SQL."""
    return '"' + name.replace('"', '""') + '"'


def short(error: Exception) -> str:
    """The message of DuckDB in one line."""
    return " ".join(str(error).split())[:300]


# ---- Joined files ------------------------------------------------------------------------------------------


def read_joined(db: Any, text: str, key: str) -> None:
    """Make a table `joined` of all files: the key of each row, and the row as JSON `more`."""
    import duckdb

    db.execute("CREATE TABLE joined (key VARCHAR, more JSON)")
    for file in find_files(text, "--join", (".parquet", ".csv", ".tsv", ".jsonl")):
        try:
            with local_file(file) as path:
                _append(db, path, key, str(file))
        except OSError as error:
            raise DataError(f"--join {file} cannot be read: {error.strerror}") from error
        except duckdb.Error as error:
            raise DataError(f"--join {file} cannot be read ({short(error)}): texts must be UTF-8") from error


def _append(db: Any, path: Path, key: str, shown: str) -> None:
    reader = {".parquet": "read_parquet", ".jsonl": "read_json"}.get(path.suffix.lower(), "read_csv")
    kinds = db.execute(f"DESCRIBE SELECT * FROM {reader}(?)", [literal(path)]).fetchall()
    names = [name for name, kind, *_ in kinds if kind != "BLOB" and not kind.startswith("STRUCT(bytes")]
    if key not in names:
        raise UserError(f"--join_on {key}: {shown} has no such column (columns: {', '.join(names)[:500]})")
    fields = ", ".join(f"{quoted(name)} := {quoted(name)}" for name in names)
    db.execute(
        f"INSERT INTO joined SELECT {quoted(key)}::VARCHAR, to_json(struct_pack({fields})) FROM {reader}(?)",
        [literal(path)],
    )


def json_path(name: str) -> str:
    """The path of a key in SQL's JSON functions, within single quotes."""
    return '$."' + name.replace("\\", "\\\\").replace('"', '\\"').replace("'", "''") + '"'


def read_column(text: str, key: str, column: str, flag: str) -> dict[str, str | None]:
    """The value of a column for each key, which is the path of an image; UserError if there is none."""
    with TemporaryDirectory(prefix="vae-trainer-") as scratch:
        db = connect(scratch)
        read_joined(db, text, key)
        names = db.execute("SELECT DISTINCT unnest(json_keys(more)) FROM joined").fetchall()
        known = sorted(name for (name,) in names)
        if column not in known:
            raise UserError(
                f"{flag} {column}: --join {text} has no such column{nearest(column, known)} (columns: "
                f"{', '.join(known)[:500]})"
            )
        rows = db.execute(f"SELECT key, more ->> '{json_path(column)}' FROM joined").fetchall()
    values: dict[str, str | None] = {}
    for name, value in rows:
        path = (name or "").replace("\\", "/").removeprefix("./")
        if values.setdefault(path, value) != value:
            raise DataError(f"--join {text} has two values of {column} for {path}: remove one row")
    return values
