"""A dataset of shards: WebDataset tar files, an index of each, and a `dataset.json` that lists them.

`dataset.json` has `format`, `version` (a hash of the rest), `policy` (the rules by which images were
accepted), `transforms` (how preprocessing made them), `validation` (the file name of the dataset of held-out
images, or null) and `shards`, each with `name`, `samples`, `bytes`, `sha256` and, since format 2,
`index_sha256`. Format 3 may have `shard_lists`, files with the shards of a large dataset.

Tar files that others wrote are not beside `dataset.json`: it has `tars`, their folder or address, and
`indexes`, the folder beside it with the indexes. Images without a row there are left out. `tars` does not
count for the version, so these tar files may be moved.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from vae.shards.index import Shard, index_path, max_index_bytes, parse_index, read_index
from vae.shards.shard_list import IS_SHARD, ShardColumns, Shards
from vae.shards.store import StoreFile, TooLargeError, read_file
from vae.system.addresses import HTTP, address_problem, is_remote, public_text
from vae.system.errors import DataError, UserError
from vae.system.files import MAX_JSON_BYTES, parse_json, read_json, read_regular, sha256_of_file, write_json

FORMAT = 3  # written only for what format 2 does not have
MAX_LISTED = 25_000  # shards in one file: with the longest names 13 MB, below MAX_JSON_BYTES
MAX_LISTS = 400  # of shards: 10 million
# Only names in the dataset's own folder: a dataset may come from a stranger.
_JSON_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.json")
_FOLDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_SHARE = re.compile(r"[\\/]{2}")  # \\host\share: on Windows, opening it is a login attempt


class ShardedDataset(NamedTuple):
    """The content of a `dataset.json`."""

    path: Path | StoreFile
    shards: Shards
    policy: dict[str, Any]
    validation: str | None
    version: str
    transforms: Mapping[str, Any] = {}
    tars: str | None = None  # folder or address of tar files that others wrote; None: that of dataset.json
    indexes: str = ""  # folder of the indexes, beside dataset.json
    flag: str = "--data_path"  # that the user gave, for messages

    @property
    def samples(self) -> int:
        """Number of images."""
        return int(self.shards.samples.sum())

    @property
    def store(self) -> StoreFile | None:
        """A file beside the shards, if they are on a remote store."""
        if self.tars is not None:
            return StoreFile(f"{self.tars}/", self.flag) if is_remote(self.tars) else None
        return self.path if isinstance(self.path, StoreFile) else None

    @property
    def folder(self) -> Path:
        """The folder with the shards; DataError if it is on a remote store."""
        if self.store is not None or isinstance(self.path, StoreFile):
            raise DataError(
                f"{self.flag} {self.path} is on a remote store: copy the dataset to this machine, or "
                "run the command where it is"
            )
        return self.path.parent if self.tars is None else Path(self.tars)

    @property
    def index_folder(self) -> Path:
        """The folder with the indexes of a dataset on this machine."""
        assert isinstance(self.path, Path)
        return self.path.parent / self.indexes

    def shard_file(self, shard: Shard) -> Path | StoreFile:
        """The tar file of a shard."""
        return self.store.sibling(shard.name) if self.store else self.folder / shard.name

    def index_file(self, shard: Shard) -> Path | StoreFile:
        """The index of a shard."""
        return self.beside(index_path(Path(self.indexes), shard).as_posix())

    def fetch_index(self, shard: Shard) -> np.ndarray:
        """A shard's index. BadImageError for a bad one, TooLargeError or StoreError of a store."""
        if isinstance(file := self.index_file(shard), Path):
            return read_index(file, shard)
        return parse_index(read_file(file, max_bytes=max_index_bytes(shard)), shard)

    def beside(self, name: str) -> Path | StoreFile:
        """A file in the folder of `dataset.json`."""
        return self.path.sibling(name) if isinstance(self.path, StoreFile) else self.path.parent / name


def is_dataset(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a dataset of shards, and not a manifest or a folder of images."""
    return is_remote(path) or (os.fspath(path).lower().endswith(".json") and not os.path.isdir(path))


def dataset_content(
    shards: Sequence[Shard],
    policy: Mapping[str, Any],
    validation: str | None,
    *,
    transforms: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of `dataset.json`; the same images and rules have the same version everywhere.

    `more`: `tars` with `indexes`, if there are any.
    """
    made = {"policy": dict(policy), "transforms": dict(transforms or {}), **(more or {})}
    is_old = len(shards) <= MAX_LISTED and "tars" not in made
    rest = {"format": 2 if is_old else FORMAT, **made, "validation": validation}
    return {"version": _version(rest, shards), **rest, "shards": [shard_content(shard) for shard in shards]}


def write_dataset(path: Path, content: Mapping[str, Any]) -> None:
    """Write a `dataset.json`, and lists of its shards if there are more than MAX_LISTED."""
    shards = content["shards"]
    lists = []
    if len(shards) > MAX_LISTED:
        for first in range(0, len(shards), MAX_LISTED):
            part = shards[first : first + MAX_LISTED]
            name = f"{path.stem}-shards-{first // MAX_LISTED:06}.json"
            list_path = path.with_name(name)
            write_json(list_path, part)
            lists.append({"name": name, "sha256": sha256_of_file(list_path)})
        content = {**content, "shards": [], "shard_lists": lists}
    write_json(path, content, indent=1)


def shard_content(shard: Shard) -> dict[str, Any]:
    """A shard in a `dataset.json`."""
    return {name: value for name, value in shard._asdict().items() if value is not None}


def _version(rest: Mapping[str, Any], shards: Iterable[Shard]) -> str:
    """SHA-256 of the content as JSON with sorted keys, from its parts: the whole text can have gigabytes."""
    mark = "shards"
    rest = {name: value for name, value in rest.items() if name not in ("version", "shard_lists", "tars")}
    text = json.dumps(rest | {"shards": mark}, sort_keys=True)
    before, _, after = text.rpartition(f'"{mark}"')
    digest = hashlib.sha256(f"{before}[".encode())
    for number, (name, samples, size, sha256, index) in enumerate(shards):
        index = f'"index_sha256": "{index}", ' if index else ""
        shard = f'{{"bytes": {size}, {index}"name": "{name}", "samples": {samples}, "sha256": "{sha256}"}}'
        digest.update((f", {shard}" if number else shard).encode())
    digest.update(f"]{after}".encode())
    return digest.hexdigest()


def read_dataset(path: str | os.PathLike[str] | StoreFile, *, flag: str = "--data_path") -> ShardedDataset:
    """Read a `dataset.json`; DataError, with `flag`, if it is missing, newer than this program or damaged."""
    if isinstance(path, StoreFile):
        return _read(path, flag)
    if problem := address_problem(path):
        raise UserError(f"{flag} {path} {problem}")
    if is_remote(path):
        return _read(StoreFile(os.fspath(path), flag), flag)
    try:
        status = os.stat(path)
        return _read_once(Path(path), flag, (status.st_ino, status.st_size, status.st_mtime_ns))
    except OSError:
        return _read(Path(path), flag)


@lru_cache(maxsize=4)  # a command reads it in each of its checks, and a million shards take seconds
def _read_once(path: Path, flag: str, _stamp: tuple[int, int, int]) -> ShardedDataset:
    return _read(path, flag)


def _read(path: Path | StoreFile, flag: str) -> ShardedDataset:
    try:
        content, shards = _read_content(path)
    except FileNotFoundError:
        raise DataError(f"{flag} {path} does not exist: prepare_data.py --mode shard writes one") from None
    except OSError as error:
        raise DataError(f"{flag} {path} cannot be read: {error.strerror}") from error
    except UserError:  # of the store
        raise
    except (ValueError, TooLargeError) as error:
        raise DataError(f"{flag} {path} is not a dataset of shards: {error}") from error
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise DataError(f"{flag} {path} is not a dataset of shards: prepare_data.py --mode shard writes one")
    if content["format"] > FORMAT:
        raise DataError(
            f"{flag} {path} has format {content['format']}, but this program reads up to {FORMAT}: update it"
        )
    if where := _problem_of_place(content, path):
        raise DataError(f"{flag} {path} is not read: {where}")
    problem = _problem(content, shards, path)
    if problem:
        mode = "index" if "tars" in content else "shard"
        raise DataError(
            f"{flag} {path} is damaged ({problem}): write it again with prepare_data.py --mode {mode}"
        )
    return ShardedDataset(
        path,
        shards,
        content["policy"],
        content["validation"],
        content["version"],
        content.get("transforms", {}),
        content.get("tars"),
        content.get("indexes", ""),
        flag,
    )


def _read_content(path: Path | StoreFile) -> tuple[Any, Shards]:
    """The content of a `dataset.json`, with IS_SHARD in the place of each valid shard; the shards.

    ValueError if it, or a file that it refers to, is not valid, OSError if it cannot be read.
    """
    if isinstance(path, StoreFile) and not path.name.endswith(".json"):
        raise ValueError("give the address of its dataset.json")
    columns = ShardColumns()
    if isinstance(path, Path):
        content = read_json(path, columns.take)
    else:
        data = read_file(path, max_bytes=MAX_JSON_BYTES)
        content = parse_json(data.decode("utf-8-sig"), columns.take)
    if isinstance(content, dict) and content.get("format") == 3:  # a newer one may refer to other files
        lists = content.get("shard_lists", [])
        if not isinstance(lists, list) or len(lists) > MAX_LISTS:
            raise ValueError("its lists of shards are not valid")
        for reference in lists:
            listed = parse_json(_read_list(path, reference), columns.take)
            if not isinstance(listed, list) or not isinstance(content.get("shards"), list):
                raise ValueError("its list of shards is not valid")
            content["shards"] += listed
        if "removed_keys" in content:
            raise ValueError("it has removed_keys, which are not read: write it again with --exclude")
    return content, Shards(columns)


def _read_list(path: Path | StoreFile, reference: Any) -> str:
    """The text of a list of shards of the dataset at `path`; ValueError if it is another file."""
    name = reference.get("name") if isinstance(reference, dict) else None
    if not isinstance(name, str) or not _JSON_NAME.fullmatch(name):
        raise ValueError("it refers to a file without a valid name")
    if isinstance(path, StoreFile):
        data = read_file(path.sibling(name), max_bytes=MAX_JSON_BYTES)
    else:
        try:
            data = read_regular(path.with_name(name), MAX_JSON_BYTES)
        except FileNotFoundError:
            raise ValueError(f"{name} is missing") from None
    if hashlib.sha256(data).hexdigest() != reference.get("sha256"):
        raise ValueError(f"{name} does not have the SHA-256 that {path.name} lists")
    return data.decode()


def _problem(content: Mapping[str, Any], shards: Shards, path: Path | StoreFile) -> str | None:
    """What is wrong with the content of a dataset of a known format."""
    listed = content.get("shards")
    validation = content.get("validation")
    if not isinstance(listed, list) or not listed or not isinstance(content.get("policy"), dict):
        return "it lacks shards or policy"
    if validation is not None and not (isinstance(validation, str) and _JSON_NAME.fullmatch(validation)):
        return "validation is no file name"
    if validation == path.name:
        return "it is its own validation"
    if not isinstance(content.get("transforms", {}), dict):
        return "transforms is not valid"
    if "tars" not in content and not shards.are_beside:
        return "a shard is not beside it"
    wrong = next((number for number, shard in enumerate(listed) if shard is not IS_SHARD), None)
    if wrong is not None:
        return f"shard {wrong} is not valid"
    if shards.hashed_indexes != (len(shards) if content["format"] > 1 else 0):
        return "index_sha256 does not fit its format"
    if shards.has_twins():
        return "a shard is listed twice"
    rest = {name: value for name, value in content.items() if name != "shards"}
    if len(shards) != len(listed) or content.get("version") != _version(rest, shards):
        return "its content does not have its version"
    return None


def _problem_of_place(content: Mapping[str, Any], path: Path | StoreFile) -> str | None:
    """What is wrong with where the tar files and the indexes are; a dataset may come from a stranger."""
    if "tars" not in content and "indexes" not in content:
        return None
    tars = content.get("tars")
    indexes = content.get("indexes")
    if content["format"] < FORMAT:
        return f"tars needs format {FORMAT}"
    if not isinstance(indexes, str) or not _FOLDER_NAME.fullmatch(indexes):
        return "indexes is no name of a folder"
    if not isinstance(tars, str) or "\0" in tars:
        return "tars is no address and no absolute path"
    if is_remote(tars):
        if problem := address_problem(tars):
            return f"its tars {problem}"
        if isinstance(path, StoreFile) and not _is_same_store(path.url, tars):
            return (
                f"its tar files are on another host ({public_text(tars)}): copy its folder to this machine "
                "if you trust it"
            )
        return None
    if not Path(tars).is_absolute():
        return "tars is no address and no absolute path"
    if isinstance(path, StoreFile):
        return "it is on a remote store, but its tar files are not"
    drives = {PureWindowsPath(place).drive.lower() for place in (tars, path.absolute())}
    if _SHARE.match(tars) and len(drives) > 1:
        return "tars is on a network share: connect it as a drive, and write a path on that drive to tars"
    return None


def _is_same_store(one: str, other: str) -> bool:
    """Whether two addresses are of one host, or of one cloud's buckets."""
    schemes = {urlsplit(url).scheme for url in (one, other)}
    hosts = {(urlsplit(url).hostname, urlsplit(url).port) for url in (one, other)} if schemes & HTTP else {""}
    return len(schemes) == len(hosts) == 1
