"""DuckDB: connections, texts in its queries, and the queries in the .sql files of this folder."""

import glob
import os
from pathlib import Path
from typing import Any

from vae.system.host import GIB, free_memory

OFFLINE = {"autoinstall_known_extensions": False, "autoload_known_extensions": False}
READER_MEMORY = 2 * GIB  # of a connection that reads one file; more goes through its temporary folder
MEMORY_SHARE, MAX_MEMORY = 0.5, 8 * GIB  # of free memory, for all rows of a job


def connect(scratch: str | os.PathLike[str] | None = None) -> Any:
    """A database in memory, with one thread: processes share the cores."""
    return _connect({"threads": 1}, READER_MEMORY, scratch)


def connect_for_all(scratch: str | os.PathLike[str]) -> Any:
    """A database in memory for all rows of a job, with all cores; what does not fit goes to `scratch`."""
    return _connect({}, max(0.5 * GIB, min(MAX_MEMORY, free_memory() * MEMORY_SHARE)), scratch)


def _connect(config: dict[str, Any], memory: float, scratch: str | os.PathLike[str] | None) -> Any:
    import duckdb

    config |= {"memory_limit": f"{int(memory) // 2**20}MiB", **OFFLINE}
    if scratch is not None:
        config["temp_directory"] = os.fspath(scratch)
    return duckdb.connect(config=config)


def sql(name: str) -> str:
    """The content of `name`.sql."""
    return Path(__file__).with_name(f"{name}.sql").read_text(encoding="utf-8")


def literal(path: str | os.PathLike[str]) -> str:
    """A path as DuckDB reads it: not as a pattern."""
    return glob.escape(os.fspath(path))


def quoted(name: str) -> str:
    """A name of a column in SQL."""
    return '"' + name.replace('"', '""') + '"'


def short(error: Exception) -> str:
    """The message of DuckDB in one line."""
    return " ".join(str(error).split())[:300]
