"""Metadata of images from CSV files: a features file and a labels file, joined by id.

The features file has the columns id, filepath and any others (site, camera, ...). The labels file has id and
either one column with the label, a name or a number, or one column of 0 and 1 for each label (one-hot).
"""

import csv
import io
from collections import Counter
from dataclasses import dataclass

from vae.config.values import nearest
from vae.system.errors import DataError, UserError
from vae.system.files import csv_delimiter, csv_text, open_regular

ID, FILEPATH = "id", "filepath"
Rows = dict[str, dict[str, str]]  # by id; values by column


@dataclass
class Metadata:
    """Values by image; images are named as in the features file, with forward slashes."""

    features_file: str
    rows: Rows  # by filepath
    labels: dict[str, str] | None  # by id

    def find(self, *names: str | None) -> dict[str, str] | None:
        """The row of the image with one of these names, or None."""
        return next((self.rows[name] for name in names if name in self.rows), None)

    def check_column(self, name: str, flag: str) -> None:
        """Raise UserError if the column does not exist, DataError if a value is empty."""
        columns = next(iter(self.rows.values()), {})
        if name not in columns:
            raise UserError(
                f"{flag} {name}: {self.features_file} has no such column{nearest(name, columns)} "
                f"(columns: {', '.join(columns)})"
            )
        empty = [row[ID] for row in self.rows.values() if not row[name]]
        if empty:
            raise DataError(
                f"{flag} {name}: {len(empty)} images of {self.features_file} have no {name}, for example "
                f"{empty[0]}: fill it in"
            )


def read_metadata(features_file: str, labels_file: str | None = None) -> Metadata:
    """Join both files; raises UserError or DataError for invalid columns, ids or labels."""
    by_id = read_table(features_file, "--features", (ID, FILEPATH))
    paths = [row[FILEPATH].replace("\\", "/").removeprefix("./") for row in by_id.values()]
    rows = dict(zip(paths, by_id.values(), strict=True))
    if len(rows) < len(by_id):
        double = Counter(paths).most_common(1)[0][0]
        raise DataError(f"--features {features_file}: {FILEPATH} {double} occurs twice: remove one row")
    labels = _labels_of(by_id, features_file, labels_file) if labels_file else None
    return Metadata(features_file, rows, labels)


def _labels_of(by_id: Rows, features_file: str, labels_file: str) -> dict[str, str]:
    """The label of each id."""
    rows = read_table(labels_file, "--labels", (ID,))
    for ours, theirs, inner, outer in (
        (by_id, rows, labels_file, features_file),
        (rows, by_id, features_file, labels_file),
    ):
        if missing := [image_id for image_id in ours if image_id not in theirs]:
            raise DataError(
                f"--labels {labels_file}: {inner} lacks {len(missing)} ids of {outer}, for example "
                f"{missing[0]}: add them, or remove them there"
            )
    return {image_id: _label(row, f"--labels {labels_file}: id {image_id}") for image_id, row in rows.items()}


def _label(row: dict[str, str], place: str) -> str:
    """The one value of a row, or the name of the column that is 1; DataError if it has no label."""
    values = {name: value for name, value in row.items() if name != ID}
    if len(values) == 1:
        label = next(iter(values.values()))
        if not label:
            raise DataError(f"{place} has no label: fill it in")
        return label
    ones = [name for name, value in values.items() if value in ("1", "1.0")]
    if len(ones) != 1 or any(value not in ("0", "0.0", "1", "1.0") for value in values.values()):
        raise DataError(
            f"{place} is not one-hot over {len(values)} columns: set exactly one to 1 and the others to 0, "
            "or give one column with the label"
        )
    return ones[0]


def read_table(path: str, flag: str, needed: tuple[str, ...]) -> Rows:
    """The rows of a CSV file with commas, semicolons or tabs; one-line errors for what is wrong with it."""
    rows: Rows = {}
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="") as file:
            delimiter = csv_delimiter(file.readline())
            file.seek(0)
            reader = csv.reader(file, delimiter=delimiter)
            header = [csv_text(name.strip()) for name in next(reader, [])]
            _check_header(header, needed, f"{flag} {path}")
            for values in filter(None, reader):
                if len(values) != len(header):
                    raise DataError(
                        f"{flag} {path}: line {reader.line_num} has {len(values)} values for {len(header)} "
                        "columns: correct the line"
                    )
                row = dict(zip(header, (csv_text(value.strip()) for value in values), strict=True))
                if row[ID] in rows:
                    raise DataError(f"{flag} {path}: {ID} {row[ID]} occurs twice: remove one row")
                rows[row[ID]] = row
    except OSError as error:
        raise DataError(f"{flag} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{flag} {path} is not UTF-8 text: save it as UTF-8") from error
    except csv.Error as error:
        raise DataError(f"{flag} {path}: line {reader.line_num} cannot be read: {error}") from error
    return rows


def _check_header(header: list[str], needed: tuple[str, ...], place: str) -> None:
    if missing := [name for name in needed if name not in header]:
        has = ", ".join(header) or "nothing"
        raise UserError(f"{place} lacks the column {' and '.join(missing)} (it has {has}): add it")
    if len(header) < 2:
        raise UserError(f"{place} has no column besides id: add one with the label, or one for each label")
    name, count = Counter(header).most_common(1)[0]
    if count > 1:
        raise UserError(f"{place} has the column {name} twice: rename one")
