"""`--mode merge`: the parts of a mode become its result, the same as without parts."""

from vae.config.prepare_flags import MergeConfig, ShardConfig
from vae.prepare.parts import read_parts
from vae.prepare.preprocess.preprocess_images import merge_preprocess
from vae.prepare.shard.shard_images import merge_shards


def run_merge(config: MergeConfig) -> int:
    """Join all parts in a folder and print a summary; returns the exit code.

    Raises DataError if a part is missing or not complete, and UserError for parts with different flags.
    """
    merged, count = read_parts(config)
    if isinstance(merged, ShardConfig):
        return merge_shards(merged, count)
    return merge_preprocess(merged, count)
