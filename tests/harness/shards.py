"""Datasets of shards, packed in this process from a folder of image files."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.harness.image_kinds import detailed, encoded
from tests.harness.preparing import without_workers
from vae.config.prepare_flags import ShardConfig
from vae.prepare import shard


def pack(folder: Path, output: Path, shard_bytes: int = shard.MEGABYTE, **options: Any) -> Path:
    """Pack the images of `folder` in shards of at most `shard_bytes`; returns the path of dataset.json.

    `options` are fields of ShardConfig. By default, all images are for training.
    """
    options = {"shard_mb": 1, "val_split": 0.0, **options}
    with without_workers(), patch.object(shard, "MEGABYTE", shard_bytes / options["shard_mb"]):
        assert shard.run_shard(ShardConfig(input_dir=str(folder), output_dir=str(output), **options)) == 0
    return output / "dataset.json"


def write_shards(folder: Path, count: int, shard_bytes: int, width: int = 64) -> Path:
    """A dataset of `count` images, 64 px high, in shards of at most `shard_bytes`."""
    (folder / "raw").mkdir(parents=True)
    for number in range(count):
        (folder / "raw" / f"{number:04}.png").write_bytes(encoded(detailed(number, width=width), "PNG"))
    return pack(folder / "raw", folder / "set", shard_bytes)
