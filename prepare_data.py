#!/usr/bin/env python3
"""Prepare a training set from raw image files: `python prepare_data.py --help`."""

import sys

from vae.config.prepare_flags import (
    AnalyzeConfig,
    IndexConfig,
    MergeConfig,
    PreprocessConfig,
    ShardConfig,
    SplitConfig,
    ValidateConfig,
    parse_prepare_flags,
)
from vae.system.script import run_script


def main(argv: list[str]) -> int:
    """Flags to one call; returns the exit code."""
    config = parse_prepare_flags(argv)
    if isinstance(config, PreprocessConfig | ShardConfig) and config.engine == "ray":
        from vae.prepare.ray_parts import run_on_ray

        return run_on_ray(config)
    if isinstance(config, PreprocessConfig):
        from vae.prepare.preprocess.preprocess_images import run_preprocess

        return run_preprocess(config)
    if isinstance(config, ValidateConfig):
        from vae.prepare.validate.validate_images import run_validate

        return run_validate(config)
    if isinstance(config, ShardConfig):
        from vae.prepare.shard.shard_images import run_shard

        return run_shard(config)
    if isinstance(config, IndexConfig) and config.input.lower().endswith(".json"):
        from vae.prepare.tars.filter_index import run_filter

        return run_filter(config)
    if isinstance(config, IndexConfig):
        from vae.prepare.tars.index_tars import run_index

        return run_index(config)
    if isinstance(config, MergeConfig):
        from vae.prepare.merge import run_merge

        return run_merge(config)
    if isinstance(config, AnalyzeConfig):
        from vae.prepare.analyze.analyze_images import run_analyze

        return run_analyze(config)
    if isinstance(config, SplitConfig):
        from vae.prepare.split.split_manifest import run_split

        return run_split(config)
    from vae.prepare.demo.demo_images import run_demo

    return run_demo(config)


if __name__ == "__main__":
    resumable = {"preprocess", "shard", "merge", "index", "demo"} & set(
        sys.argv
    )  # the other modes write only at their end
    run_script(
        "prepare_data.py", main, "stopped: the same command continues from here" if resumable else "stopped"
    )
