"""DuckDB: connections, texts in its queries, and the .sql files of this folder."""

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vae.system.files import check_utf8
from vae.system.host import GIB, free_memory

OFFLINE = {"autoinstall_known_extensions": False, "autoload_known_extensions": False}
READER_MEMORY = 2 * GIB  # for a connection that reads one file; the rest goes through its temporary folder
MEMORY_SHARE, MAX_MEMORY = 0.5, 8 * GIB  # share of free memory for all rows of a job


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
    db = duckdb.connect(config=config)
    db.execute("SET GLOBAL TimeZone = 'UTC'")  # every machine writes the same texts
    return db


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


def as_json(kinds: Mapping[str, Any]) -> str:
    """The expression of a JSON object of columns with these types: dates as texts, and no NaN or infinity."""
    fields = []
    for name, kind in kinds.items():
        value = quoted(name)
        if str(kind) in ("FLOAT", "DOUBLE"):
            value = f"CASE WHEN isfinite({value}) THEN {value} END"
        fields.append(f"{quoted(name)} := {value}")
    return f"to_json(struct_pack({', '.join(fields)}))" if fields else "'{}'::JSON"


def has_bytes(kind: Any) -> bool:
    """Whether a type of DuckDB has bytes in it, which JSON cannot have."""
    return "BLOB" in str(kind)


def json_path(name: str) -> str:
    """The path of a key for DuckDB's JSON functions."""
    return '$."' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
