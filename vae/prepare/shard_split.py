"""Split a dataset of `--mode shard` for validation: new indexes list its shards, which are not copied."""

from pathlib import Path

import numpy as np

from vae.config.prepare_flags import ShardConfig
from vae.data.exclude_list import KEY_DIGITS
from vae.prepare.blocks import Block
from vae.prepare.output_folders import HIDDEN
from vae.prepare.rows import RowFolder, rules_of
from vae.prepare.shard import INDEXES, save_index, write_datasets
from vae.prepare.source import Source
from vae.prepare.table import SUBSETS, TRAINING, VAL, VALIDATION, Table, choose_validation, drop_exact
from vae.shards.dataset_json import Shard, index_path, read_dataset, read_index


def split_shards(copy: Path, input_dir: str, val_split: float) -> Path:
    """Split `copy`, the shards of all images of `input_dir`; returns the folder of the two datasets."""
    root = copy / f"val-{val_split:g}"
    if (root / TRAINING).is_file():
        return root
    dataset = read_dataset(copy / TRAINING)
    keys = _validation_keys(copy, input_dir, val_split)
    shards: dict[str, list[Shard]] = {name: [] for name in SUBSETS}
    for shard in dataset.shards:
        index = read_index(index_path(copy, shard.name), shard)
        validates = np.isin(index["key"], keys)
        for name, rows in ((VALIDATION, index[validates]), (TRAINING, index[~validates])):
            if len(rows):
                digest = save_index(index_path(root / INDEXES[name], shard.name), rows)
                shards[name].append(shard._replace(samples=len(rows), index_sha256=digest))
    write_datasets(root, shards, {**dataset.policy, "val_split": val_split}, tars="..")
    return root


def _validation_keys(copy: Path, input_dir: str, val_split: float) -> np.ndarray:
    """The keys of the images that validate, by the rows that the copy was made from."""
    source = Source(input_dir, [], "row group")
    rules = rules_of(ShardConfig(input_dir=input_dir, output_dir=str(copy)), source)
    with RowFolder(copy / HIDDEN, str(copy), rules).claimed() as folder:
        source.blocks = [Block(id=path.stem, file=path) for path in sorted(folder.rows.iterdir())]
        table = Table(folder, source)
        drop_exact(table)
        choose_validation(table, val_split, near=True)
        query = "SELECT sha256[1:$1] AS key FROM images WHERE reason = '' AND subset = $2"
        return table.columns(query, KEY_DIGITS, VAL)["key"].astype(f"S{KEY_DIGITS}")
