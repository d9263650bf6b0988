#!/usr/bin/env python3
"""Measure and compare VAEs on a folder of images: `python evaluate_vae.py --help`."""


def main(argv: list[str]) -> int:
    """Parse the flags and run the comparison; returns the exit code."""
    from vae.config.trained_vae_flags import parse_evaluate_flags

    config = parse_evaluate_flags(argv)
    from vae.evaluation.command import check_command
    from vae.prepare.hub_dataset import with_local_data

    check_command(config)  # finds mistakes before PyTorch is imported, which takes seconds
    config = with_local_data(config)
    from vae.evaluation.compare import compare

    compare(config)
    return 0


if __name__ == "__main__":
    import _signal  # signal would first import enum
    import os
    import sys

    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # no traceback of an import
    sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # PYTHONSAFEPATH leaves it out
    from vae.system.script import run_script

    run_script("evaluate_vae.py", main, stopped="stopped: no results")
