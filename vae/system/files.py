"""Files and folders: atomic writes, SHA-256, bounded JSON, CSV, and whether a folder can be written."""

import csv
import errno
import hashlib
import json
import os
import platform
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from vae.system.errors import UserError

MAX_JSON_BYTES = 16 * 2**20  # of a whole JSON file: the largest that this toolkit reads has a few kB
MAX_LINE_CHARS = 2**20  # of a line of a JSONL file
_CHUNK_BYTES = 2**20
# Spreadsheets run cells that begin like this as formulas (OWASP, "CSV Injection"). Numbers are no formulas.
_FORMULA = re.compile(r"'*[=+\-@\t\r]")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")
_IN_PLACE = (".lock", ".log", ".jsonl", ".tmp", ".txt")  # ends of names of files that are written in place
_HUGE = re.compile(r"(?<![0-9])[0-9]{300}")  # a whole number that no float can be


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is flushed to disk and renamed to `path`.

    On failure the temporary file is removed and `path` is unchanged. Missing parent folders are created.
    The file's permissions follow the umask. Raises OSError if the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.tmp")  # nodes share folders
    try:
        temporary.touch()
        mode = temporary.stat().st_mode & 0o777
        yield temporary
        temporary.chmod(mode)  # safetensors makes its files readable by their owner only
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_text(path: Path, parts: Iterable[str]) -> None:
    """Write a text file atomically; on failure an older file is unchanged."""
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(parts)


def write_json(path: Path, content: Any, indent: int | None = None) -> None:
    """Write a JSON file atomically; OSError if it cannot be written."""
    replace_text(path, [json.dumps(content, indent=indent) + "\n"])


def write_csv_rows(path: Path, rows: Iterable[Iterable[Any]]) -> None:
    """Write a CSV file atomically; OSError if it cannot be written."""
    with (
        atomic_path(path) as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file,
    ):
        csv.writer(file).writerows(map(csv_cell, row) for row in rows)


def remove_temporary(folder: Path) -> None:
    """Remove what killed processes left behind in `atomic_path`. No other process may be writing there."""
    for path in folder.glob("*.tmp"):
        if _TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


def refuse_links(folder: Path) -> None:
    """UserError if writing into the existing --output_dir `folder` could change files outside of it."""
    if link := _find_link(folder):
        raise UserError(
            f"--output_dir {folder} contains the link {link.relative_to(folder)}, and a run could change "
            "what it points at: replace it by a copy, or remove it"
        )


def _find_link(folder: Path) -> Path | None:
    """A link in a folder or directly in one of its folders.

    Of hard links only those that are written in place: others may be a user's second name of a checkpoint.
    """
    folders = []
    with os.scandir(folder) as entries:  # it knows what each entry is: a run can have thousands of samples
        for entry in entries:
            if _is_link(entry):
                return Path(entry)
            if entry.is_dir():
                folders.append(Path(entry))
    for inner in folders:
        with suppress(OSError), os.scandir(inner) as entries:  # lost+found: nothing is written there
            if link := next(filter(_is_link, entries), None):
                return Path(link)
    return None


def _is_link(entry: os.DirEntry[str]) -> bool:
    is_written = entry.name.endswith(_IN_PLACE) and entry.is_file(follow_symlinks=False)
    return entry.is_symlink() or (is_written and entry.stat().st_nlink > 1)  # 0 on Windows


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise OSError unless the path is that of a file: opening a pipe or a device may wait for ever."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def sha256_of_file(path: str | os.PathLike[str]) -> str:
    """Hexadecimal SHA-256 of a file's content; OSError if it cannot be read."""
    check_regular(path)
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _parse_int(digits: str) -> int:
    if _HUGE.search(digits):
        raise ValueError(f"it contains a whole number of {len(digits)} digits")
    return int(digits)


def parse_json(text: str, pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Decode JSON; a ValueError if anything is wrong, deep nesting and huge whole numbers included."""
    parse_int = _parse_int if _HUGE.search(text) else None
    try:
        return json.loads(text, object_pairs_hook=pairs_hook, parse_int=parse_int)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(
    path: str | os.PathLike[str],
    pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
    *,
    max_bytes: int = MAX_JSON_BYTES,
) -> Any:
    """Content of a JSON file; ValueError if it is not JSON or too large, OSError if it cannot be read."""
    data = read_regular(path, max_bytes)
    return parse_json(data.decode("utf-8-sig"), pairs_hook)  # Windows editors write a byte order mark


def read_regular(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Content of a file; ValueError if it is larger, OSError if it cannot be read."""
    check_regular(path)
    with open(path, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes // 2**20} MiB")
    return data


def bounded_lines(file: TextIO) -> Iterator[str]:
    """The lines of a text file; ValueError for one that would fill the memory."""
    while line := file.readline(MAX_LINE_CHARS + 1):
        if len(line) > MAX_LINE_CHARS:
            raise ValueError(f"a line is longer than {MAX_LINE_CHARS} characters")
        yield line


def read_json_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The objects in a JSONL file; lines that are no objects are skipped, as a crash may leave one."""
    check_regular(path)
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in bounded_lines(file):
            try:
                value = parse_json(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


def csv_cell(value: Any) -> Any:
    """A value for a CSV file: text that a spreadsheet would run as a formula gets an apostrophe before it."""
    if isinstance(value, str) and _FORMULA.match(value) and not _NUMBER.fullmatch(value):
        return f"'{value}"
    return value


def csv_delimiter(header: str) -> str:
    """What separates the columns of a CSV file with this first line: a comma, a semicolon or a tab."""
    return max(",;\t", key=header.count)


def csv_text(cell: str) -> str:
    """The text that `csv_cell` wrote."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def nearest_existing(path: str | os.PathLike[str]) -> Path:
    """`path`, or its nearest parent that exists."""
    path = Path(path)
    return next(p for p in [path, *path.absolute().parents] if p.exists())


def why_not_writable(folder: str | os.PathLike[str]) -> str | None:
    """What prevents writing into a folder, with the remedy; None if nothing does. It may not exist yet."""
    folder = Path(folder)
    if "\0" in str(folder):
        return "contains a null character: remove it"
    for path in (folder, *folder.absolute().parents):
        if path.is_symlink() and not path.exists():
            return f"cannot be used: the link {path} leads to no folder: remove it, or use another folder"
    nearest = nearest_existing(folder)
    if not nearest.is_dir():
        where = "is a file" if nearest == folder else f"is inside of {nearest}, which is a file"
        return f"{where}: use another folder"
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except OSError as error:
        reason = f"{nearest}: {error.strerror}"
        return f"cannot be written ({reason}): change its permissions or use another folder"
