"""The group and the label of each row of a manifest, by the rule that the user names."""

import os
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vae.data.manifest import MANIFEST_NAME, read_rows
from vae.images.formats import BadImageError
from vae.prepare.fingerprints import (
    Fingerprint,
    fingerprint_file,
    fingerprints_to_add,
    read_fingerprints,
)
from vae.prepare.near_duplicates import find_clusters
from vae.prepare.overlaps import join_overlapping
from vae.prepare.pool import Failure, Limits, run_each
from vae.prepare.split.metadata_csv import Metadata
from vae.progress import Progress
from vae.system.errors import DataError, UserError

NEAR_DUPLICATES, MANIFEST, FOLDER = "near_duplicates", "manifest", "folder"
FINGERPRINT_LIMITS = Limits(memory_gib=4.0)  # of one image
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


def near_duplicate_rule(manifest: Path, num_workers: int) -> Rule:
    """Clusters of images in a manifest that look alike or overlap; other images have no group.

    Fingerprints are stored beside the manifest by content, so later runs only read new images.
    """
    paths, contents = [], []
    for row in read_rows(manifest, flag="--input_dir"):
        paths.append(row["path"])
        contents.append(row["sha256"])
    fingerprints = _fingerprint_all(manifest.parent, paths, contents, num_workers)
    hashes = np.array([f.words for f in fingerprints], dtype=np.uint64).reshape(-1, 2)
    clusters = join_overlapping(find_clusters(hashes), hashes, [f.keypoints for f in fingerprints])
    sizes = np.bincount(clusters, minlength=len(paths))
    names = {paths[i]: f"near-{contents[clusters[i]][:16]}" for i in np.flatnonzero(sizes[clusters] > 1)}
    return lambda row: names.get(row["path"])


def _fingerprint_all(
    folder: Path, paths: list[str], contents: list[str], num_workers: int
) -> list[Fingerprint]:
    """The fingerprint of each image; computes the missing ones and adds them to the file."""
    known = read_fingerprints(folder)
    missing = {content: path for content, path in zip(contents, paths, strict=True) if content not in known}
    if missing:
        jobs = ((content, os.path.join(folder, path)) for content, path in missing.items())
        results = run_each(_fingerprint_job, jobs, num_workers=num_workers, limits=FINGERPRINT_LIMITS)
        bar = Progress("near duplicates", len(missing), "image")
        with bar, fingerprints_to_add(folder) as add, closing(results):
            for (content, path), result in results:
                if isinstance(result, Failure):
                    raise DataError(
                        f"--input_dir: {path} cannot be compared with the other images "
                        f"({result.reason}: {result.detail}): validate and preprocess the images first"
                    )
                known[content] = result
                add(content, result)
                bar.update()
    return [known[content] for content in contents]


def _fingerprint_job(job: tuple[str, str]) -> Fingerprint | Failure:
    """The fingerprint of the image of a (content, path) job, or the reason for having none."""
    try:
        return fingerprint_file(job[1])
    except BadImageError as error:
        return Failure(error.reason, error.detail)


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
