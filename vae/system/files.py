"""Files and folders: atomic writes, SHA-256, bounded JSON, CSV, and where and whose a folder can be."""

import codecs
import csv
import errno
import hashlib
import io
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from vae.system.errors import UserError

_PROBE = ".vae-probe-"  # names of files that test whether a folder can be written begin with it
MAX_JSON_BYTES = 16 * 2**20  # the largest JSON file that this toolkit writes has a few kB
_CHUNK_BYTES = 2**20
_SCRATCH = ".vae-scratch-"  # names of folders with unfinished files begin with it
_MAX_PATH = 259  # characters of a path on Windows, unless long paths are allowed
_LONGEST = 80  # characters in a folder of ours: vae/.vae-scratch-*/diffusion_pytorch_model.safetensors has 74
_MAX_NAME_BYTES = 240  # file systems allow 255, and an extension and numbers follow
_LONG_PATHS = "allow long paths (docs/WINDOWS_SETUP.md, step 5), or use a shorter folder"


# ---- writing files ---------------------------------------------------------------------------------------


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A new folder in `parent` for files that are renamed from there; it is removed at the end.

    `remove_temporary` removes those of killed processes.
    """
    # Not with mkdtemp: on Windows, its folders and what is moved out of them belong to one user alone.
    folder = parent / (_SCRATCH + secrets.token_hex(8))
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_temporary(parent: Path) -> None:
    """Remove what killed processes left behind in a folder. No other process may be writing there."""
    for folder in parent.glob(_SCRATCH + 16 * "[0-9a-f]"):
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a path without a file; what is written there is flushed to disk and renamed to `path`.

    On failure `path` is unchanged. Missing parent folders are created. The file's permissions follow the
    umask. Raises OSError if the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(path.parent) as folder:
        temporary = folder / path.name
        try:
            yield temporary
        except OSError as error:
            if error.errno and error.filename is None:  # the disk is full, for example
                error.filename = os.fspath(path)
            raise
        temporary.chmod(folder.stat().st_mode & 0o666)  # safetensors' files are readable by their owner only
        flush_file(temporary)
        replace_file(temporary, path)


def replace_file(temporary: Path, path: Path) -> None:
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
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def replace_text(path: Path, parts: Iterable[str]) -> None:
    """Write a text file atomically; on failure an older file is unchanged."""
    with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        file.writelines(parts)


def utf8_text(text: str) -> str:
    """A text that every reader of UTF-8 and JSON takes: names of files may have any bytes."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


def shortened(text: str, name: str, hashed: bool = False) -> str:
    """A name of at most _MAX_NAME_BYTES; a longer one, or with `hashed`, ends with a hash of `name`."""
    errors = sys.getfilesystemencodeerrors()
    data = text.encode("utf-8", errors)  # os.fsencode cannot encode every name of a tar file in every locale
    if len(data) <= _MAX_NAME_BYTES and not hashed:
        return text
    mark = "_" + hashlib.blake2b(name.encode("utf-8", errors), digest_size=16).hexdigest()[:8]
    return data[: _MAX_NAME_BYTES - len(mark)].decode("utf-8", "ignore") + mark


def check_utf8(path: str | os.PathLike[str], flag: str, libraries: str) -> None:
    """UserError if a path has other bytes, so that these libraries cannot open it."""
    if os.fspath(path) != utf8_text(os.fspath(path)):
        raise UserError(f"{flag} {path} is not valid UTF-8, so {libraries} cannot use it: give another name")


def write_json(path: Path, content: Any, indent: int | None = None) -> None:
    """Write a JSON file atomically; OSError if it cannot be written."""
    replace_text(path, [json.dumps(content, indent=indent) + "\n"])


def write_csv_rows(path: Path, rows: Iterable[Iterable[Any]]) -> None:
    """Write a CSV file atomically; OSError if it cannot be written."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    replace_bytes(path, text.getvalue().encode("utf-8", "backslashreplace"))


# ---- reading files ---------------------------------------------------------------------------------------


def sha256_of_file(path: str | os.PathLike[str]) -> str:
    """Hexadecimal SHA-256 of a file's content; OSError if it cannot be read."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def utf8_path(path: Path) -> Iterator[Path]:
    """A path of a file for libraries that take UTF-8 alone: on Linux, names may have any bytes.

    It is valid until the block ends. Raises OSError if the file cannot be opened.
    """
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        with open(path, "rb") as file:
            yield Path(f"/dev/fd/{file.fileno()}")
    else:
        yield path


def read_json(path: str | os.PathLike[str], *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Content of a JSON file; ValueError if it is not JSON or too large, OSError if it cannot be read."""
    text = decode_text(read_regular(path, max_bytes), errors="strict")
    return json.loads(text, object_pairs_hook=_without_repeated_keys)


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object; ValueError if a key is repeated, because nobody knows which of its values is meant."""
    content = dict(pairs)
    if len(content) < len(pairs):
        repeated = next(key for key in content if [name for name, _ in pairs].count(key) > 1)
        raise ValueError(f'it has the key "{repeated}" twice: remove one')
    return content


def read_regular(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Content of a file; ValueError if it is larger, OSError if it cannot be read."""
    with open(path, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes // 2**20} MiB")
    return data


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a small file, undecodable bytes included; ValueError and OSError as `read_regular`."""
    return decode_text(read_regular(path, MAX_JSON_BYTES))


def encoding_of(head: bytes) -> str:
    """The encoding of a text file by its byte order mark, which PowerShell and editors of Windows write."""
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
    with open(path, "rb") as file:
        encoding = encoding_of(file.read(4))
    return open(path, encoding=encoding)


def read_json_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The objects in a JSONL file; lines that are no objects are skipped, as a crash may leave one."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


def expand_home(path: str, flag: str) -> str:
    """The path with the home folder for a leading ~, which shells expand only at the beginning of a word.

    UserError if there is no home folder. On Windows, ~name is a name like any other.
    """
    first, slash, _ = path.replace(os.sep, "/").partition("/")
    if not first.startswith("~") or (os.name == "nt" and first != "~"):
        return path
    expanded = os.path.expanduser(path)
    if expanded == path and (slash or first == "~"):
        raise UserError(f"{flag} {path}: {first} is no home folder: give the whole path, or ./{path}")
    return expanded


def in_home(path: str, variable: str) -> Path:
    """A path that begins with ~, in the home folder; UserError if this user has none: set `variable`."""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise UserError(f"this user has no home folder for {path} (HOME is not set): set {variable}")
    return Path(expanded)


def nearest_existing(path: str | os.PathLike[str]) -> Path:
    """`path`, or its nearest parent that exists; UserError for a drive or server that is not there."""
    path = Path(path)
    for parent in (path, *path.absolute().parents):
        if os.path.exists(parent):
            return parent
    raise UserError(f"{path} is on a drive or server that is not there: connect it, or use another folder")


def why_not_writable(folder: str | os.PathLike[str]) -> str | None:
    """Why a folder, which may not exist yet, cannot be written, with the remedy; None if it can."""
    folder = Path(folder)
    nearest = nearest_existing(folder)
    if not nearest.is_dir():
        where = "is a file" if nearest == folder else f"is inside of {nearest}, which is a file"
        return f"{where}: use another folder"
    try:
        probe_folder(nearest)
    except OSError as error:
        reason = f"{nearest}: {error.strerror}"
        return f"cannot be written ({reason}): change its permissions or use another folder"
    length = len(os.path.abspath(folder))
    if length + _LONGEST > _MAX_PATH:
        try:
            probe_folder(nearest, length + _LONGEST - len(os.path.abspath(nearest)))
        except FileNotFoundError:
            return f"has {length} characters, and Windows refuses its files: {_LONG_PATHS}"
        except OSError:  # a file system with short names
            return None
    return None


def long_path_remedy(error: OSError) -> str:
    """The remedy for a file that Windows calls missing because its path is too long; otherwise empty."""
    is_missing = os.name == "nt" and error.errno == errno.ENOENT
    length = len(os.path.abspath(os.fsdecode(error.filename))) if is_missing and error.filename else 0
    return f": the path has {length} characters: {_LONG_PATHS}" if length > _MAX_PATH else ""


def probe_folder(folder: Path, name_length: int = 0) -> None:
    """Create a file in a folder and remove it; OSError if that is refused. Its name has at least so much."""
    # Not with tempfile: on Windows, Python up to 3.13 repeats a refused name without an end (gh-66305).
    probe = folder / f"{_PROBE}{secrets.token_hex(8)}".ljust(min(name_length, 255), "x")
    probe.touch(exist_ok=False)
    probe.unlink()


# ---- Whose a folder is -------------------------------------------------------------------------------------
# The marker in each folder that a command creates: which command made it, and an id. A command writes only
# into a new or empty folder, or into one that its own marker shows to be its own.

MARKER_NAME = ".vae_folder.json"
_OF_THE_SYSTEM = {".DS_Store", "Thumbs.db", "desktop.ini", "lost+found"}  # they belong to nobody
_MAX_BYTES = 4096
_WRITE_SECONDS = 1.0  # in which another process that has created a marker has also written it


@dataclass(frozen=True)
class FolderMarker:
    """The content of the marker of a folder."""

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
        with open(path, "xb") as file:
            file.write(json.dumps(asdict(marker)).encode())
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:  # another command is faster; or its writer was killed, or it is not ours
        time.sleep(_WRITE_SECONDS)
        if read_marker(folder) is None:
            path.unlink(missing_ok=True)
        return claim_folder(folder, command, flag, folder_id)
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
    is_ours = entry.name == MARKER_NAME or entry.name.startswith(_PROBE)  # another process claims it now
    return is_ours or is_result or entry.name in _OF_THE_SYSTEM
