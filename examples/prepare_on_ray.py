#!/usr/bin/env python3
"""Check the images of `prepare_data.py --mode shard` on a Ray cluster, whose nodes see all folders.

    pip install "ray[data]"
    ray start --head --port 6379                   # on the first node
    ray start --address 10.0.0.1:6379              # on each other node
    python examples/prepare_on_ray.py --input_dir /shared/photos --output_dir /shared/data/photos
    python prepare_data.py --mode shard --input_dir /shared/photos --output_dir /shared/data/photos

Ray Data maps over blocks what `prepare_data.py` maps in its own processes. The last command packs the
shards. It also checks blocks that are missing: there, an image that ends its process costs that image alone.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vae.config.prepare_flags import ShardConfig, parse_prepare_flags
from vae.prepare.blocks import Block
from vae.prepare.check import Check
from vae.prepare.output_folders import check_apart
from vae.prepare.rows import RowFolder, check_block, open_rows, rules_of
from vae.prepare.source import open_source
from vae.system import console
from vae.system.script import run_script


def write_rows(folder: RowFolder, check: Check, row: dict[str, Block]) -> dict[str, int]:
    """Write the rows of a block into the output folder; returns the number of rejected images."""
    rows = check_block(check, folder.scratch, row["block"])
    folder.save(row["block"], rows)
    return {"rejected": rows.bad}


def main(argv: list[str]) -> int:
    """Flags of --mode shard to the rows of all blocks; returns the exit code."""
    import ray

    config = parse_prepare_flags(["--mode", "shard", *argv])
    assert isinstance(config, ShardConfig)
    ray.init(ignore_reinit_error=True, runtime_env={"working_dir": None})
    check_apart(config.input_dir, config.output_dir)
    source = open_source(config)
    with open_rows(config, "shard", rules_of(config, source)) as (_, folder):
        todo = [{"block": block} for block in source.blocks if not folder.has(block)]
        if todo:
            check = partial(write_rows, folder, Check(config))
            results = ray.data.from_items(todo, override_num_blocks=len(todo)).map(check)
            rejected = sum(row["rejected"] for row in results.iter_rows())
            console.info(f"{len(todo)} blocks are checked, {rejected} images rejected")
    console.info("pack the shards: prepare_data.py --mode shard with the same flags")
    return 0


if __name__ == "__main__":
    run_script("prepare_on_ray.py", main)
