"""Which group and which label each row of a manifest has, by the rule a user names."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from vae.config.errors import DataError, UserError
from vae.console import printable
from vae.data.formats import BadImageError
from vae.data.manifest import MANIFEST_NAME, read_rows
from vae.prepare.near_duplicates import find_clusters, hash_image_file, hash_of_text, hash_text
from vae.prepare.pool import Failure, Limits, run_each
from vae.prepare.split.metadata_csv import Metadata

HASHES_NAME = "perceptual_hashes.csv"
NEAR_DUPLICATES, MANIFEST, FOLDER = "near_duplicates", "manifest", "folder"
Rule = Callable[[dict[str, Any]], str | None]


def rule_for(by: str, flag: str, metadata: Metadata | None) -> Rule:
    """The value of a row by `manifest` (what it holds), `folder:2` (its outermost two), or a column.

    UserError where there is no such rule; the rule itself raises DataError for a row it has no value for.
    """
    kind, _, levels = by.partition(":")
    if by == MANIFEST:
        key = "group" if flag == "--group_by" else "label"
        return lambda row: row.get(key)
    if kind == FOLDER:
        if levels and not (levels.isdecimal() and int(levels) > 0):
            raise UserError(f"{flag} {by}: {levels!r} is no number of levels: give folder:1, folder:2, ...")
        return partial(_folder_of, int(levels or 1), f"{flag} {by}")
    if metadata is None:
        raise UserError(
            f"{flag} {by} is a column: give the file that has it by --features FILE, or use "
            f"{NEAR_DUPLICATES + ', ' if flag == '--group_by' else ''}{MANIFEST} or {FOLDER}:1"
        )
    return partial(_value_of, metadata, metadata.column(by, flag))


def label_rule(label_by: str | None, metadata: Metadata | None) -> Rule:
    """The label of a row: by --label_by, else from the labels file, else what the manifest holds."""
    if metadata is not None and metadata.labels is not None:
        if label_by is not None:
            raise UserError(f"--label_by {label_by} and --labels both give labels: drop one of them")
        return partial(_value_of, metadata, metadata.labels)
    return rule_for(label_by or MANIFEST, "--label_by", metadata)


def _folder_of(levels: int, told: str, row: dict[str, Any]) -> str:
    parts = row["path"].split("/")[:-1]
    if len(parts) < levels:
        raise DataError(
            f"{told}: {printable(row['path'])} lies in {len(parts)} folders, fewer than asked for: "
            "move it or use fewer levels"
        )
    return "/".join(parts[:levels])


def _value_of(metadata: Metadata, values: list[str], row: dict[str, Any]) -> str:
    position = metadata.find(row["path"], row.get("source"))
    if position is None:
        raise DataError(
            f"--features {metadata.features_file} has no row for {printable(row['path'])} of the manifest: "
            "add it, with the path below the prepared or the original folder"
        )
    return values[position]


def near_duplicate_rule(manifest: Path, num_workers: int) -> Rule:
    """Near-duplicate clusters of a manifest's images; those that resemble no other have no group.

    Hashes are kept beside the manifest by content, so images added later cost only themselves.
    """
    paths, contents = [], []
    for row in read_rows(manifest, flag="--input_dir"):
        paths.append(row["path"])
        contents.append(row["sha256"])
    hashes = _known_hashes(manifest.parent, paths, contents, num_workers)
    clusters = find_clusters(hashes)
    sizes = np.bincount(clusters, minlength=len(paths))
    names = {paths[i]: f"near-{contents[clusters[i]][:16]}" for i in np.flatnonzero(sizes[clusters] > 1)}
    return lambda row: names.get(row["path"])


def _known_hashes(folder: Path, paths: list[str], contents: list[str], num_workers: int) -> np.ndarray:
    """Perceptual hashes (N, 2), those that are missing made now and added to the file."""
    known = read_hashes(folder)
    missing = {content: path for content, path in zip(contents, paths, strict=True) if content not in known}
    if missing:
        jobs = ((content, os.path.join(folder, path)) for content, path in missing.items())
        bar = tqdm(total=len(missing), unit="image", desc="near duplicates")
        with bar, hashes_to_add(folder) as keep:
            for (content, path), result in run_each(
                hash_job, jobs, num_workers=num_workers, limits=Limits(memory_gib=4.0)
            ):
                if isinstance(result, Failure):
                    raise DataError(
                        f"--input_dir: {printable(path)} cannot be compared with others "
                        f"({result.reason}: {result.detail}): validate and preprocess the images first"
                    )
                known[content] = hash_of_text(result)
                keep(content, known[content])
                bar.update()
    return np.array([known[content] for content in contents], dtype=np.uint64).reshape(-1, 2)


def hash_job(job: tuple[str, str]) -> str | Failure:
    """The perceptual hash of a (content, path) job as text, or why there is none."""
    try:
        return hash_text(hash_image_file(job[1]))
    except BadImageError as error:
        return Failure(error.reason, error.detail)


def read_hashes(folder: Path) -> dict[str, tuple[int, int]]:
    """Perceptual hashes by SHA-256 of the image that are kept in `folder`; torn lines are passed over."""
    known = {}
    if (folder / HASHES_NAME).exists():
        with open(folder / HASHES_NAME, encoding="utf-8") as file:
            for line in file:
                content, _, text = line.rstrip("\n").partition(",")
                if len(content) == 64 and len(text) == 32:
                    known[content] = hash_of_text(text)
    return known


@contextmanager
def hashes_to_add(folder: Path) -> Iterator[Callable[[str, Sequence[int]], None]]:
    """A function that keeps one more hash by content; a line that a killed run has torn is ended first."""
    with open(folder / HASHES_NAME, "a+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if file.read(1) not in (b"", b"\n"):
            file.write(b"\n")
        yield lambda content, one: file.write(f"{content},{hash_text(one)}\n".encode())


def find_manifest(input_dir: str | os.PathLike) -> Path:
    """The manifest that `input_dir` is or holds; DataError where there is none."""
    path = Path(input_dir)
    if path.is_dir():
        path /= MANIFEST_NAME
    if not path.is_file():
        raise DataError(
            f"--input_dir {input_dir} holds no {MANIFEST_NAME}: "
            "make one with prepare_data.py --mode preprocess"
        )
    return path
