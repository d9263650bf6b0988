"""The group and the label of each row of a manifest, by the rule that the user names."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from vae.config.prepare_flags import SplitConfig
from vae.data.manifest import read_rows
from vae.prepare.join import read_column
from vae.prepare.near_duplicates import group_names, words_of
from vae.system.errors import DataError, UserError

NEAR_DUPLICATES, MANIFEST, FOLDER = "near_duplicates", "manifest", "folder"
FLAG = "--input_dir"
Rule = Callable[[dict[str, Any]], str | None]


def rule_for(by: str, flag: str, config: SplitConfig) -> Rule:
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
    if config.join is None:
        raise UserError(
            f"{flag} {by} is a column: give the file with this column by --join FILE, or use "
            f"{NEAR_DUPLICATES + ', ' if flag == '--group_by' else ''}{MANIFEST} or {FOLDER}:1"
        )
    return partial(_value_of, read_column(config.join, config.join_on, by, flag), f"{flag} {by}")


def _folder_of(levels: int, setting: str, row: dict[str, Any]) -> str:
    parts = row["path"].split("/")[:-1]
    if len(parts) < levels:
        raise DataError(
            f"{setting}: {row['path']} has only {len(parts)} folders in its path: move it or use fewer levels"
        )
    return "/".join(parts[:levels])


def _value_of(values: Mapping[str, str | None], setting: str, row: dict[str, Any]) -> str:
    value = values.get(row["path"]) or values.get(row.get("source") or "")
    if not value:
        raise DataError(
            f"{setting}: --join has no value for {row['path']} of the manifest: add one, with the path below "
            "the prepared or the original folder"
        )
    return value


def near_duplicate_rule(manifest: Path) -> tuple[Rule, dict[str, list[str]]]:
    """The rule that groups images that look alike, and the images of each group; others have no group.

    DataError for a row without the perceptual hash that --mode preprocess writes.
    """
    hashes: dict[str, str] = {}
    paths: dict[str, list[str]] = {}
    for row in read_rows(manifest, flag=FLAG):
        if not _is_hash(row.get("phash")):
            raise DataError(
                f"{FLAG} {manifest}: {row['path']} has no phash, which --mode preprocess writes: run it, "
                f"or give --group_by {MANIFEST} or {FOLDER}:1"
            )
        hashes[row["sha256"]] = row["phash"]
        paths.setdefault(row["sha256"], []).append(row["path"])
    order = sorted(hashes)
    names = group_names(order, words_of([hashes[content] for content in order]))
    groups = {order[at]: name for at, name in names.items()}
    members: dict[str, list[str]] = {}
    for content, name in groups.items():
        members.setdefault(name, []).extend(paths[content])
    return lambda row: groups.get(row["sha256"]), members


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None
