"""`--mode split`: write subsets and folds into a manifest."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vae.config.prepare_flags import SplitConfig
from vae.data.manifest import GROUP_KEYS, IMAGE_KEYS, MANIFEST_NAME, SPLIT_KEYS, group_key, read_rows
from vae.prepare.joined import read_column
from vae.prepare.near_duplicates import GROUP_PREFIX, group_names, words_of
from vae.prepare.rejection_reasons import group_lines
from vae.prepare.subsets import NONE, Groups, choose_val_groups, deal_folds, gather
from vae.system import console
from vae.system.errors import DataError, UserError
from vae.system.files import replace_text

NEAR_DUPLICATES, MANIFEST, FOLDER = "near_duplicates", "manifest", "folder"
FLAG = "--input_dir"
Rule = Callable[[dict[str, Any]], str | None]
DEFAULT_SHARE = 0.1
KEYS = (*IMAGE_KEYS, *GROUP_KEYS, *SPLIT_KEYS)


def run_split(config: SplitConfig) -> int:
    """Assign a subset and a fold to every image, and print a summary; returns the exit code.

    UserError or DataError before writing anything.
    """
    manifest = find_manifest(config.input_dir)
    config = _settle(config, manifest)
    assert config.group_by is not None, "it is settled"
    labelling = rule_for(config.label_by, "--label_by", config)
    grouping: Rule
    near_duplicates = None
    if config.group_by == NEAR_DUPLICATES:
        grouping, near_duplicates = near_duplicate_rule(manifest)
    else:
        grouping = rule_for((config.group_by,), "--group_by", config)
    groups = _read_groups(manifest, grouping, labelling, config.seed)
    in_val, folds = _assign(groups, config)
    replace_text(manifest, _new_lines(manifest, (grouping, labelling), in_val, folds))
    lines = [f"{manifest}: {len(in_val)} images in {len(groups.hashes)} groups by {config.group_by}"]
    lines += _summary_lines(groups, in_val, folds, config.num_folds, near_duplicates)
    console.info("\n".join(lines))
    return 0


def _summary_lines(
    groups: Groups,
    in_val: np.ndarray,
    folds: np.ndarray,
    num_folds: int,
    near_duplicates: dict[str, list[str]] | None,
) -> list[str]:
    val = int(in_val.sum())
    lines = [f"  train {len(in_val) - val}, val {val} ({val / len(in_val):.2%})"]
    if near_duplicates is not None:
        lines += group_lines(near_duplicates, "all named in the manifest")
    if num_folds:
        sizes = " ".join(map(str, np.bincount(folds[folds != NONE], minlength=num_folds)))
        lines.append(f"  folds {sizes} images: train_vae.py --fold K validates on one of them")
    shares = np.bincount(groups.labels, weights=in_val) / groups.label_counts
    if len(shares) > 1:
        lines.append(f"  {len(shares)} labels, each with {min(shares):.2%} to {max(shares):.2%} in val")
    return lines


def find_manifest(input_dir: str) -> Path:
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


def _settle(config: SplitConfig, manifest: Path) -> SplitConfig:
    """The options with their defaults: `val_split` stays None if only the folds decide."""
    share = DEFAULT_SHARE if config.val_split is None and not config.num_folds else config.val_split
    if config.num_folds == 1:
        raise UserError("--num_folds 1 leaves no image for training: give 2 or more, such as 5, or 0")
    group_by = config.group_by
    if group_by is None:
        groups = (str(row.get("group") or GROUP_PREFIX) for row in read_rows(manifest, flag=FLAG))
        group_by = NEAR_DUPLICATES if all(name.startswith(GROUP_PREFIX) for name in groups) else MANIFEST
    return replace(config, val_split=share, group_by=group_by)


def _read_groups(manifest: Path, grouping: Rule, labelling: Rule, seed: int) -> Groups:
    """Read a manifest and apply the rules to each row; DataError if it lists no images."""
    keys = []
    label_of = []
    labels: dict[str | None, int] = {}
    for row in read_rows(manifest, flag=FLAG):
        keys.append(_hash(group_key({"group": grouping(row), "sha256": row["sha256"]}), seed))
        label_of.append(labels.setdefault(labelling(row), len(labels)))
    if not keys:
        raise DataError(f"{FLAG} {manifest} lists no images: prepare_data.py --mode preprocess fills it")
    return gather(np.array(keys, np.uint64), np.array(label_of))


def _hash(key: str, seed: int) -> int:
    text = f"{seed}/{key}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"side").digest(), "big")


def _assign(groups: Groups, config: SplitConfig) -> tuple[np.ndarray, np.ndarray]:
    """Whether each image validates, bool (N,), and its fold, int (N,)."""
    in_val = np.zeros(len(groups.hashes), dtype=bool)
    folds = np.full(len(groups.hashes), NONE)
    if config.val_split:
        in_val = choose_val_groups(groups, config.val_split)
    if config.num_folds:
        folds = deal_folds(groups, config.num_folds, in_val)
        if config.val_split is None:  # without --fold, the first fold is the validation set
            in_val = folds == 0
    return in_val[groups.of_image], folds[groups.of_image]


def _new_lines(
    manifest: Path, rules: tuple[Rule, Rule], in_val: np.ndarray, folds: np.ndarray
) -> Iterator[str]:
    """The manifest's lines with their groups, labels, subsets and folds."""
    rows = read_rows(manifest, flag=FLAG)
    for row, validates, fold in zip(rows, in_val.tolist(), folds.tolist(), strict=True):
        row |= {"group": rules[0](row), "label": rules[1](row), "split": "val" if validates else "train"}
        row["fold"] = None if fold == NONE else fold
        yield json.dumps({key: row.get(key) for key in KEYS} | row) + "\n"


def rule_for(columns: tuple[str, ...], flag: str, config: SplitConfig) -> Rule:
    """The value of a row by `manifest` (the row's own), `folder:2` (its two outermost), or by columns.

    UserError if there is no such rule. The rule raises DataError for a row without a value.
    """
    by = " ".join(columns)
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
    values = read_column(config.join, config.join_on, columns, flag)
    return partial(_value_of, values, f"{flag} {by}")


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
        if row["path"] in values or row.get("source") in values:
            raise DataError(f"{setting}: --join has no value for {row['path']} of the manifest: add one")
        example = next(iter(values), "")
        raise DataError(
            f"{setting}: --join has no value for {row['path']} of the manifest, but for example for "
            f"{example!r}: --join_on must be a column with the path below the prepared or the original folder"
        )
    return value


def near_duplicate_rule(manifest: Path) -> tuple[Rule, dict[str, list[str]]]:
    """The rule that groups images that look alike, and the images of each group; others have no group.

    DataError for a row without the perceptual hash that --mode preprocess writes.
    """
    hashes: dict[str, str] = {}
    paths: dict[str, list[str]] = {}
    for row in read_rows(manifest, flag=FLAG):
        if not re.fullmatch("[0-9a-f]{32}(?:[0-9a-f]{96})?", str(row.get("phash"))):
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
