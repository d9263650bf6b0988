"""Files beside a `dataset.json` that it refers to by name and SHA-256: lists of shards, and removed keys."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vae.shards.store import StoreFile, read_file
from vae.system.files import MAX_JSON_BYTES, parse_json, read_regular, sha256_of_file, write_json

# Only names in the dataset's own folder: a dataset may come from a stranger.
JSON_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.json")
_KEY = re.compile(r"[0-9a-f]{32}")

Keys = tuple[bytes, ...]  # of images: the first 32 digits of the SHA-256 of a file
Removed = Mapping[str, Keys]  # by the name of their shard; "": in no shard


def write_hashed(path: Path, content: Any) -> dict[str, str]:
    """Write a JSON file; returns the reference to it."""
    write_json(path, content)
    return {"name": path.name, "sha256": sha256_of_file(path)}


def read_hashed(path: Path | StoreFile, reference: Any) -> str:
    """The text of a file that the dataset at `path` refers to; ValueError if it is not that file."""
    name = reference.get("name") if isinstance(reference, dict) else None
    if not isinstance(name, str) or not JSON_NAME.fullmatch(name):
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


def parse_removed(text: str) -> Removed:
    """The keys in the text of that file; ValueError if it is not valid."""
    content = parse_json(text)
    lists = list(content.values()) if isinstance(content, dict) else [None]
    if not all(map(_are_keys, lists)):
        raise ValueError("its list of removed keys is not valid")
    return {shard: tuple(map(str.encode, keys)) for shard, keys in content.items()}


def _are_keys(keys: Any) -> bool:
    """Whether it is a list of different keys."""
    is_list = isinstance(keys, list) and all(isinstance(key, str) and _KEY.fullmatch(key) for key in keys)
    return is_list and len(set(keys)) == len(keys)
