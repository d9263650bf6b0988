"""A manifest as arrays, for millions of rows; and its rows with their new subsets and folds."""

import hashlib
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vae.data.manifest import KEYS, group_key, parse_row, read_lines
from vae.prepare.split.grouping import Rule
from vae.prepare.split.subsets import NONE, TRAIN, VAL
from vae.system.errors import DataError

FLAG = "--input_dir"
SPLIT_KEYS = (*KEYS, "split", "fold")
GROUP_MARK, SPLIT_MARK = ', "group": ', ', "split": '
UNCHANGED, REWRITE = -1, -2  # how a row's own text is used
SUBSET_NAMES = {NONE: None, TRAIN: "train", VAL: "val"}
SIDE_NUMBERS = {name: number for number, name in SUBSET_NAMES.items()}


@dataclass
class Columns:
    """The rows of a manifest, (N,) per array."""

    keys: np.ndarray  # uint64: hash of the group
    labels: np.ndarray
    subsets: np.ndarray
    folds: np.ndarray
    tails: np.ndarray  # position in tail_texts, UNCHANGED or REWRITE
    tail_texts: list[str]  # the end of a line from its group on, without split and fold
    label_names: list[str | None]


def read_columns(manifest: Path, grouping: Rule, labelling: Rule, seed: int) -> Columns:
    """Read a manifest and apply the rules to each row; raises DataError if it lists no images."""
    keys, labels, subsets, folds, tails = array("Q"), array("i"), array("b"), array("h"), array("i")
    label_numbers: dict[str | None, int] = {}
    tail_numbers: dict[str, int] = {}
    for number, line in enumerate(read_lines(manifest, flag=FLAG), 1):
        row = parse_row(line, manifest, number, flag=FLAG)
        group, label = grouping(row), labelling(row)
        if not _has_our_layout(row, line):
            tails.append(REWRITE)
        elif group == row["group"] and label == row["label"]:
            tails.append(UNCHANGED)
        else:
            tail = f'{GROUP_MARK}{json.dumps(group)}, "label": {json.dumps(label)}'
            tails.append(tail_numbers.setdefault(tail, len(tail_numbers)))
        keys.append(_hash(group_key({"group": group, "sha256": row["sha256"]}), seed))
        labels.append(label_numbers.setdefault(label, len(label_numbers)))
        subsets.append(SIDE_NUMBERS[row.get("split")])
        fold = row.get("fold")
        folds.append(NONE if fold is None else fold)
    if not keys:
        raise DataError(f"{FLAG} {manifest} lists no images: prepare_data.py --mode preprocess fills it")
    return Columns(
        keys=np.array(keys),
        labels=np.array(labels),
        subsets=np.array(subsets),
        folds=np.array(folds),
        tails=np.array(tails),
        tail_texts=list(tail_numbers),
        label_names=list(label_numbers),
    )


def _has_our_layout(row: dict[str, Any], line: str) -> bool:
    """Whether a line has the keys and spaces that this program writes."""
    keys = tuple(row)
    return GROUP_MARK in line and (keys == KEYS or (keys == SPLIT_KEYS and SPLIT_MARK in line))


def _hash(key: str, seed: int) -> int:
    text = f"{seed}/{key}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"side").digest(), "big")


def new_lines(
    manifest: Path, columns: Columns, rules: tuple[Rule, Rule], subsets: np.ndarray, folds: np.ndarray
) -> Iterator[str]:
    """The manifest's lines with their subsets and folds.

    If a line has our layout, only its end is written again, which is several times as fast as formatting the
    whole row. The marks cannot occur inside a JSON string, because quotes are escaped there.
    """
    ends = {
        (
            subset,
            fold,
        ): f', "split": {json.dumps(SUBSET_NAMES[subset])}, "fold": {"null" if fold < 0 else fold}}}\n'
        for subset, fold in set(zip(subsets.tolist(), folds.tolist(), strict=True))
    }
    rows = zip(columns.tails.tolist(), subsets.tolist(), folds.tolist(), strict=True)
    lines = read_lines(manifest, flag=FLAG)
    for number, (line, (tail, subset, fold)) in enumerate(zip(lines, rows, strict=True), 1):
        if tail >= 0:
            yield line[: line.index(GROUP_MARK)] + columns.tail_texts[tail] + ends[subset, fold]
        elif tail == UNCHANGED:
            cut = line.find(SPLIT_MARK)
            yield line[: cut if cut >= 0 else line.rindex("}")] + ends[subset, fold]
        else:
            row = parse_row(line, manifest, number, flag=FLAG)
            row |= {"group": rules[0](row), "label": rules[1](row), "split": SUBSET_NAMES[subset]}
            row["fold"] = None if fold < 0 else fold
            yield json.dumps({key: row.get(key) for key in SPLIT_KEYS} | row) + "\n"


def digest_of(columns: Columns, subsets: np.ndarray, folds: np.ndarray) -> str:
    """A SHA-256 over the subset and fold of every group; the order of the rows does not matter."""
    table = np.stack([columns.keys, subsets.astype(np.uint64), folds.astype(np.uint64)])
    table = np.ascontiguousarray(table[:, np.lexsort(table)].astype("<u8"))
    return hashlib.sha256(table.tobytes()).hexdigest()
