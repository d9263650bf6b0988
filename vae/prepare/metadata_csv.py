"""Metadata of images from CSV files: a features file and a labels file, joined by id.

The features file has the columns id, filepath and any others (site, camera, ...). The labels file has id and
either one column with the label, a name or a number, or one column of 0 and 1 for each label (one-hot).
"""

import csv
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vae.config.values import nearest
from vae.system.errors import DataError, UserError
from vae.system.files import csv_delimiter, csv_text

ID, FILEPATH = "id", "filepath"


@dataclass
class Metadata:
    """Values by image; images are named as in the features file, with forward slashes."""

    features_file: str
    columns: dict[str, list[str]]  # by column, one value per image
    positions: dict[str, int]  # by filepath
    labels: list[str] | None  # one per image

    def find(self, *names: str | None) -> int | None:
        """Position of the image with one of these names, or None."""
        for name in names:
            if name is not None and name in self.positions:
                return self.positions[name]
        return None

    def column(self, name: str, flag: str) -> list[str]:
        """Values of a column; raises UserError if the column does not exist or a value is empty."""
        if name not in self.columns:
            raise UserError(
                f"{flag} {name}: {self.features_file} has no such column{nearest(name, self.columns)} "
                f"(columns: {', '.join(self.columns)})"
            )
        values = self.columns[name]
        empty = [row for row, value in enumerate(values) if not value]
        if empty:
            raise DataError(
                f"{flag} {name}: {len(empty)} images of {self.features_file} have no {name}, for example "
                f"{self.columns[ID][empty[0]]}: fill it in"
            )
        return values


def read_metadata(
    features_file: str | os.PathLike[str], labels_file: str | os.PathLike[str] | None = None
) -> Metadata:
    """Join both files; raises UserError or DataError for invalid columns, ids or labels."""
    features_file = os.fspath(features_file)
    header, rows = read_table(features_file, "--features", needed=(ID, FILEPATH))
    columns: dict[str, list[str]] = {name: [] for name in header}
    for row in rows:
        for name, value in zip(header, row, strict=True):
            columns[name].append(value)
    _check_unique(columns[ID], ID, features_file, "--features")
    names = [_plain(name) for name in columns[FILEPATH]]
    _check_unique(names, FILEPATH, features_file, "--features")
    positions = {name: row for row, name in enumerate(names)}
    labels = _labels_of(columns[ID], features_file, os.fspath(labels_file)) if labels_file else None
    return Metadata(features_file, columns, positions, labels)


def _plain(path: str) -> str:
    path = path.replace("\\", "/")
    return path.removeprefix("./")


def _labels_of(ids: list[str], features_file: str, labels_file: str) -> list[str]:
    """The label of each id, in the order of `ids`."""
    header, rows = read_table(labels_file, "--labels", needed=(ID,))
    at = header.index(ID)
    names = [name for name in header if name != ID]
    if not names:
        raise UserError(
            f"--labels {labels_file} has no column besides id: add one with the label, or one for each label"
        )
    labels: dict[str, str] = {}
    for row in rows:
        image_id, values = row[at], row[:at] + row[at + 1 :]
        if image_id in labels:
            raise DataError(f"--labels {labels_file}: id {image_id} occurs twice: remove one row")
        labels[image_id] = values[0] if len(names) == 1 else _hot_one(names, values, image_id, labels_file)
        if not labels[image_id]:
            raise DataError(f"--labels {labels_file}: id {image_id} has no label: fill it in")
    missing = [image_id for image_id in ids if image_id not in labels]
    if missing:
        raise DataError(
            f"--labels {labels_file} lacks {len(missing)} ids of {features_file}, for example "
            f"{missing[0]}: add them"
        )
    if len(labels) > len(ids):
        known = set(ids)
        unknown = [image_id for image_id in labels if image_id not in known]
        raise DataError(
            f"--labels {labels_file} has {len(unknown)} ids that {features_file} lacks, for example "
            f"{unknown[0]}: remove them"
        )
    return [labels[image_id] for image_id in ids]


def _hot_one(names: list[str], values: list[str], one: str, labels_file: str) -> str:
    """The name of the column that is 1; raises DataError unless exactly one is 1 and the others are 0."""
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        numbers = []
    if sorted(numbers) != [0.0] * (len(names) - 1) + [1.0]:
        raise DataError(
            f"--labels {labels_file}: id {one} is not one-hot over {len(names)} columns: "
            "set exactly one to 1 and the others to 0, or give one column with the label"
        )
    return names[numbers.index(1.0)]


def read_table(path: str, flag: str, needed: tuple[str, ...]) -> tuple[list[str], Iterator[list[str]]]:
    """Header and rows of a CSV file with commas, semicolons or tabs."""
    lines = _lines(path, flag)
    first = next(lines, "")
    delimiter = csv_delimiter(first)
    header = [csv_text(name.strip()) for name in next(csv.reader([first], delimiter=delimiter), [])]
    missing = [name for name in needed if name not in header]
    if missing:
        has = ", ".join(header) or "nothing"
        raise UserError(f"{flag} {path} lacks the column {' and '.join(missing)} (it has {has}): add it")
    if len(set(header)) < len(header):
        double = next(name for name in header if header.count(name) > 1)
        raise UserError(f"{flag} {path} has the column {double} twice: rename one")
    return header, _rows(lines, delimiter, len(header), path, flag)


def _lines(path: str, flag: str) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            yield from file
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be read: {error.strerror}: give another file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{flag} {path} is not UTF-8 text: save it as CSV in UTF-8") from error


def _rows(lines: Iterable[str], delimiter: str, width: int, path: str, flag: str) -> Iterator[list[str]]:
    reader = csv.reader(lines, delimiter=delimiter)
    try:
        for row in reader:
            if not row:
                continue
            if len(row) != width:
                raise DataError(
                    f"{flag} {path}: line {reader.line_num + 1} has {len(row)} values for {width} columns: "
                    "correct the line"
                )
            yield [csv_text(value.strip()) for value in row]
    except csv.Error as error:
        raise DataError(f"{flag} {path}: line {reader.line_num + 1} cannot be read: {error}") from error


def _check_unique(values: list[str], name: str, path: str, flag: str) -> None:
    if len(set(values)) == len(values):
        return
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise DataError(f"{flag} {path}: {name} {value} occurs twice: remove one row")
        seen.add(value)
