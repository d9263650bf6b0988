"""The manifest of a prepared data set: one JSON object per line and image, and the splits it defines.

`path` is relative to the manifest's folder and has forward slashes, `phash` is the perceptual hash of the
source. prepare_data.py --mode split writes `split` ("train" or "val") and `fold` (a number or null).
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from vae.images.folder import split_names
from vae.system.errors import DataError, UserError
from vae.system.files import open_text

MANIFEST_NAME = "manifest.jsonl"
# The keys of a row, in this order: of its image, for choosing subsets, and the subsets.
IMAGE_KEYS = ("path", "sha256", "width", "height", "source", "flags", "phash")
GROUP_KEYS = ("group", "label")
SPLIT_KEYS = ("split", "fold")
REQUIRED = ("path", "sha256")
SPLITS = ("train", "val")

# Absolute paths, drives, shares and parent folders of Linux and of Windows, refused on every system.
_OUTSIDE = re.compile(r"^[/\\]|^[A-Za-z]:|(^|[/\\])\.\.([/\\]|$)|\0")


def is_manifest(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a manifest and not a folder of images."""
    return os.fspath(path).lower().endswith(".jsonl") and not os.path.isdir(path)


def manifest_of(data_path: Sequence[str]) -> str | None:
    """The manifest that --data_path names; None for folders and for datasets of shards."""
    return data_path[0] if len(data_path) == 1 and is_manifest(data_path[0]) else None


def image_root(data_path: str | os.PathLike[str]) -> Path:
    """The folder that image names are relative to: that of the manifest, or the folder itself."""
    return Path(data_path).parent if is_manifest(data_path) else Path(data_path)


def read_rows(path: str | os.PathLike[str], *, flag: str = "--data_path") -> Iterator[dict[str, Any]]:
    """Yield the rows of a manifest; DataError with the number of the first invalid line."""
    try:
        with open_text(path) as file:
            for number, line in enumerate(file, 1):
                yield _parse_row(line, f"{flag} {path}: line {number}")
    except FileNotFoundError:
        raise DataError(
            f"{flag} {path} does not exist: prepare_data.py --mode preprocess writes one"
        ) from None
    except OSError as error:
        raise DataError(f"{flag} {path} cannot be read: {error.strerror}") from error
    except UserError:
        raise
    except ValueError as error:
        raise DataError(f"{flag} {path} is not a manifest: {error}") from error


def _parse_row(line: str, where: str) -> dict[str, Any]:
    """Parse one line; DataError if it is not a valid row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise DataError(f"{where} is not a JSON object: write the manifest again")
    missing = [name for name in REQUIRED if not isinstance(row.get(name), str)]
    if missing:
        raise DataError(f"{where} lacks {', '.join(missing)}: write the manifest again")
    name = row["path"]
    if not name or _OUTSIDE.search(name):
        raise DataError(f"{where}: {name!r} is not in the manifest's folder")
    split, fold = row.get("split"), row.get("fold")
    if split not in (None, *SPLITS) or not (fold is None or (type(fold) is int and fold >= 0)):
        raise DataError(f"{where}: split {split!r} or fold {fold!r} is not valid")
    return row


def train_and_val(
    path: str | os.PathLike[str],
    *,
    fold: int | None,
    val_split: float,
    seed: int,
    val_split_given: bool = False,
) -> tuple[list[str], list[str]]:
    """Names for training and for validation, each sorted, as the manifest defines them.

    With `fold`, that fold is the validation set, the other folds are the training set, and images without a
    fold are excluded. Otherwise the manifest's split is used or, if it has none, `val_split` by hash of the
    group. Raises UserError if `val_split` was given although the manifest or `fold` defines the split.
    """
    rows = _read_split_rows(path)
    if fold is not None:
        if val_split_given:
            raise UserError(f"--fold {fold} and --val_split {val_split} exclude each other: give one of them")
        _check_fold(path, fold, rows)
        return _partition((row.name, row.fold == fold) for row in rows if row.fold is not None)
    if any(row.split is not None for row in rows):
        if val_split_given:
            raise UserError(
                f"--val_split {val_split}: the manifest {path} is split already: omit the flag, "
                "or split it again with prepare_data.py --mode split"
            )
        undecided = [row.name for row in rows if row.split is None]
        if undecided:
            raise DataError(
                f"--data_path {path}: {len(undecided)} images have no split yet, for example {undecided[0]}: "
                "run prepare_data.py --mode split again"
            )
        return _partition((row.name, row.split == "val") for row in rows)
    _, validation_groups = split_names(sorted({row.group for row in rows}), val_split, seed)
    chosen = set(validation_groups)
    return _partition((row.name, row.group in chosen) for row in rows)


class _SplitRow(NamedTuple):
    """The columns of a manifest that define its splits."""

    name: str
    split: str | None
    fold: int | None
    group: str


def _read_split_rows(path: str | os.PathLike[str]) -> list[_SplitRow]:
    rows = [
        _SplitRow(row["path"], row.get("split"), row.get("fold"), group_key(row)) for row in read_rows(path)
    ]
    if not rows:
        raise DataError(f"--data_path {path} lists no images: prepare_data.py --mode preprocess adds them")
    if len({row.name for row in rows}) < len(rows):
        names = sorted(row.name for row in rows)
        duplicate = next(name for name, after in pairwise(names) if name == after)
        raise DataError(f"--data_path {path} lists {duplicate} twice: write the manifest again")
    return rows


def group_key(row: dict[str, Any]) -> str:
    """Key of the images that must be in the same split: the row's group or, without one, its content hash."""
    group = row.get("group")
    return f"content/{row['sha256']}" if group is None else f"group/{group}"


def _check_fold(path: str | os.PathLike[str], fold: int, rows: list[_SplitRow]) -> None:
    known = sorted({row.fold for row in rows if row.fold is not None})
    if not known:
        raise UserError(
            f"--fold {fold}: {path} has no folds: create them with prepare_data.py --mode split --num_folds 5"
        )
    if fold not in known:
        raise UserError(f"--fold {fold}: the manifest {path} has folds {known[0]} to {known[-1]}")


def _partition(names: Iterable[tuple[str, bool]]) -> tuple[list[str], list[str]]:
    """Sorted training names and sorted validation names, from (name, is in the validation set)."""
    train: list[str] = []
    validation: list[str] = []
    for name, is_validation in names:
        (validation if is_validation else train).append(name)
    return sorted(train), sorted(validation)
