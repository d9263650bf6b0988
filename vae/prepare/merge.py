"""`--mode merge`: the parts of a mode become its result, the same as without parts."""

from vae.config.prepare_flags import AnalyzeConfig, MergeConfig, ShardConfig, ValidateConfig
from vae.prepare.analyze.analyze_images import merge_analyze
from vae.prepare.parts import read_parts
from vae.prepare.preprocess.preprocess_images import merge_preprocess
from vae.prepare.shard.shard_images import merge_shards
from vae.prepare.validate.validate_images import merge_validate


def run_merge(config: MergeConfig) -> int:
    """Join all parts of an output and print a summary; returns the exit code.

    Raises DataError if a part is missing or not complete, and UserError for parts with different flags.
    """
    merged, count = read_parts(config)
    if isinstance(merged, ShardConfig):
        return merge_shards(merged, count)
    if isinstance(merged, ValidateConfig):
        return merge_validate(merged, count)
    if isinstance(merged, AnalyzeConfig):
        return merge_analyze(merged, count)
    return merge_preprocess(merged, count)
