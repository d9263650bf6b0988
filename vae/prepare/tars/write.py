"""What --mode index writes: an index for each tar file, the rules, and the files of the datasets."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from vae.config.prepare_flags import IndexConfig
from vae.prepare.shard.members import TRAINING, VALIDATION
from vae.prepare.shard.write import HIDDEN
from vae.prepare.versions import Parent, write_removed
from vae.shards.dataset_json import dataset_content, read_dataset, write_dataset
from vae.shards.index import Shard, foreign_index, index_path
from vae.system.errors import UserError
from vae.system.files import atomic_path, parse_json, read_json, sha256_of_file, write_json

FOLDERS = {TRAINING: "training", VALIDATION: "validation"}  # of the indexes
SUBSETS = (VALIDATION, TRAINING)  # the training set last: it names the other
CLAIM = "index.json"  # in HIDDEN: what a folder will contain
MAX_CLAIM_BYTES = 2**30
RULES = ("min_size", "max_aspect", "max_pixels", "first_frame", "where", "formats", "image_key", "val_split")

Written = dict[str, list[Shard]]  # the shards of each subset


def rules_of(config: IndexConfig) -> dict[str, Any]:
    """The rules; images are compared by their bytes alone, because none has a perceptual hash."""
    values = {name: getattr(config, name) for name in RULES}
    return parse_json(json.dumps(values | {"near_duplicates": False}))


def claim(root: Path, contents: dict[str, Any]) -> None:
    """Note what the folder will contain; UserError if it is complete and has other contents."""
    noted = root / HIDDEN / CLAIM
    if (root / TRAINING).exists() and read_json(noted, max_bytes=MAX_CLAIM_BYTES) != contents:
        raise UserError(
            f"--output_dir {root} has a dataset of other tar files or rules, and a dataset never changes: "
            "give a new folder"
        )
    write_json(noted, contents)


def write_index(root: Path, subset: str, tar: Shard, rows: np.ndarray) -> Shard | None:
    """Write the index of the images of a tar file that are in a subset; None if there are none."""
    if not len(rows):
        return None
    path = index_path(root / FOLDERS[subset], tar)
    longest = int(np.char.str_len(rows["name"]).max())
    with atomic_path(path) as temporary, temporary.open("wb") as opened:
        np.save(opened, rows.astype(foreign_index(longest)), allow_pickle=False)
    return Shard(tar.name, len(rows), tar.bytes, tar.sha256, sha256_of_file(path))


def write_datasets(
    root: Path,
    base: str,
    written: Written,
    policy: dict[str, Any],
    parent: Parent | None = None,
    *,
    is_version: bool = False,
) -> None:
    """Write the files of the datasets. `is_version`: of a new version of `parent`."""
    for subset in SUBSETS:
        if not written[subset]:
            continue
        more: dict[str, Any] = {"tars": base, "indexes": FOLDERS[subset]}
        if parent:
            path = root / f"removed-{FOLDERS[subset]}.json"  # both subsets have images of a tar file
            more |= write_removed(path, parent.removed_from(written[subset]))
        if parent and is_version:
            more["changes"] = parent.changes(subset, written[subset])
        content = dataset_content(
            written[subset],
            policy,
            VALIDATION if subset == TRAINING and written[VALIDATION] else None,
            parent=parent.dataset.version if parent and is_version else None,
            more=more,
        )
        _check_same(root, subset, content["version"])
        write_dataset(root / subset, content)


def _check_same(root: Path, subset: str, version: str) -> None:
    """UserError if the folder has another dataset."""
    if (root / subset).exists() and read_dataset(root / subset).version != version:
        raise UserError(
            f"--output_dir {root} has a dataset, which never changes, and the tar files have changed: give a "
            "new folder"
        )
