"""Files and folders: atomic writes, SHA-256, bounded JSON, CSV, and where and whose a folder can be."""

import codecs
import csv
import errno
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from vae.system.errors import UserError

_PROBE = ".vae-probe-"  # of a file that is written to test a folder
MAX_JSON_BYTES = 16 * 2**20  # of a whole JSON file: the largest that this toolkit reads has a few kB
MAX_LINE_CHARS = 2**20  # of a line of a JSONL file
_CHUNK_BYTES = 2**20
# Spreadsheets run cells that begin like this as formulas (OWASP, "CSV Injection"). Numbers are no formulas.
_FORMULA = re.compile(r"'*[=+\-@\t\r]")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_HUGE = re.compile(r"(?<![0-9])[0-9]{300}")  # a whole number that no float can be
_SCRATCH = ".vae-scratch-"  # begin of the names of folders with unfinished files
_SCRATCH_MARK = ".scratch"  # file in them


# ---- opening files ---------------------------------------------------------------------------------------


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise OSError unless the path is that of a regular file: opening a pipe could wait for ever."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """A regular file to read."""
    check_regular(path)
    return open(path, "rb")


def open_new(path: Path) -> BinaryIO:
    """A new file to write; FileExistsError if there is anything at `path`, a link included."""
    return open(path, "xb")


def open_new_text(path: Path, errors: str = "strict") -> TextIO:
    """A new UTF-8 file with the line ends that are written to it."""
    return io.TextIOWrapper(open_new(path), encoding="utf-8", errors=errors, newline="")


def open_appending(path: Path) -> BinaryIO:
    """A file to append to and to read, created if it is missing; each write is one of the system."""
    return cast(BinaryIO, open(path, "a+b", buffering=0))


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A new folder in `parent` for files that are renamed from there; it is removed at the end.

    `remove_temporary` removes those of killed processes.
    """
    # Not with mkdtemp: on Windows, its folders and what is moved out of them belong to one user alone.
    folder = parent / (_SCRATCH + secrets.token_hex(8))
    folder.mkdir()
    try:
        open_new(folder / _SCRATCH_MARK).close()
        yield folder
    finally:
        _remove_scratch_folder(folder)


def remove_temporary(parent: Path) -> None:
    """Remove what killed processes left behind in a folder. No other process may be writing there."""
    for folder in parent.glob(f"{_SCRATCH}*"):
        if (folder / _SCRATCH_MARK).is_file() or not any(folder.iterdir()):
            _remove_scratch_folder(folder)


def _remove_scratch_folder(folder: Path) -> None:
    with suppress(OSError):  # removed by others, or open in another program of Windows
        for name in os.listdir(folder):
            if name != _SCRATCH_MARK:  # the last one: if this process is killed, the rest is still known
                path = folder / name
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        (folder / _SCRATCH_MARK).unlink(missing_ok=True)
        folder.rmdir()


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a path without a file; what is written there is flushed to disk and renamed to `path`.

    On failure `path` is unchanged. Missing parent folders are created. The file's permissions follow the
    umask. Raises OSError if the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(path.parent) as folder:
        temporary = folder / path.name
        yield temporary
        mode = (folder / _SCRATCH_MARK).stat().st_mode & 0o777
        temporary.chmod(mode)  # safetensors makes its files readable by their owner only
        flush_file(temporary)
        _replace(temporary, path)


def _replace(temporary: Path, path: Path) -> None:
    """Rename a file to `path`; on Windows, programs that have it open are waited for, for some seconds."""
    for seconds in (0.2, 0.8, 2.0) if os.name == "nt" else ():
        with suppress(PermissionError):
            os.replace(temporary, path)
            return
        time.sleep(seconds)
    try:
        os.replace(temporary, path)
    except PermissionError as error:
        reason = f"{error.strerror}: close the programs that use it, and repeat the command"
        raise PermissionError(error.errno, reason, os.fspath(path)) from None


def flush_file(path: Path) -> None:
    """Write the content of a file to the disk itself."""
    with open(path, "r+b") as file:
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Write the names in a folder to the disk itself."""
    if os.name == "nt":  # Windows flushes names together with their files and cannot open a folder
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically; on failure an older file is unchanged."""
    with atomic_path(path) as temporary, open_new(temporary) as file:
        file.write(content)


def replace_text(path: Path, parts: Iterable[str]) -> None:
    """Write a text file atomically; on failure an older file is unchanged."""
    with atomic_path(path) as temporary, open_new_text(temporary) as file:
        file.writelines(parts)


def utf8_text(text: str) -> str:
    """A text that every reader of UTF-8 and JSON takes: names of files may have any bytes."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


def is_utf8(path: str | os.PathLike[str]) -> bool:
    """Whether libraries of other languages, PyTorch's reader among them, can open this path."""
    return os.fspath(path) == utf8_text(os.fspath(path))


def write_json(path: Path, content: Any, indent: int | None = None) -> None:
    """Write a JSON file atomically; OSError if it cannot be written."""
    replace_text(path, [json.dumps(content, indent=indent) + "\n"])


def write_csv_rows(path: Path, rows: Iterable[Iterable[Any]]) -> None:
    """Write a CSV file atomically; OSError if it cannot be written."""
    with atomic_path(path) as temporary, open_new_text(temporary, errors="backslashreplace") as file:
        csv.writer(file).writerows(map(csv_cell, row) for row in rows)


# ---- reading files ---------------------------------------------------------------------------------------


def sha256_of_file(path: str | os.PathLike[str]) -> str:
    """Hexadecimal SHA-256 of a file's content; OSError if it cannot be read."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _parse_int(digits: str) -> int:
    if _HUGE.search(digits):
        raise ValueError(f"it contains a whole number of {len(digits)} digits")
    return int(digits)


def parse_json(text: str) -> Any:
    """Decode JSON; a ValueError if anything is wrong, deep nesting and huge whole numbers included."""
    parse_int = _parse_int if _HUGE.search(text) else None
    try:
        return json.loads(text, parse_int=parse_int)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: str | os.PathLike[str], *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Content of a JSON file; ValueError if it is not JSON or too large, OSError if it cannot be read."""
    return parse_json(decode_text(read_regular(path, max_bytes), errors="strict"))


def read_regular(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Content of a file; ValueError if it is larger, OSError if it cannot be read."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes // 2**20} MiB")
    return data


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a small file, undecodable bytes included; ValueError and OSError as `read_regular`."""
    return decode_text(read_regular(path, MAX_JSON_BYTES))


def encoding_of(head: bytes) -> str:
    """The encoding of a text file by its byte order mark, which PowerShell and editors of Windows write."""
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"
    return "utf-16" if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"


def decode_text(data: bytes, errors: str = "surrogateescape") -> str:
    """The text of a file. ValueError if it is none; by default, names of files may have any bytes."""
    encoding = encoding_of(data)
    try:
        text = data.decode(encoding, errors if encoding == "utf-8-sig" else "strict")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line} is not UTF-8: save it as UTF-8") from None
    if "\0" in text:
        raise ValueError("it is not text, or is UTF-16 without a byte order mark: save it as UTF-8")
    return text


def unquoted(line: str) -> str:
    """A line of a list without the space and the quotes around it, as Explorer copies a path."""
    word = line.strip()
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] == '"' else word


def open_text(path: str | os.PathLike[str]) -> TextIO:
    """A text file to read line by line; OSError if it cannot be read, UnicodeDecodeError while reading."""
    with open_regular(path) as file:
        encoding = encoding_of(file.read(4))
    return io.TextIOWrapper(open_regular(path), encoding=encoding)


def bounded_lines(file: TextIO) -> Iterator[str]:
    """The lines of a text file; ValueError for one that would fill the memory."""
    while line := file.readline(MAX_LINE_CHARS + 1):
        if len(line) > MAX_LINE_CHARS:
            raise ValueError(f"a line is longer than {MAX_LINE_CHARS} characters")
        yield line


def read_json_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The objects in a JSONL file; lines that are no objects are skipped, as a crash may leave one."""
    with io.TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace") as file:
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


def nearest_existing(path: str | os.PathLike[str]) -> Path:
    """`path`, or its nearest parent that exists; UserError for a drive or server that is not there."""
    path = Path(path)
    for parent in (path, *path.absolute().parents):
        if os.path.exists(parent):
            return parent
    raise UserError(f"{path} is on a drive or server that is not there: connect it, or use another folder")


def why_not_writable(folder: str | os.PathLike[str]) -> str | None:
    """What prevents writing into a folder, with the remedy; None if nothing does. It may not exist yet."""
    folder = Path(folder)
    if "\0" in str(folder):
        return "contains a null character: remove it"
    nearest = nearest_existing(folder)
    if not nearest.is_dir():
        where = "is a file" if nearest == folder else f"is inside of {nearest}, which is a file"
        return f"{where}: use another folder"
    probe = nearest / f"{_PROBE}{secrets.token_hex(8)}"  # tempfile repeats a refused name without an end
    try:
        open_new(probe).close()
        probe.unlink()
        return None
    except OSError as error:
        reason = f"{nearest}: {error.strerror}"
        return f"cannot be written ({reason}): change its permissions or use another folder"


# ---- Whose a folder is -------------------------------------------------------------------------------------
# The marker in each folder that a command creates: which command made it, and an id. A command writes only
# into a new or empty folder, or into one that its own marker shows to be its own.

MARKER_NAME = ".vae_folder.json"
_OF_THE_SYSTEM = {".DS_Store", "Thumbs.db", "desktop.ini", "lost+found"}  # they belong to nobody
_MAX_BYTES = 4096
_WRITE_SECONDS = 1.0  # in which another process that has created a marker has also written it


@dataclass(frozen=True)
class FolderMarker:
    """What the marker of a folder contains."""

    command: str  # for example "train" or "shard"
    id: str  # 16 hexadecimal digits, new for each folder


def read_marker(folder: Path) -> FolderMarker | None:
    """The marker of a folder; None if it has none, or one that is not ours or is damaged."""
    path = folder / MARKER_NAME
    try:
        content = read_json(path, max_bytes=_MAX_BYTES)
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict):
        return None
    command, folder_id = content.get("command"), content.get("id")
    if not isinstance(command, str) or not isinstance(folder_id, str):
        return None
    return FolderMarker(command, folder_id)


def check_folder(folder: Path, command: str, flag: str = "--output_dir") -> FolderMarker | None:
    """The marker if the folder is this command's own, None if it is new or empty; nothing is written.

    Raises UserError for a file, a folder of another command, and a folder with files but without a marker.
    """
    if problem := why_not_writable(folder):
        raise UserError(f"{flag} {folder} {problem}")
    if not folder.exists():
        return None
    marker = read_marker(folder)
    if marker is not None and marker.command != command:
        raise UserError(
            f"{flag} {folder} is the folder of another command ({marker.command}): give a new or empty one"
        )
    if marker is not None:
        return marker
    foreign = _foreign_name(folder)
    if foreign is not None:
        raise UserError(
            f"{flag} {folder} contains files that this command did not write ({foreign}): "
            "give a new or an empty folder"
        )
    return None


def claim_folder(
    folder: Path, command: str, flag: str = "--output_dir", folder_id: str | None = None
) -> FolderMarker:
    """The marker of the folder, which is created with it if it is new or empty; its id is `folder_id`.

    Raises UserError as `check_folder` does, and OSError if the folder cannot be written.
    """
    marker = check_folder(folder, command, flag)
    if marker is not None:
        return marker
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / MARKER_NAME
    marker = FolderMarker(command, folder_id or secrets.token_hex(8))
    try:
        file = open_new(path)
    except FileExistsError:  # another command is faster; or its writer was killed, or it is not ours
        time.sleep(_WRITE_SECONDS)
        if read_marker(folder) is None:
            path.unlink(missing_ok=True)
        return claim_folder(folder, command, flag, folder_id)
    with file:
        file.write(json.dumps({"command": marker.command, "id": marker.id}).encode())
        file.flush()
        os.fsync(file.fileno())
    return marker


def _foreign_name(folder: Path) -> str | None:
    """The first name, sorted, that prevents a folder without a marker from being empty.

    Folders inside it that have a marker are other results of this toolkit, such as outputs/demo.
    """
    with os.scandir(folder) as entries:
        foreign = [entry.name for entry in entries if not _belongs_to_nobody(entry)]
    return min(foreign, default=None)


def _belongs_to_nobody(entry: "os.DirEntry[str]") -> bool:
    is_result = entry.is_dir() and read_marker(Path(entry)) is not None
    is_ours = entry.name == MARKER_NAME or entry.name.startswith(_PROBE)  # of a claim at the same time
    return is_ours or is_result or entry.name in _OF_THE_SYSTEM
