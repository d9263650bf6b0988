"""The group and the label of each row of a manifest, by the rule that the user names."""

import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from vae.config.prepare_flags import ReadingConfig
from vae.data.manifest import read_rows
from vae.prepare.blocks import Source, file_blocks
from vae.prepare.check import Check
from vae.prepare.inside import inside
from vae.prepare.metadata_csv import ID, Metadata
from vae.prepare.near_duplicates import group_names, words_of
from vae.prepare.rows import RowFolder
from vae.prepare.table import Table
from vae.system.errors import DataError, UserError

NEAR_DUPLICATES, MANIFEST, FOLDER = "near_duplicates", "manifest", "folder"
FLAG = "--input_dir"
Rule = Callable[[dict[str, Any]], str | None]


def rule_for(by: str, flag: str, metadata: Metadata | None) -> Rule:
    """The value of a row by `manifest` (the row's own), `folder:2` (its two outermost), or a column.

    UserError if there is no such rule. The rule raises DataError for a row without a value.
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
    metadata.check_column(by, flag)
    return lambda row: _features_of(metadata, row)[by]


def label_rule(label_by: str | None, metadata: Metadata | None) -> Rule:
    """The label of a row from the labels file."""
    assert metadata is not None, "the flags were checked together"
    if label_by is not None:
        raise UserError(f"--label_by {label_by} and --labels both give labels: leave one of them out")
    labels = metadata.labels or {}
    return lambda row: labels[_features_of(metadata, row)[ID]]


def _folder_of(levels: int, setting: str, row: dict[str, Any]) -> str:
    parts = row["path"].split("/")[:-1]
    if len(parts) < levels:
        raise DataError(
            f"{setting}: {row['path']} has only {len(parts)} folders in its path: move it or use fewer levels"
        )
    return "/".join(parts[:levels])


def _features_of(metadata: Metadata, row: dict[str, Any]) -> dict[str, str]:
    found = metadata.find(row["path"], row.get("source"))
    if found is None:
        raise DataError(
            f"--features {metadata.features_file} has no row for {row['path']} of the manifest: "
            "add one, with the path below the prepared or the original folder"
        )
    return found


def near_duplicate_rule(manifest: Path, num_workers: str) -> tuple[Rule, dict[str, list[str]]]:
    """The rule that groups images that look alike, and the images of each group; others have no group.

    A manifest of --mode preprocess has the perceptual hashes. Other images are decoded.
    """
    rows = list(read_rows(manifest, flag=FLAG))
    hashes = {row["sha256"]: row["phash"] for row in rows if _is_hash(row.get("phash"))}
    missing = {row["sha256"]: row["path"] for row in rows if row["sha256"] not in hashes}
    if missing:
        paths = sorted(missing.values())
        found = dict(zip(paths, _decode(manifest.parent, paths, num_workers), strict=True))
        hashes |= {content: found[path] for content, path in missing.items()}
    order = sorted(hashes)
    names = group_names(order, words_of([hashes[content] for content in order]))
    groups = {order[at]: name for at, name in names.items()}
    members: dict[str, list[str]] = {}
    for row in rows:
        if row["sha256"] in groups:
            members.setdefault(groups[row["sha256"]], []).append(row["path"])
    return lambda row: groups.get(row["sha256"]), members


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None


def _decode(folder: Path, paths: list[str], num_workers: str) -> list[str]:
    """The perceptual hashes of images; DataError for one that cannot be decoded."""
    for path in paths:
        inside(folder, path, f"{FLAG} {folder}")
    config = ReadingConfig(input_dir=str(folder), num_workers=num_workers)
    source = Source(str(folder), list(file_blocks(str(folder), paths)), "image")
    with (
        tempfile.TemporaryDirectory(prefix="vae-trainer-") as scratch,
        RowFolder(Path(scratch), FLAG, {}).claimed() as rows,
    ):
        rows.run(source, Check(config), "near duplicates")
        found = Table(rows, source.blocks).all("SELECT phash, name, reason, detail FROM images ORDER BY n")
    for phash, name, reason, detail in found:
        if phash is None:
            raise DataError(
                f"{FLAG}: {folder / name} cannot be compared with the other images "
                f"({reason}: {detail}): validate and preprocess the images first"
            )
    return [phash for phash, *_ in found]
