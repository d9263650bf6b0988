#!/usr/bin/env python3
"""Prepare a training set from raw images: `python prepare_data.py --help`."""


def main(argv: list[str]) -> int:
    """Flags to one call; returns the exit code."""
    from vae.config.prepare_flags import (
        AnalyzeConfig,
        IndexConfig,
        PreprocessConfig,
        ShardConfig,
        SplitConfig,
        ValidateConfig,
        parse_prepare_flags,
    )

    config = parse_prepare_flags(argv)
    if isinstance(config, PreprocessConfig):
        from vae.prepare.preprocess import run_preprocess

        return run_preprocess(config)
    if isinstance(config, ValidateConfig):
        from vae.prepare.validate import run_validate

        return run_validate(config)
    if isinstance(config, ShardConfig):
        from vae.prepare.shard import run_shard

        return run_shard(config)
    if isinstance(config, IndexConfig):
        from vae.prepare.index import run_index

        return run_index(config)
    if isinstance(config, AnalyzeConfig):
        from vae.prepare.analyze import run_analyze

        return run_analyze(config)
    if isinstance(config, SplitConfig):
        from vae.prepare.split import run_split

        return run_split(config)
    from vae.prepare.demo import run_demo

    return run_demo(config)


if __name__ == "__main__":
    import _signal  # signal would first import enum
    import os
    import sys

    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # no traceback of an import
    sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # PYTHONSAFEPATH leaves it out
    from vae.system.script import run_script

    words = [word for argument in sys.argv[1:] for word in argument.split("=", 1)]
    mode = words[words.index("--mode") + 1 :][:1] if "--mode" in words else []
    continues = mode in (["preprocess"], ["shard"], ["index"], ["analyze"], ["demo"]) or "--rows_dir" in words
    stopped = "stopped: the same command continues from here" if continues else "stopped"
    run_script("prepare_data.py", main, stopped)
