"""The group and the label of each row of a manifest, by the rule that the user names."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vae.config.prepare_flags import ReadingConfig
from vae.data.manifest import read_rows
from vae.prepare.blocks import Source, file_blocks
from vae.prepare.check import Check, image_limits
from vae.prepare.inside import inside
from vae.prepare.metadata_csv import Metadata
from vae.prepare.near_duplicates import find_clusters
from vae.prepare.rows import HIDDEN, RowFolder
from vae.prepare.table import Table
from vae.system.errors import DataError, UserError
from vae.system.files import read_json_lines

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
    """The rule that groups images that look alike, and the images of each group; others have no group.

    The rows of --mode preprocess have the hashes of its images. Other images are decoded.
    """
    contents = {row["path"]: row["sha256"] for row in read_rows(manifest, flag=FLAG)}
    hashes = dict(_known_hashes(manifest.parent, set(contents.values())))
    missing = sorted(path for path, content in contents.items() if content not in hashes)
    if missing:
        hashes |= _decode(manifest.parent, missing, contents, num_workers)
    order = sorted(set(contents.values()))
    words = np.array([[int(hashes[c][:16], 16), int(hashes[c][16:], 16)] for c in order], np.uint64)
    clusters = find_clusters(words.reshape(-1, 2))
    sizes = np.bincount(clusters, minlength=len(order))
    groups = {
        order[at]: f"near-{order[clusters[at]][:16]}" for at in np.flatnonzero(sizes[clusters] > 1).tolist()
    }
    members: dict[str, list[str]] = {}
    for path, content in contents.items():
        if content in groups:
            members.setdefault(groups[content], []).append(path)
    return lambda row: groups.get(row["sha256"]), members


def _known_hashes(folder: Path, wanted: set[str]) -> Iterator[tuple[str, str]]:
    """SHA-256 and perceptual hash of the images that --mode preprocess wrote into a folder."""
    root = folder if (folder / HIDDEN).is_dir() or not folder.name.isdecimal() else folder.parent
    for path in sorted((root / HIDDEN / "rows").glob("*.jsonl")):
        with suppress(OSError, ValueError):  # a damaged file: its images are decoded
            for row in read_json_lines(path):
                yield from _hashes_of(row, wanted)


def _hashes_of(row: dict[str, Any], wanted: set[str]) -> Iterator[tuple[str, str]]:
    made, phash = row.get("made"), row.get("phash")
    sizes = made.get("sizes") if isinstance(made, dict) else None
    if isinstance(sizes, dict) and isinstance(phash, str) and _is_hash(phash):
        for one in sizes.values():
            content = one.get("sha256") if isinstance(one, dict) else None
            if isinstance(content, str) and content in wanted:
                yield content, phash


def _is_hash(text: str) -> bool:
    return len(text) == 32 and all(char in "0123456789abcdef" for char in text)


def _decode(folder: Path, paths: list[str], contents: dict[str, str], num_workers: str) -> dict[str, str]:
    """The perceptual hash of images, by the SHA-256 that the manifest lists; DataError for one without."""
    for path in paths:
        inside(folder, path, f"{FLAG} {folder}")
    config = ReadingConfig(input_dir=str(folder), num_workers=num_workers)
    source = Source(str(folder), list(file_blocks(str(folder), paths, FLAG)), "image")
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="vae-trainer-"))
        rows = stack.enter_context(RowFolder(Path(scratch), FLAG, {}).claimed())
        limits = image_limits(config)
        rows.run(
            source, Check(config), num_workers, limits, seconds=config.time_limit, title="near duplicates"
        )
        table = Table(rows, source.blocks, rows.scratch)
        found = table.all("SELECT n, phash, name, reason, detail FROM images ORDER BY n")
    for _, phash, name, reason, detail in found:
        if phash is None:
            raise DataError(
                f"{FLAG}: {folder / name} cannot be compared with the other images "
                f"({reason}: {detail}): validate and preprocess the images first"
            )
    return {contents[paths[n]]: phash for n, phash, *_ in found}
