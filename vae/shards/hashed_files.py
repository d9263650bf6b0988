"""Files beside a `dataset.json` that it refers to by name and SHA-256: lists of shards."""

import hashlib
import re
from pathlib import Path
from typing import Any

from vae.shards.store import StoreFile, read_file
from vae.system.files import MAX_JSON_BYTES, read_regular, sha256_of_file, write_json

# Only names in the dataset's own folder: a dataset may come from a stranger.
JSON_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.json")


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
