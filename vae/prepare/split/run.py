"""`--mode split`: sides and folds of a manifest's images, written into it, with a record beside it."""

import hashlib
import json
import os
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vae.config.errors import DataError, UserError
from vae.data.manifest import KEYS, format_row, group_key, parse_row, read_lines, read_rows, replace_text
from vae.prepare.split.grouping import (
    MANIFEST,
    NEAR_DUPLICATES,
    Rule,
    find_manifest,
    label_rule,
    near_duplicate_rule,
    rule_for,
)
from vae.prepare.split.metadata_csv import read_metadata
from vae.prepare.split.record import SplitSettings, read_record, settle_numbers, write_record
from vae.prepare.split.sides import NONE, TRAIN, VAL, Groups, deal_folds, earlier_choice, gather, hold_out

FLAG = "--input_dir"
LABELS = "labels"  # by the file of --labels, later by what it has left in the manifest
SPLIT_KEYS = (*KEYS, "split", "fold")
GROUP_MARK, SPLIT_MARK = ', "group": ', ', "split": '
AS_IT_STANDS, ANEW = -1, -2  # what becomes of a row's own text
SIDE_NAMES = {NONE: None, TRAIN: "train", VAL: "val"}
SIDE_NUMBERS = {name: number for number, name in SIDE_NAMES.items()}


@dataclass
class SplitReport:
    """What came out of a split."""

    manifest: Path
    version: int
    settings: SplitSettings
    images: int
    groups: int
    train: int
    val: int
    folds: list[int]
    moved: int  # images whose side or fold changed because their groups were joined
    labels: dict[str, dict[str, float]]  # images, and val: the share that validates, by label
    new: int  # images without a side before
    chosen_anew: bool  # the split before had other settings

    def lines(self) -> list[str]:
        """The summary for a terminal."""
        share = self.val / self.images
        told = [
            f"{self.manifest}: split {self.version} of {self.images} images in {self.groups} groups by "
            f"{self.settings.group_by}",
            f"  train {self.train}, val {self.val} ({share:.2%})",
        ]
        if self.folds:
            told.append(
                f"  folds {' '.join(map(str, self.folds))} images: train_vae.py --fold K holds out one"
            )
        if len(self.labels) > 1:
            shares = [one["val"] for one in self.labels.values()]
            told.append(f"  {len(self.labels)} labels, of each {min(shares):.2%} to {max(shares):.2%} in val")
        if self.chosen_anew:
            told.append("  the split before had other settings: all sides are chosen anew")
        if self.new < self.images:
            told.append(f"  {self.images - self.new} images had a side and {self.new} are new")
        if self.moved:
            told.append(f"  {self.moved} images changed, because their groups are one now")
        return told


@dataclass
class _Columns:
    """The manifest as arrays, (N,) each; `tails` are numbers of texts, AS_IT_STANDS or ANEW."""

    keys: np.ndarray  # uint64: hash of the group
    labels: np.ndarray
    sides: np.ndarray
    folds: np.ndarray
    tails: np.ndarray
    tail_texts: list[str]
    label_names: list[str | None]


def split_manifest(
    input_dir: str | os.PathLike,
    *,
    val_split: float | None = None,
    num_folds: int | None = None,
    group_by: str | None = None,
    label_by: str | None = None,
    features_file: str | None = None,
    labels_file: str | None = None,
    seed: int | None = None,
    num_workers: int = 1,
) -> SplitReport:
    """Give every image of a manifest its side and fold; those that have one by the same settings keep it.

    `input_dir`: a manifest or the folder that holds one. What is None is as in the split before. Raises
    UserError or DataError with nothing written.
    """
    if labels_file and not features_file:
        raise UserError(f"--labels {labels_file} needs --features FILE, which says which image an id is")
    manifest = find_manifest(input_dir)
    record = read_record(manifest)
    share, folds, seed = settle_numbers(val_split, num_folds, seed, record)
    metadata = read_metadata(features_file, labels_file) if features_file else None
    group_by = group_by or _usual_grouping(manifest, record)
    labelling = label_rule(label_by, metadata)  # both at once are an error
    if labels_file:
        label_by = LABELS
    elif label_by is None:
        label_by = record["settings"]["label_by"] if record else MANIFEST
        labelling = rule_for(MANIFEST if label_by == LABELS else label_by, "--label_by", metadata)
    settings = SplitSettings(share, folds, group_by, label_by, seed)
    if group_by == NEAR_DUPLICATES:
        grouping = near_duplicate_rule(manifest, num_workers)
    else:
        grouping = rule_for(group_by, "--group_by", metadata)
    columns = _read_columns(manifest, grouping, labelling, seed)
    return _assign_and_write(manifest, settings, columns, (grouping, labelling), record)


def _usual_grouping(manifest: Path, record: dict[str, Any] | None) -> str:
    """As the split before; else the groups somebody else has given; else near-duplicate clusters."""
    if record is not None:
        return record["settings"]["group_by"]
    foreign = any(row.get("group") is not None for row in read_rows(manifest, flag=FLAG))
    return MANIFEST if foreign else NEAR_DUPLICATES


def _read_columns(manifest: Path, grouping: Rule, labelling: Rule, seed: int) -> _Columns:
    keys, labels, sides, folds, tails = array("Q"), array("i"), array("b"), array("h"), array("i")
    label_numbers: dict[str | None, int] = {}
    tail_numbers: dict[str, int] = {}
    for number, line in enumerate(read_lines(manifest, flag=FLAG), 1):
        row = parse_row(line, manifest, number, flag=FLAG)
        group, label = grouping(row), labelling(row)
        if not _is_usual(row, line):
            tails.append(ANEW)
        elif group == row["group"] and label == row["label"]:
            tails.append(AS_IT_STANDS)
        else:
            tail = f'{GROUP_MARK}{json.dumps(group)}, "label": {json.dumps(label)}'
            tails.append(tail_numbers.setdefault(tail, len(tail_numbers)))
        keys.append(_hash(group_key({"group": group, "sha256": row["sha256"]}), seed))
        labels.append(label_numbers.setdefault(label, len(label_numbers)))
        sides.append(SIDE_NUMBERS[row.get("split")])
        fold = row.get("fold")
        folds.append(NONE if fold is None else fold)
    if not keys:
        raise DataError(f"{FLAG} {manifest} lists no images: prepare_data.py --mode preprocess fills it")
    as_arrays = (np.array(column) for column in (keys, labels, sides, folds, tails))
    return _Columns(*as_arrays, list(tail_numbers), list(label_numbers))


def _is_usual(row: dict[str, Any], line: str) -> bool:
    """Whether a line's keys and spaces are those that this program writes."""
    keys = tuple(row)
    return GROUP_MARK in line and (keys == KEYS or (keys == SPLIT_KEYS and SPLIT_MARK in line))


def _hash(key: str, seed: int) -> int:
    text = f"{seed}/{key}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"side").digest(), "big")


def _assign_and_write(manifest, settings: SplitSettings, columns: _Columns, rules, record) -> SplitReport:
    groups = gather(columns.keys, columns.labels)
    keeps = record is not None and record["settings"] == asdict(settings)
    sides, folds = _assign(groups, settings, columns if keeps else None)
    had = (columns.sides != NONE) & keeps
    changed = had & ((columns.sides != sides) | (columns.folds != folds))
    shares = np.bincount(columns.labels, weights=sides == VAL) / groups.label_counts
    outcome = {
        "images": len(sides),
        "groups": len(groups.hashes),
        "train": int((sides == TRAIN).sum()),
        "val": int((sides == VAL).sum()),
        "folds": np.bincount(folds[folds != NONE], minlength=settings.num_folds).tolist(),
        "moved": int(changed.sum()),
    }
    labels = {
        str(name): {"images": int(count), "val": round(float(share), 6)}
        for name, count, share in zip(columns.label_names, groups.label_counts, shares, strict=True)
    }
    replace_text(manifest, _new_lines(manifest, columns, rules, sides, folds))
    digest = _digest(columns, sides, folds)
    version = write_record(manifest, settings, digest, {**outcome, "labels": labels}, record)
    return SplitReport(
        manifest=manifest,
        version=version,
        settings=settings,
        **outcome,
        labels=labels,
        new=int((~had).sum()),
        chosen_anew=record is not None and not keeps,
    )


def _assign(
    groups: Groups, settings: SplitSettings, before: _Columns | None
) -> tuple[np.ndarray, np.ndarray]:
    """Side and fold of each image: int (N,) each."""
    nothing = np.full(len(groups.hashes), NONE)
    held = np.zeros(len(groups.hashes), dtype=bool)
    if settings.val_split:
        held = hold_out(
            groups, settings.val_split, earlier_choice(groups, before.sides) if before else nothing
        )
    folds = nothing
    if settings.num_folds:
        earlier = earlier_choice(groups, before.folds) if before else nothing
        folds = deal_folds(groups, settings.num_folds, earlier, held, settings.seed)
        if settings.val_split is None:  # without --fold, the first one validates
            held = folds == 0
    return np.where(held, VAL, TRAIN)[groups.of_image], folds[groups.of_image]


def _new_lines(manifest, columns: _Columns, rules: tuple[Rule, Rule], sides, folds) -> Iterator[str]:
    """The manifest's lines with their sides.

    Only the end of a line is made anew where its keys stand in the usual order: several times as fast as
    writing all of it. What is looked for cannot stand inside a JSON string, whose quotes are escaped.
    """
    ends = {
        (side, fold): f', "split": {json.dumps(SIDE_NAMES[side])}, "fold": {"null" if fold < 0 else fold}}}\n'
        for side, fold in set(zip(sides.tolist(), folds.tolist(), strict=True))
    }
    rows = zip(columns.tails.tolist(), sides.tolist(), folds.tolist(), strict=True)
    lines = read_lines(manifest, flag=FLAG)
    for number, (line, (tail, side, fold)) in enumerate(zip(lines, rows, strict=True), 1):
        if tail >= 0:
            yield line[: line.index(GROUP_MARK)] + columns.tail_texts[tail] + ends[side, fold]
        elif tail == AS_IT_STANDS:
            cut = line.find(SPLIT_MARK)
            yield line[: cut if cut >= 0 else line.rindex("}")] + ends[side, fold]
        else:
            row = parse_row(line, manifest, number, flag=FLAG)
            row |= {"group": rules[0](row), "label": rules[1](row), "split": SIDE_NAMES[side]}
            row["fold"] = None if fold < 0 else fold
            yield format_row({key: row.get(key) for key in SPLIT_KEYS} | row) + "\n"


def _digest(columns: _Columns, sides: np.ndarray, folds: np.ndarray) -> str:
    """A fingerprint of who is where, whatever the order of the rows."""
    table = np.stack([columns.keys, sides.astype(np.uint64), folds.astype(np.uint64)])
    table = np.ascontiguousarray(table[:, np.lexsort(table)].astype("<u8"))
    return hashlib.sha256(table).hexdigest()
