"""`--mode split`: write subsets and folds into a manifest, and a record beside it."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vae.config.prepare_flags import SplitConfig
from vae.data.manifest import KEYS, MANIFEST_NAME, group_key, read_rows
from vae.prepare.analyze import group_lines
from vae.prepare.grouping import (
    FLAG,
    MANIFEST,
    NEAR_DUPLICATES,
    Rule,
    label_rule,
    near_duplicate_rule,
    rule_for,
)
from vae.prepare.metadata_csv import Metadata, read_metadata
from vae.prepare.split_record import SplitSettings, read_record, settle_numbers, write_record
from vae.prepare.subsets import (
    NONE,
    TRAIN,
    VAL,
    Groups,
    choose_val_groups,
    deal_folds,
    earlier_choice,
    gather,
)
from vae.system import console
from vae.system.errors import DataError, UserError
from vae.system.files import replace_text

LABELS = "labels"  # by the file of --labels, in later splits by the labels that it left in the manifest
SPLIT_KEYS = (*KEYS, "split", "fold")
SUBSET_NAMES = {NONE: None, TRAIN: "train", VAL: "val"}


@dataclass
class Columns:
    """The rows of a manifest, (N,) per array."""

    keys: np.ndarray  # uint64: hash of the group
    labels: np.ndarray
    subsets: np.ndarray
    folds: np.ndarray
    label_names: list[str | None]


@dataclass
class SplitReport:
    """The result of a split."""

    manifest: Path
    version: int
    settings: SplitSettings
    images: int
    groups: int
    train: int
    val: int
    folds: list[int]
    moved: int  # images whose subset or fold changed because their groups were joined
    labels: dict[str, dict[str, float]]  # by label: images, and val, the share in the validation set
    new: int  # images without a subset before
    reassigned: bool  # the previous split had other settings
    near_duplicates: dict[str, list[str]] | None = None  # images by group, if they are the rule

    def lines(self) -> list[str]:
        """The summary for a terminal."""
        lines = [
            f"{self.manifest}: split {self.version} of {self.images} images in {self.groups} groups by "
            f"{self.settings.group_by}",
            f"  train {self.train}, val {self.val} ({self.val / self.images:.2%})",
        ]
        if self.near_duplicates is not None:
            lines += group_lines(self.near_duplicates, "all named in the manifest")
        if self.folds:
            counts = " ".join(map(str, self.folds))
            lines.append(f"  folds {counts} images: train_vae.py --fold K validates on one of them")
        if len(self.labels) > 1:
            shares = [one["val"] for one in self.labels.values()]
            lines.append(
                f"  {len(self.labels)} labels, each with {min(shares):.2%} to {max(shares):.2%} in val"
            )
        if self.reassigned:
            lines.append("  the previous split had other settings: all subsets were chosen again")
        if self.new < self.images:
            lines.append(f"  {self.images - self.new} images had a subset and {self.new} are new")
        if self.moved:
            lines.append(f"  {self.moved} images changed subsets or folds, because their groups were joined")
        return lines


def run_split(config: SplitConfig) -> int:
    """Split a manifest and print a summary; returns the exit code."""
    console.info("\n".join(split_manifest(config).lines()))
    return 0


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
    if path.is_symlink():
        raise DataError(f"--input_dir {path} is a link, and would be replaced: give the manifest itself")
    return path


def split_manifest(config: SplitConfig) -> SplitReport:
    """Assign a subset and a fold to every image; images that have one by the same settings keep it.

    A setting that is None is as in the previous split. UserError or DataError before writing anything.
    """
    if config.labels and not config.features:
        raise UserError(
            f"--labels {config.labels} needs --features FILE, which gives the file path of each id"
        )
    manifest = find_manifest(config.input_dir)
    record = read_record(manifest)
    share, num_folds, seed = settle_numbers(config, record)
    metadata = read_metadata(config.features, config.labels) if config.features else None
    group_by = config.group_by or _default_grouping(manifest, record)
    label_by, labelling = _labelling(config, metadata, record)
    settings = SplitSettings(share, num_folds, group_by, label_by, seed)
    if group_by == NEAR_DUPLICATES:
        grouping, near_duplicates = near_duplicate_rule(manifest, config.num_workers)
    else:
        grouping, near_duplicates = rule_for(group_by, "--group_by", metadata), None
    columns = _read_columns(manifest, grouping, labelling, seed)
    report = _assign_and_write(manifest, settings, columns, (grouping, labelling), record)
    return replace(report, near_duplicates=near_duplicates)


def _default_grouping(manifest: Path, record: dict[str, Any] | None) -> str:
    """As in the previous split, else the manifest's own groups, else images that look alike."""
    if record is not None:
        return record["settings"]["group_by"]
    has_groups = any(row.get("group") is not None for row in read_rows(manifest, flag=FLAG))
    return MANIFEST if has_groups else NEAR_DUPLICATES


def _labelling(
    config: SplitConfig, metadata: Metadata | None, record: dict[str, Any] | None
) -> tuple[str, Rule]:
    """The name of the label rule, and the rule."""
    if config.label_by is not None or config.labels:
        labelling = label_rule(config.label_by, metadata)  # raises if both are given
        return config.label_by or LABELS, labelling
    label_by = record["settings"]["label_by"] if record else MANIFEST
    return label_by, rule_for(MANIFEST if label_by == LABELS else label_by, "--label_by", metadata)


def _read_columns(manifest: Path, grouping: Rule, labelling: Rule, seed: int) -> Columns:
    """Read a manifest and apply the rules to each row; DataError if it lists no images."""
    keys, labels, subsets, folds = list[int](), list[int](), list[int](), list[int]()
    label_numbers: dict[str | None, int] = {}
    subset_numbers = {name: number for number, name in SUBSET_NAMES.items()}
    for row in read_rows(manifest, flag=FLAG):
        label = labelling(row)
        keys.append(_hash(group_key({"group": grouping(row), "sha256": row["sha256"]}), seed))
        labels.append(label_numbers.setdefault(label, len(label_numbers)))
        subsets.append(subset_numbers[row.get("split")])
        folds.append(NONE if row.get("fold") is None else row["fold"])
    if not keys:
        raise DataError(f"{FLAG} {manifest} lists no images: prepare_data.py --mode preprocess fills it")
    arrays = (np.array(keys, np.uint64), np.array(labels), np.array(subsets), np.array(folds))
    return Columns(*arrays, list(label_numbers))


def _hash(key: str, seed: int) -> int:
    text = f"{seed}/{key}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"side").digest(), "big")


def _new_lines(
    manifest: Path, rules: tuple[Rule, Rule], subsets: np.ndarray, folds: np.ndarray
) -> Iterator[str]:
    """The manifest's lines with their groups, labels, subsets and folds."""
    rows = read_rows(manifest, flag=FLAG)
    for row, subset, fold in zip(rows, subsets.tolist(), folds.tolist(), strict=True):
        row |= {"group": rules[0](row), "label": rules[1](row), "split": SUBSET_NAMES[subset]}
        row["fold"] = None if fold < 0 else fold
        yield json.dumps({key: row.get(key) for key in SPLIT_KEYS} | row) + "\n"


def _digest_of(columns: Columns, subsets: np.ndarray, folds: np.ndarray) -> str:
    """A SHA-256 over the subset and fold of every group; the order of the rows does not matter."""
    table = np.stack([columns.keys, subsets.astype(np.uint64), folds.astype(np.uint64)])
    table = np.ascontiguousarray(table[:, np.lexsort(table)].astype("<u8"))
    return hashlib.sha256(table.tobytes()).hexdigest()


def _assign_and_write(
    manifest: Path,
    settings: SplitSettings,
    columns: Columns,
    rules: tuple[Rule, Rule],
    record: dict[str, Any] | None,
) -> SplitReport:
    groups = gather(columns.keys, columns.labels)
    keeps = record is not None and record["settings"] == asdict(settings)
    subsets, folds = _assign(groups, settings, columns if keeps else None)
    had = (columns.subsets != NONE) & keeps
    changed = had & ((columns.subsets != subsets) | (columns.folds != folds))
    shares = np.bincount(columns.labels, weights=subsets == VAL) / groups.label_counts
    outcome: dict[str, Any] = {
        "images": len(subsets),
        "groups": len(groups.hashes),
        "train": int((subsets == TRAIN).sum()),
        "val": int((subsets == VAL).sum()),
        "folds": np.bincount(folds[folds != NONE], minlength=settings.num_folds).tolist(),
        "moved": int(changed.sum()),
        "labels": {
            str(name): {"images": int(count), "val": round(float(share), 6)}
            for name, count, share in zip(columns.label_names, groups.label_counts, shares, strict=True)
        },
    }
    replace_text(manifest, _new_lines(manifest, rules, subsets, folds))
    version = write_record(manifest, settings, _digest_of(columns, subsets, folds), outcome, record)
    return SplitReport(
        manifest=manifest,
        version=version,
        settings=settings,
        new=int((~had).sum()),
        reassigned=record is not None and not keeps,
        **outcome,
    )


def _assign(groups: Groups, settings: SplitSettings, before: Columns | None) -> tuple[np.ndarray, np.ndarray]:
    """Subset and fold of each image: int (N,) each."""
    nothing = np.full(len(groups.hashes), NONE)
    in_val = np.zeros(len(groups.hashes), dtype=bool)
    if settings.val_split:
        earlier = earlier_choice(groups, before.subsets) if before else nothing
        in_val = choose_val_groups(groups, settings.val_split, earlier)
    folds = nothing
    if settings.num_folds:
        earlier = earlier_choice(groups, before.folds) if before else nothing
        folds = deal_folds(groups, settings.num_folds, earlier, in_val, settings.seed)
        if settings.val_split is None:  # without --fold, the first fold is the validation set
            in_val = folds == 0
    return np.where(in_val, VAL, TRAIN)[groups.of_image], folds[groups.of_image]
