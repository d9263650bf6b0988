"""The record of a split beside its manifest: its settings, what came out, and the versions before it."""

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vae.config.errors import DataError, UserError
from vae.data.manifest import replace_text

DEFAULT_SHARE = 0.1


@dataclass(frozen=True)
class SplitSettings:
    """What decides sides: images keep theirs as long as these stay the same."""

    val_split: float | None  # share held out; None: nothing beside the folds
    num_folds: int  # 0: none
    group_by: str
    label_by: str
    seed: int


def settle_numbers(
    val_split: float | None, num_folds: int | None, seed: int | None, record: dict[str, Any] | None
) -> tuple[float | None, int, int]:
    """Share, folds and seed as given, else as in the split before, else the defaults; raises UserError."""
    before = record["settings"] if record else {"val_split": DEFAULT_SHARE, "num_folds": 0, "seed": 0}
    if val_split is None and num_folds is None:
        val_split, num_folds = before["val_split"], before["num_folds"]
    if val_split is None and not num_folds:
        val_split = DEFAULT_SHARE
    num_folds = num_folds or 0
    if val_split is not None and not 0 <= val_split <= 0.9:
        raise UserError(f"--val_split {val_split} is not a share: give a number from 0 to 0.9, such as 0.1")
    if num_folds < 0 or num_folds == 1 or num_folds > 1000:
        raise UserError(f"--num_folds {num_folds}: give a number from 2 to 1000, such as 5")
    return val_split, num_folds, before["seed"] if seed is None else seed


def record_path(manifest: Path) -> Path:
    """Where a manifest's record lies."""
    return manifest.with_name(f"{manifest.stem}_split.json")


def read_record(manifest: Path) -> dict[str, Any] | None:
    """What the split before wrote down; None without one. DataError where it cannot be read."""
    path = record_path(manifest)
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        SplitSettings(**record["settings"])
        if isinstance(record["version"], int):
            return record
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise DataError(f"{path} is no record of a split: delete it, and the next split chooses all sides anew")


def write_record(
    manifest: Path,
    settings: SplitSettings,
    digest: str,
    outcome: dict[str, Any],
    before: dict[str, Any] | None,
) -> int:
    """Write the record of a split and return its version: one more than before, unless nothing changed."""
    now = {"settings": asdict(settings), "digest": digest}
    if before is not None and now.items() <= before.items():
        return before["version"]
    earlier = []
    if before is not None:
        names = ("version", "settings", "digest", "images", "train", "val")
        earlier = [*before.get("earlier", []), {name: before.get(name) for name in names}]
    record = {
        "version": 1 if before is None else before["version"] + 1,
        **now,
        **outcome,
        "written_with": {"python": platform.python_version(), "numpy": np.__version__},
        "earlier": earlier,
    }
    replace_text(record_path(manifest), [json.dumps(record, indent=1) + "\n"])
    return record["version"]
