"""The labels of a probe: a CSV file or a manifest, checked against the images, and their folds."""

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vae.data.manifest import group_key, is_manifest, read_rows
from vae.system import console
from vae.system.console import printable
from vae.system.errors import DataError, UserError
from vae.system.files import csv_delimiter

NAME_COLUMNS = ("path", "image", "filepath", "filename", "id")
MIN_FOLDS = 3  # one to measure, one to stop early and to weight heads, the others to train


@dataclass(frozen=True)
class Labels:
    """The labelled images, by position."""

    names: list[str]
    classes: list[str]  # sorted
    targets: np.ndarray  # int64 (N,), index of the class
    groups: np.ndarray  # int64 (N,); images of one group are always in the same fold
    folds: np.ndarray  # int64 (N,)
    num_folds: int


def read_labels(path: str, known: Sequence[str], column: str, num_folds: int) -> Labels:
    """The labels of the images `known`; UserError or DataError in one line if they cannot be probed."""
    rows = label_rows(path, column)
    unknown = sorted(rows.keys() - set(known))
    if unknown:
        raise DataError(
            f"--probe {path}: {len(unknown)} of its {len(rows)} images are not among the usable images of "
            f"--data_path, for example {printable(unknown[0])}: remove these rows, or give their folder"
        )
    names = [name for name in known if name in rows]
    texts = [str(rows[name][0]) for name in names]
    classes = sorted(set(texts))
    if len(classes) < 2:
        found = f"only the class {printable(classes[0])}" if classes else "no labels"
        raise DataError(f"--probe {path} has {found} in the column {column}: give at least two classes")
    targets = np.array([classes.index(text) for text in texts])
    groups = _numbers([rows[name][1] or f"image/{name}" for name in names])
    given = [rows[name][2] for name in names]
    if all(fold is not None for fold in given):
        folds = _numbers(given)
        num_folds = int(folds.max()) + 1
        _check_groups(path, names, groups, folds)
        _check_folds(path, classes, targets, folds, num_folds)
    else:
        if known_folds := sum(fold is not None for fold in given):
            console.info(
                f"--probe {path}: {known_folds} of {len(given)} images have a fold: all get a new one"
            )
        _check_counts(path, classes, targets, groups, num_folds)
        folds = assign_folds(targets, groups, num_folds)
    return Labels(names, classes, targets, groups, folds, num_folds)


def label_rows(path: str, column: str) -> dict[str, tuple[Any, Any, Any]]:
    """Label, group and fold of each labelled image. DataError if one is listed twice."""
    rows: dict[str, tuple[Any, Any, Any]] = {}
    for name, *values in _rows(path, column):
        if name in rows:
            raise DataError(f"--probe {path} lists {printable(name)} twice: keep one of these rows")
        rows[name] = tuple(values)
    return rows


def _rows(path: str, column: str) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Name, label, group and fold of each labelled row."""
    if is_manifest(path):
        for row in read_rows(path, flag="--probe"):
            if row.get(column) is not None:
                yield row["path"], row[column], group_key(row), row.get("fold")
        return
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            reader = csv.DictReader(file, delimiter=csv_delimiter(first))
            columns = reader.fieldnames or []
            name = next((name for name in NAME_COLUMNS if name in columns), None)
            if name is None or column not in columns:
                raise DataError(
                    f"--probe {path} needs a column {column} and one of {', '.join(NAME_COLUMNS)}, and "
                    f"has {', '.join(map(printable, columns)) or 'none'}: separate them "
                    "by commas, semicolons or tabs, rename them, or use --probe_column"
                )
            for row in reader:
                if row[column] and not row[name]:
                    raise DataError(
                        f"--probe {path}: line {reader.line_num} has a label and no {name}: add it"
                    )
                if row[column]:
                    yield row[name], row[column], row.get("group") or None, row.get("fold") or None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"--probe {path} cannot be read as CSV: {error}") from None


def _numbers(values: Sequence[Any]) -> np.ndarray:
    """The values numbered by their order."""
    return np.unique([str(value) for value in values], return_inverse=True)[1]


def _check_counts(
    path: str, classes: Sequence[str], targets: np.ndarray, groups: np.ndarray, num_folds: int
) -> None:
    """Raise DataError if a class has too few groups for the folds."""
    counts = Counter(target for target, _ in set(zip(targets.tolist(), groups.tolist(), strict=True)))
    rarest = min(counts, key=lambda target: counts[target])
    if counts[rarest] < num_folds:
        enough = counts[rarest] >= MIN_FOLDS
        raise DataError(
            f"--probe {path}: the class {printable(classes[rarest])} has images of {counts[rarest]} groups, "
            f"fewer than --probe_folds {num_folds}: add images, or "
            f"{f'lower --probe_folds to {counts[rarest]}' if enough else 'remove the class'}"
        )


def _check_folds(
    path: str, classes: Sequence[str], targets: np.ndarray, folds: np.ndarray, num_folds: int
) -> None:
    """Raise an error if the folds are too few, or if a class is measured by heads that never saw it."""
    if num_folds < MIN_FOLDS:
        raise UserError(f"--probe {path} has {num_folds} folds: at least {MIN_FOLDS} are needed")
    for target, name in enumerate(classes):
        present = set(folds[targets == target].tolist())
        if any(not present - {fold, stopping_fold(fold, num_folds)} for fold in present):
            raise DataError(
                f"--probe {path}: the class {printable(name)} is in {len(present)} of {num_folds} folds, too "
                "few to train and to measure it: add images, remove the class, or remove the column fold"
            )


def stopping_fold(fold: int, num_folds: int) -> int:
    """The fold that decides when training stops, if `fold` is measured; the others train."""
    return (fold + 1) % num_folds


def _check_groups(path: str, names: Sequence[str], groups: np.ndarray, folds: np.ndarray) -> None:
    """Raise DataError if a group is in several folds: its images would be trained on and measured."""
    first: dict[int, int] = {}
    for number, (group, fold) in enumerate(zip(groups.tolist(), folds.tolist(), strict=True)):
        if folds[first.setdefault(group, number)] != fold:
            raise DataError(
                f"--probe {path}: {printable(names[first[group]])} and {printable(names[number])} are of one "
                "group but in different folds: split again, or remove the column fold"
            )


def assign_folds(targets: np.ndarray, groups: np.ndarray, num_folds: int) -> np.ndarray:
    """The fold of each image, by scikit-learn's StratifiedGroupKFold."""
    from sklearn.model_selection import StratifiedGroupKFold

    folds = np.zeros(len(targets), dtype=np.int64)
    splitter = StratifiedGroupKFold(num_folds, shuffle=True, random_state=0)
    for fold, (_, test) in enumerate(splitter.split(targets, targets, groups)):
        folds[test] = fold
    return folds
