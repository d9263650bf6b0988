"""Files on remote stores (s3://, gs://, hf://, https://), read whole through fsspec: tries, clear errors.

fsspec and the packages of the protocols find credentials in their own ways, and are imported when they are
needed. No message has credentials: neither those in an address, nor texts of these packages.
"""

import errno
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from vae.system import console
from vae.system.addresses import public_text
from vae.system.errors import DataError, UserError

STALL_SECONDS = 30.0  # limit of aiohttp for connecting, and for a pause between two bytes
# Between the tries, each times 0.5 to 1.5, so that processes do not ask together. A store that is away for
# 30 s is back in time; 503 is how S3 asks to slow down.
PAUSES = (0.5, 1.5, 5.0, 15.0, 45.0)
PAUSES_REFUSED = (1.0, 2.0)  # after 401, 403, 404 or a certificate, which seldom change
# Errors of the disk that is written to, and not of the store.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
MISSING = "it does not exist (404)"
CERTIFICATE = "its certificate is not trusted (SSL_CERT_FILE=FILE names those of your own authority)"
PACKAGES = {"http": "aiohttp", "https": "aiohttp", "s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub"}
INSTALL = "pip install -r requirements-remote.txt"

_T = TypeVar("_T")


@dataclass(frozen=True, repr=False)
class StoreFile:
    """The address of a file on a remote store; its text has no credentials."""

    url: str
    flag: str  # given by the user, for messages

    def __str__(self) -> str:
        return public_text(self.url)

    __repr__ = __str__

    @property
    def name(self) -> str:
        """The last part of the path."""
        return PurePosixPath(urlsplit(self.url).path).name

    def sibling(self, name: str) -> "StoreFile":
        """Another file in the same folder; the query string is kept, because a signature may fit a folder."""
        parts = urlsplit(self.url)
        path = f"{parts.path.rpartition('/')[0]}/{name}"
        return StoreFile(urlunsplit(parts._replace(path=path)), self.flag)


class StoreError(DataError):
    """A remote store did not give a file."""


class MissingError(StoreError):
    """A remote store does not have a file."""


def is_disk_error(error: OSError) -> bool:
    """Whether the disk of this machine is full or refuses a file: a store's refusal names none."""
    return error.errno in DISK_ERRORS or (isinstance(error, PermissionError) and error.filename is not None)


def read_file(file: StoreFile) -> bytes:
    """The content of a file; StoreError if the store does not give it."""
    return _with_tries(file, lambda system, path: system.cat_file(path))


def download(file: Path | StoreFile, path: Path) -> None:
    """Write the content of a file to `path`; StoreError if it cannot be read, OSError of this disk."""
    if isinstance(file, StoreFile):
        _with_tries(file, lambda system, remote: system.get_file(remote, str(path)))
        return
    try:
        shutil.copyfile(file, path)
    except OSError as error:
        if error.errno in DISK_ERRORS:
            raise
        raise StoreError(f"{file} cannot be copied: {error.strerror}: check that disk") from error


def stamp(file: StoreFile) -> tuple[int | None, str]:
    """The size of a file, if the store says it, and a text that changes with its content, if there is one."""
    info = _with_tries(file, lambda system, path: system.info(path))
    changed = (info.get(name) for name in ("ETag", "etag", "LastModified", "mtime", "md5Hash", "blob_id"))
    return info.get("size"), str(next(filter(None, changed), ""))


def list_files(folder: StoreFile) -> list[str]:
    """The addresses of all files below a folder of a store, sorted; StoreError as in `read_file`."""

    def find(system: Any, path: str) -> list[str]:
        return [str(system.unstrip_protocol(name)) for name in system.find(path)]

    return sorted(_with_tries(folder, find))


def _with_tries(file: StoreFile, action: Callable[[Any, str], _T]) -> _T:
    """The result of an action on a file system and a path there, tried several times.

    Errors of this machine's disk are raised at once.
    """
    system, path = _file_system(file)
    tries = 0
    while True:
        tries += 1
        try:
            return action(system, path)
        except Exception as error:  # the packages raise many types
            if isinstance(error, OSError):
                names_local_file = os.path.isabs(os.fsdecode(error.filename or ""))  # for example in HF_HOME
                if names_local_file or is_disk_error(error):
                    raise
            reason, refused = _reason(error)
        pauses = PAUSES_REFUSED if refused else PAUSES
        if tries > len(pauses):
            break
        if tries == 2 and console.is_main_process():  # most errors are gone by then
            seconds = sum(pauses[1:])
            console.warning(f"{file.flag} {file}: {reason}: trying again for about {seconds:g} s")
        time.sleep(pauses[tries - 1] * random.uniform(0.5, 1.5))
    remedy = "check the network and the store"
    if refused and file.url.startswith("hf://"):
        remedy = "correct the name, or accept the terms of a gated dataset on its page, and run hf auth login"
    elif refused:
        remedy = (
            f"check the address and your credentials; a password or signature in {file.flag} is not "
            "recorded: give it again"
        )
    kind = MissingError if reason == MISSING else StoreError
    raise kind(f"{file.flag} {file}: {reason}, {tries} times: {remedy}")


def _reason(error: Exception) -> tuple[str, bool]:
    """The reason of an error, without credentials, and whether the store refused the request."""
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        return _reason(error.__cause__)  # fsspec calls every failure to ask for a size a missing file
    response = getattr(error, "response", None)  # of botocore
    metadata = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    status = metadata.get("HTTPStatusCode") or getattr(error, "status", None)
    status = status or getattr(response, "status_code", None)  # of huggingface_hub
    if status is None and str(getattr(error, "code", "")).isdigit():  # of gcsfs
        status = int(error.code)  # type: ignore[attr-defined]
    if isinstance(error, FileNotFoundError) or status == 404:
        return MISSING, True
    if isinstance(error, PermissionError) or status in (401, 403):
        return f"access is denied ({status or 403})", True
    if any(word in type(error).__name__ for word in ("SSL", "Certificate")):
        return CERTIFICATE, True
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return f"no answer for {STALL_SECONDS:g} s", False
    if status:
        return f"the server answers {status}", False
    if isinstance(error, ConnectionError) or "Connect" in type(error).__name__:
        return "no connection", False
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number) if number else type(error).__name__, False


def _file_system(file: StoreFile) -> tuple[Any, str]:
    """The file system of an address, and the path there; UserError if a package is missing."""
    from fsspec import url_to_fs

    scheme = file.url.partition("://")[0].lower()
    try:
        return url_to_fs(file.url, **_options(file.url, scheme))
    except ImportError:
        raise UserError(f"{file.flag} {file} needs the package {PACKAGES[scheme]}: {INSTALL}") from None


def _options(url: str, scheme: str) -> dict[str, Any]:
    """Options of the file system of a protocol."""
    if scheme == "hf":
        from huggingface_hub.utils import disable_progress_bars, logging

        disable_progress_bars()
        logging.set_verbosity_error()  # the tries are printed here
    if scheme not in ("http", "https"):
        return {}
    import aiohttp

    # Its own limit is 300 s for a whole file. trust_env: proxies and .netrc.
    limit = aiohttp.ClientTimeout(total=None, sock_connect=STALL_SECONDS, sock_read=STALL_SECONDS)
    encoded = "%" in url or "?" in url
    return {"encoded": encoded, "client_kwargs": {"timeout": limit, "trust_env": True}}
