"""The record of a split beside its manifest: settings, results, and the list of earlier versions."""

import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vae.config.prepare_flags import SplitConfig
from vae.system.errors import DataError, UserError
from vae.system.files import read_json, write_json

DEFAULT_SHARE = 0.1


@dataclass(frozen=True)
class SplitSettings:
    """Settings that decide the subsets; images keep their subsets as long as these do not change."""

    val_split: float | None  # share of the validation set; None: only the folds decide
    num_folds: int  # 0: none
    group_by: str
    label_by: str
    seed: int


def settle_numbers(config: SplitConfig, record: dict[str, Any] | None) -> tuple[float | None, int, int]:
    """Share, folds and seed: from the flags, else from the previous split, else the defaults.

    Raises UserError for an impossible share or number of folds.
    """
    defaults = {"val_split": DEFAULT_SHARE, "num_folds": 0, "seed": 0}
    before: dict[str, Any] = record["settings"] if record else defaults
    share: float | None = config.val_split
    num_folds: int = config.num_folds or 0
    if config.val_split is None and config.num_folds is None:
        share, num_folds = before["val_split"], before["num_folds"]
    if share is None and not num_folds:
        share = DEFAULT_SHARE
    if share is not None and not 0 <= share <= 0.9:
        raise UserError(f"--val_split {share} is not a share: give a number from 0 to 0.9, such as 0.1")
    if num_folds < 0 or num_folds == 1 or num_folds > 1000:
        raise UserError(
            f"--num_folds {num_folds} is impossible: give a number from 2 to 1000, such as 5, or 0"
        )
    return share, num_folds, before["seed"] if config.seed is None else config.seed


def record_path(manifest: Path) -> Path:
    """The path of a manifest's record."""
    return manifest.with_name(f"{manifest.stem}_split.json")


def read_record(manifest: Path) -> dict[str, Any] | None:
    """The record of the previous split, or None; raises DataError if it cannot be read."""
    path = record_path(manifest)
    if not path.exists():
        return None
    try:
        record = read_json(path)
        SplitSettings(**record["settings"])
        if isinstance(record["version"], int):
            return record
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise DataError(
        f"{path} is not the record of a split: delete it, and the next split chooses all subsets again"
    )


def write_record(
    manifest: Path,
    settings: SplitSettings,
    digest: str,
    outcome: dict[str, Any],
    before: dict[str, Any] | None,
) -> int:
    """Write the record of a split and return its version: the previous one plus 1, unless nothing changed."""
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
    write_json(record_path(manifest), record, indent=1)
    return record["version"]
