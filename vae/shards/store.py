"""Files on remote stores (s3://, gs://, https://), read through fsspec: time limits, tries, clear errors.

fsspec and the packages of the protocols find credentials in their own ways, and are imported when they are
needed. No message has credentials: neither those in an address, nor texts of these packages.
"""

import errno
import io
import os
import queue
import random
import ssl
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from vae.system import console
from vae.system.addresses import public_text
from vae.system.errors import DataError, UserError
from vae.system.files import open_regular

STALL_SECONDS = 30.0  # with less than MIN_BYTES: a try has failed
MIN_BYTES = 30_000
COPY_BYTES = 2**20  # from a shared disk at once
# Between the tries, each times 0.5 to 1.5, so that processes do not ask together. A store that is away for
# 30 s is back in time; 503 is how S3 asks to slow down.
PAUSES = (0.5, 1.5, 5.0, 15.0, 45.0)
PAUSES_REFUSED = (1.0, 2.0)  # after 401, 403, 404 or a certificate, which seldom change
# Errors of the disk that is written to, and not of the store.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
MISSING = "it does not exist (404)"
CERTIFICATE = "its certificate is not trusted"
PACKAGES = {"http": "aiohttp", "https": "aiohttp", "s3": "s3fs", "gs": "gcsfs"}
INSTALL = "pip install -r requirements-remote.txt"

_T = TypeVar("_T")
_Action = Callable[[Any, str, Any], _T]  # with a file system, the path there, and a fsspec Callback

# By process: a forked process must not use the connections of its parent. And whether URLs are encoded.
_systems: dict[tuple[int, str, bool], Any] = {}


@dataclass(frozen=True, repr=False)
class StoreFile:
    """The address of a file on a remote store; its text has no credentials."""

    url: str
    flag: str  # that the user gave, for messages

    def __str__(self) -> str:
        return public_text(self.url)

    __repr__ = __str__

    @property
    def is_on_disk(self) -> bool:
        """Whether it is a file:// address; ? and # in its path begin no query."""
        return self.url.lower().startswith("file://")

    @property
    def name(self) -> str:
        """The last part of the path."""
        return PurePosixPath(self.url if self.is_on_disk else urlsplit(self.url).path).name

    def sibling(self, name: str) -> "StoreFile":
        """Another file in the same folder; the query string is kept, because a signature may fit a folder."""
        if self.is_on_disk:
            return StoreFile(f"{self.url.rpartition('/')[0]}/{name}", self.flag)
        parts = urlsplit(self.url)
        path = f"{parts.path.rpartition('/')[0]}/{name}"
        return StoreFile(urlunsplit(parts._replace(path=path)), self.flag)


class StoreError(DataError):
    """A remote store did not give a file."""


class MissingError(StoreError):
    """A remote store does not have a file."""


class TooLargeError(Exception):
    """A file is larger than it may be."""


class _StalledError(Exception):
    """A try had no progress, or too little."""


class _BoundedBuffer(io.BytesIO):
    """Bytes in memory; TooLargeError for more than were asked for."""

    def __init__(self, max_bytes: int):
        super().__init__()
        self._max_bytes = max_bytes

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self._max_bytes:
            raise TooLargeError(f"it is larger than {self._max_bytes} bytes")
        return super().write(data)


def read_file(file: StoreFile, *, max_bytes: int) -> bytes:
    """The content of a file; StoreError if the store does not give it, TooLargeError if it is larger."""
    with tempfile.TemporaryDirectory(prefix="vae-trainer-") as folder:
        path = Path(folder, "file")
        download(file, path, max_bytes=max_bytes)
        return path.read_bytes()


def download(
    file: StoreFile, path: Path, *, max_bytes: int, warn: Callable[[str], None] = console.warning
) -> None:
    """Write the content of a file to `path`.

    StoreError if the store does not give it, TooLargeError if it is larger, OSError if the disk is full.
    """

    def get(system: Any, remote: str, progress: Any) -> None:
        def check_size(_total: int | None, done: int, **_kwargs: Any) -> None:
            if done > max_bytes:
                raise TooLargeError(f"it is larger than {max_bytes} bytes")

        progress.hooks = {"size": check_size}
        if file.is_on_disk:  # fsspec copies without progress, so a slow disk would look stalled
            with open_regular(remote) as source, open(path, "wb") as target:
                while chunk := source.read(COPY_BYTES):
                    target.write(chunk)
                    progress.relative_update(len(chunk))
        else:
            system.get_file(remote, str(path), callback=progress)

    _with_tries(file, get, warn)


def read_range(
    file: StoreFile, offset: int, size: int, *, warn: Callable[[str], None] = console.warning
) -> bytes:
    """Some bytes of a file; StoreError as in `read_file`.

    TooLargeError if the store gives more: some give only whole files.
    """

    def get(system: Any, path: str, progress: Any) -> bytes:
        if not file.url.lower().startswith("http"):
            # By name: the second parameter of s3fs is a version.
            return system.cat_file(path, start=offset, end=offset + size)
        buffer = _BoundedBuffer(size)
        headers = {"Range": f"bytes={offset}-{offset + size - 1}"}
        system.get_file(path, buffer, callback=progress, headers=headers)  # cat_file reads without a limit
        return buffer.getvalue()

    return _with_tries(file, get, warn)


def stamp(file: StoreFile) -> tuple[int | None, str]:
    """The size of a file, if the store says it, and a text that changes with its content, if there is one."""
    info = _with_tries(file, lambda system, path, _progress: system.info(path), console.warning)
    changed = (info.get(name) for name in ("ETag", "etag", "LastModified", "mtime", "md5Hash"))
    return info.get("size"), str(next(filter(None, changed), ""))


def list_files(folder: StoreFile) -> list[str]:
    """The addresses of all files below a folder of a store, sorted; StoreError as in `read_file`."""

    def find(system: Any, path: str, _progress: Any) -> list[str]:
        return [str(system.unstrip_protocol(name)) for name in system.find(path)]

    return sorted(_with_tries(folder, find, console.warning))


def _with_tries(file: StoreFile, action: _Action[_T], warn: Callable[[str], None]) -> _T:
    """The result of an action, tried several times.

    Errors of the disk and TooLargeError are raised at once.
    """
    system, path = _file_system(file)
    tries = 0
    while True:
        tries += 1
        try:
            return _attempt(system, path, action)
        except TooLargeError:
            raise
        except Exception as error:  # the packages raise many types
            if isinstance(error, OSError) and error.errno in DISK_ERRORS:
                raise
            reason, refused = _reason(error)
        pauses = PAUSES_REFUSED if refused else PAUSES
        if tries > len(pauses):
            break
        if tries == 2:  # most errors are gone by then
            warn(f"{file.flag} {file}: {reason}: waiting and trying again for about {sum(pauses[1:]):g} s")
        time.sleep(pauses[tries - 1] * random.uniform(0.5, 1.5))
    remedy = (
        f"check the address and your credentials; a password or signature in {file.flag} is not recorded: "
        "give it again"
        if refused
        else "check the network and the store"
    )
    if reason.startswith(CERTIFICATE):
        remedy = "check the address; SSL_CERT_FILE=FILE names the certificates of your own authority"
    kind = MissingError if reason == MISSING else StoreError
    raise kind(f"{file.flag} {file}: {reason}, {tries} times: {remedy}")


def _attempt(system: Any, path: str, action: _Action[_T]) -> _T:
    """The result of an action; _StalledError after STALL_SECONDS with less than MIN_BYTES.

    It runs in a thread of its own, which is left behind if it hangs.
    """
    from fsspec.callbacks import Callback

    progress = Callback()
    results = queue.Queue[Any]()  # a SimpleQueue may ignore the time limit if a signal arrives

    def run() -> None:
        try:
            results.put((action(system, path, progress), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=run, name="store", daemon=True).start()
    seen = 0
    while True:
        try:
            result, error = results.get(timeout=STALL_SECONDS)
        except queue.Empty:
            if progress.value - seen < MIN_BYTES:
                raise _StalledError from None
            seen = progress.value
            continue
        if error is not None:
            raise error
        return result


def _reason(error: Exception) -> tuple[str, bool]:
    """What went wrong, without credentials, and whether the store refused."""
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        return _reason(error.__cause__)  # fsspec calls every failure to ask for a size a missing file
    response = getattr(error, "response", None)  # of botocore
    metadata = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    status = metadata.get("HTTPStatusCode") or getattr(error, "status", None)
    if status is None and str(getattr(error, "code", "")).isdigit():  # of gcsfs
        status = int(error.code)  # type: ignore[attr-defined]
    if isinstance(error, FileNotFoundError) or status == 404:
        return MISSING, True
    if isinstance(error, PermissionError) or status in (401, 403):
        return f"access is denied ({status or 403})", True
    cause = getattr(error, "certificate_error", error)  # of aiohttp
    if isinstance(cause, ssl.SSLCertVerificationError) or "SSL" in type(error).__name__:
        return f"{CERTIFICATE} ({getattr(cause, 'verify_message', 'no TLS')})", True
    if isinstance(error, _StalledError | TimeoutError) or "Timeout" in type(error).__name__:
        return f"no answer for {STALL_SECONDS:g} s, or less than {MIN_BYTES // 1000} kB", False
    if status:
        return f"the server answers {status}", False
    if isinstance(error, ConnectionError) or "Connect" in type(error).__name__:
        return "no connection", False
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number) if number else type(error).__name__, False


def _file_system(file: StoreFile) -> tuple[Any, str]:
    """The file system of an address, and the path there; UserError if a package is missing."""
    scheme = file.url.partition("://")[0].lower()
    encoded = "%" in file.url or "?" in file.url
    try:
        from fsspec import get_filesystem_class

        kind = get_filesystem_class(scheme)
        key = os.getpid(), f"{scheme}://{urlsplit(file.url).netloc}", encoded
        if key not in _systems:
            options = {**kind._get_kwargs_from_urls(file.url), **_options(scheme, encoded)}
            _systems[key] = kind(skip_instance_cache=True, **options)
        return _systems[key], kind._strip_protocol(file.url)
    except ImportError:
        raise UserError(f"{file.flag} {file} needs the package {PACKAGES[scheme]}: {INSTALL}") from None


def _options(scheme: str, encoded: bool) -> dict[str, Any]:
    """Options of the file system of a protocol."""
    if scheme not in ("http", "https"):
        return {}
    import aiohttp

    # Its own limit is 300 s for a whole file. trust_env: proxies and .netrc.
    limit = aiohttp.ClientTimeout(total=None, sock_connect=STALL_SECONDS, sock_read=STALL_SECONDS)
    return {"encoded": encoded, "client_kwargs": {"timeout": limit, "trust_env": True}}
