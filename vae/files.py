"""Files and folders: atomic writes, SHA-256, and whether a folder can be written."""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CHUNK_BYTES = 2**20


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is flushed to disk and renamed to `path`.

    On failure the temporary file is removed and `path` is unchanged. Missing parent folders are created.
    The file's permissions follow the umask. Raises OSError if the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
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


def sha256_of_file(path: str | os.PathLike[str]) -> str:
    """Hexadecimal SHA-256 of a file's content; OSError if it cannot be read."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def nearest_existing(path: str | os.PathLike[str]) -> Path:
    """`path`, or its nearest parent that exists."""
    path = Path(path)
    return next(p for p in [path, *path.absolute().parents] if p.exists())


def why_not_writable(folder: str | os.PathLike[str]) -> str | None:
    """What prevents writing into a folder, with the remedy; None if nothing does. It may not exist yet."""
    folder, nearest = Path(folder), nearest_existing(folder)
    if not nearest.is_dir():
        where = "is a file" if nearest == folder else f"is inside of {nearest}, which is a file"
        return f"{where}: use another folder"
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except OSError as error:
        reason = f"{nearest}: {error.strerror}"
        return f"cannot be written ({reason}): change its permissions or use another folder"
