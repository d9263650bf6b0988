"""The manifest of a prepared set: one JSON object a line for each image, and which side each is on.

Keys of a row: path (relative to the manifest's folder, forward slashes), sha256, width, height, source,
flags, group, label and, once split, split ("train" or "val") and fold (a number or null).
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from vae.config.errors import DataError, UserError
from vae.console import printable
from vae.data.folder import split_names
from vae.files import atomic_path, sha256_of_file

MANIFEST_NAME = "manifest.jsonl"
KEYS = ("path", "sha256", "width", "height", "source", "flags", "group", "label")  # in this order
REQUIRED = ("path", "sha256")
SIDES = ("train", "val")
# A look at each file takes about 2 us on a local disk but 1 ms on a network share; this many take 20 s there.
MOST_LOOKED_AT = 20_000
MOST_HASHED = 16  # as many as are decoded on trial before a run starts


_decode = json.JSONDecoder().raw_decode  # json.loads looks for space around, which takes as long again


def is_manifest(path: str | os.PathLike) -> bool:
    """Whether `path` names a manifest rather than a folder of images."""
    return os.fspath(path).lower().endswith(".jsonl") and not os.path.isdir(path)


def image_root(data_path: str | os.PathLike) -> Path:
    """The folder that names of images are relative to: a manifest's own, or the folder itself."""
    return Path(data_path).parent if is_manifest(data_path) else Path(data_path)


def read_rows(path: str | os.PathLike, *, flag: str = "--data_path") -> Iterator[dict[str, Any]]:
    """The rows of a manifest, one at a time; DataError names the line that is no row."""
    for number, line in enumerate(read_lines(path, flag=flag), 1):
        yield parse_row(line, path, number, flag=flag)


def read_lines(path: str | os.PathLike, *, flag: str = "--data_path") -> Iterator[str]:
    """The lines of a manifest as they stand."""
    try:
        with open(path, encoding="utf-8") as file:
            yield from file
    except FileNotFoundError:
        raise DataError(
            f"{flag} {path} does not exist: prepare_data.py --mode preprocess writes one"
        ) from None
    except OSError as error:
        raise DataError(f"{flag} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{flag} {path} is not a manifest: it is not UTF-8 text") from error


def parse_row(
    line: str, path: str | os.PathLike, number: int, *, flag: str = "--data_path"
) -> dict[str, Any]:
    """One row from its line; DataError names manifest and line where it is none."""
    try:
        row, end = _decode(line)
        row = row if line[end:].isspace() or end == len(line) else None
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise DataError(f"{flag} {path}: line {number} is not a JSON object: write the manifest again")
    if type(row.get("path")) is not str or type(row.get("sha256")) is not str:
        missing = ", ".join(name for name in REQUIRED if not isinstance(row.get(name), str))
        raise DataError(f"{flag} {path}: line {number} lacks {missing}: write the manifest again")
    name = row["path"]
    if ".." in name.split("/") or name.startswith("/") or "\0" in name:
        raise DataError(f"{flag} {path}: line {number}: {name!r} does not lie in the manifest's folder")
    side, fold = row.get("split"), row.get("fold")
    if side not in (None, *SIDES) or not (fold is None or (type(fold) is int and fold >= 0)):
        raise DataError(
            f"{flag} {path}: line {number}: split {side!r} or fold {fold!r} is none that is known"
        )
    return row


def format_row(row: dict[str, Any]) -> str:
    """A row as its line, without the line break; any name fits, since all but ASCII is escaped."""
    return json.dumps(row)


def write_manifest(path: str | os.PathLike, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as a manifest, whole or not at all."""
    replace_text(path, (format_row(row) + "\n" for row in rows))


def replace_text(path: str | os.PathLike, parts: Iterable[str]) -> None:
    """Write text as a file, whole or not at all: a killed run leaves the old."""
    with atomic_path(Path(path)) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(parts)


def train_and_val(
    path: str | os.PathLike,
    *,
    fold: int | None,
    val_split: float,
    seed: int,
    val_split_given: bool = False,
) -> tuple[list[str], list[str]]:
    """Names to train on and to validate on, each sorted, as a manifest says.

    With `fold`, that fold validates, the others train, and images without a fold are left out. Otherwise
    the manifest's own split decides and, where it has none, `val_split` by hash of the group. Raises
    UserError where `val_split` was asked for although the manifest or `fold` decides.
    """
    names, sides, folds, groups = _columns(path)
    if fold is not None:
        if val_split_given:
            raise UserError(f"--fold {fold} and --val_split {val_split} both choose: give one of them")
        return _parts_of_fold(path, fold, names, folds)
    if any(side is not None for side in sides):
        if val_split_given:
            raise UserError(
                f"--val_split {val_split}: the manifest {path} is split already: leave the flag out, "
                "or split it again with prepare_data.py --mode split"
            )
        return _parts_of_split(path, names, sides)
    _, held = split_names(sorted(set(groups)), val_split, seed)
    held = set(held)
    train = [name for name, group in zip(names, groups, strict=True) if group not in held]
    return sorted(train), sorted(name for name, group in zip(names, groups, strict=True) if group in held)


def _columns(path) -> tuple[list[str], list[str | None], list[int | None], list[str]]:
    names, sides, folds, groups = [], [], [], []
    for row in read_rows(path):
        names.append(row["path"])
        sides.append(row.get("split"))
        folds.append(row.get("fold"))
        groups.append(group_key(row))
    if not names:
        raise DataError(f"--data_path {path} lists no images: prepare_data.py --mode preprocess fills it")
    if len(set(names)) < len(names):
        double = next(name for name, after in pairwise(sorted(names)) if name == after)
        raise DataError(f"--data_path {path} lists {double} twice: write the manifest again")
    return names, sides, folds, groups


def group_key(row: dict[str, Any]) -> str:
    """What must stay on one side: the row's group or, without one, its content, as copies are twins."""
    group = row.get("group")
    return f"content/{row['sha256']}" if group is None else f"group/{group}"


def _parts_of_fold(path, fold, names, folds) -> tuple[list[str], list[str]]:
    known = sorted({one for one in folds if one is not None})
    if not known:
        raise UserError(
            f"--fold {fold}: the manifest {path} has no folds: make them with "
            "prepare_data.py --mode split --num_folds 5"
        )
    if fold not in known:
        raise UserError(f"--fold {fold}: the manifest {path} has folds {known[0]} to {known[-1]}")
    train = sorted(n for n, one in zip(names, folds, strict=True) if one is not None and one != fold)
    return train, sorted(n for n, one in zip(names, folds, strict=True) if one == fold)


def _parts_of_split(path, names, sides) -> tuple[list[str], list[str]]:
    undecided = [name for name, side in zip(names, sides, strict=True) if side is None]
    if undecided:
        raise DataError(
            f"--data_path {path}: {len(undecided)} images have no side yet, for example {undecided[0]}: "
            "run prepare_data.py --mode split again, those that have one keep it"
        )
    train = sorted(name for name, side in zip(names, sides, strict=True) if side == "train")
    return train, sorted(name for name, side in zip(names, sides, strict=True) if side == "val")


def check_files(path: str | os.PathLike, names: Sequence[str]) -> None:
    """Raise DataError, one line with a name, where listed files are gone or their content has changed.

    Looks at all files of a set, or at 20,000 spread over it, and compares the SHA-256 of 16.
    """
    root = os.fspath(image_root(path))
    gone = [name for name in spread(names, MOST_LOOKED_AT) if not os.path.exists(os.path.join(root, name))]
    if gone:
        raise DataError(
            f"--data_path {path}: {len(gone)} of its images are gone, for example {printable(gone[0])}: "
            "bring them back or run prepare_data.py --mode preprocess again"
        )
    wanted = set(spread(names, MOST_HASHED))
    for row in read_rows(path):
        name = row["path"]
        if name in wanted and _sha256(os.path.join(root, name)) != row["sha256"]:
            raise DataError(
                f"--data_path {path}: {printable(name)} has changed since it was listed: "
                "run prepare_data.py --mode preprocess again"
            )


def spread(items: Sequence[str], most: int) -> list[str]:
    """At most `most` items at equal distances, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[index * (len(items) - 1) // (most - 1)] for index in range(most)]


def _sha256(path: str) -> str:
    try:
        return sha256_of_file(path)
    except OSError as error:
        raise DataError(f"{printable(os.fspath(path))} cannot be read: {error.strerror}") from error
