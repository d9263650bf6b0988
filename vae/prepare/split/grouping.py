"""The group and the label of each row of a manifest, by the rule that the user names."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from vae.config.prepare_flags import ReadingConfig
from vae.data.manifest import MANIFEST_NAME, read_rows
from vae.prepare.near_duplicate_groups import fingerprint_all, near_duplicate_groups
from vae.prepare.split.metadata_csv import Metadata
from vae.system.errors import DataError, UserError

NEAR_DUPLICATES, MANIFEST, FOLDER = "near_duplicates", "manifest", "folder"
Rule = Callable[[dict[str, Any]], str | None]


def rule_for(by: str, flag: str, metadata: Metadata | None) -> Rule:
    """The value of a row by `manifest` (the row's own), `folder:2` (its two outermost), or a column.

    Raises UserError if there is no such rule. The rule raises DataError for a row without a value.
    """
    kind, _, levels = by.partition(":")
    if by == MANIFEST:
        key = "group" if flag == "--group_by" else "label"
        return lambda row: row.get(key)
    if kind == FOLDER:
        if levels and not (levels.isdecimal() and int(levels) > 0):
            raise UserError(
                f"{flag} {by}: {levels!r} is not a number of levels: give folder:1, folder:2, ..."
            )
        return partial(_folder_of, int(levels or 1), f"{flag} {by}")
    if metadata is None:
        raise UserError(
            f"{flag} {by} is a column: give the file with this column by --features FILE, or use "
            f"{NEAR_DUPLICATES + ', ' if flag == '--group_by' else ''}{MANIFEST} or {FOLDER}:1"
        )
    return partial(_value_of, metadata, metadata.column(by, flag))


def label_rule(label_by: str | None, metadata: Metadata | None) -> Rule:
    """The label of a row: by --label_by, else from the labels file, else the manifest's own."""
    if metadata is not None and metadata.labels is not None:
        if label_by is not None:
            raise UserError(f"--label_by {label_by} and --labels both give labels: leave one of them out")
        return partial(_value_of, metadata, metadata.labels)
    return rule_for(label_by or MANIFEST, "--label_by", metadata)


def _folder_of(levels: int, setting: str, row: dict[str, Any]) -> str:
    parts = row["path"].split("/")[:-1]
    if len(parts) < levels:
        raise DataError(
            f"{setting}: {row['path']} has only {len(parts)} folders in its path: move it or use fewer levels"
        )
    return "/".join(parts[:levels])


def _value_of(metadata: Metadata, values: list[str], row: dict[str, Any]) -> str:
    position = metadata.find(row["path"], row.get("source"))
    if position is None:
        raise DataError(
            f"--features {metadata.features_file} has no row for {row['path']} of the manifest: "
            "add one, with the path below the prepared or the original folder"
        )
    return values[position]


def near_duplicate_rule(manifest: Path, num_workers: str) -> tuple[Rule, dict[str, list[str]]]:
    """The rule that groups near duplicates, and the images of each group; other images have no group.

    Fingerprints are stored beside the manifest by content, so later runs only read new images.
    """
    folder = manifest.parent
    contents = {row["path"]: row["sha256"] for row in read_rows(manifest, flag="--input_dir")}
    paths = {content: os.path.join(folder, path) for path, content in contents.items()}
    config = ReadingConfig(input_dir=str(folder), num_workers=num_workers)
    groups = near_duplicate_groups(sorted(fingerprint_all(folder, paths, config).items()), folder)
    members: dict[str, list[str]] = {}
    for path, content in contents.items():
        if content in groups:
            members.setdefault(groups[content], []).append(path)
    return lambda row: groups.get(row["sha256"]), members


def find_manifest(input_dir: str | os.PathLike[str]) -> Path:
    """The manifest in `input_dir`, or `input_dir` itself if it is a file; DataError if there is none."""
    path = Path(input_dir)
    if path.is_dir():
        path /= MANIFEST_NAME
    if not path.is_file():
        raise DataError(
            f"--input_dir {input_dir} contains no {MANIFEST_NAME}: "
            "make one with prepare_data.py --mode preprocess"
        )
    return path
