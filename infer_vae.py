#!/usr/bin/env python3
"""Reconstruct, encode and decode images with a trained VAE: `python infer_vae.py --help`."""


def main(argv: list[str]) -> int:
    """Parse the flags and run the command; returns the exit code."""
    from vae.config.trained_vae_flags import parse_infer_flags

    config = parse_infer_flags(argv)
    from vae.inference.tasks import plan_tasks

    tasks = plan_tasks(config)  # finds mistakes before PyTorch is imported, which takes seconds
    from vae.inference.infer import infer

    return infer(config, tasks)


if __name__ == "__main__":
    import _signal  # signal would first import enum
    import os
    import sys

    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # no traceback of an import
    sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # PYTHONSAFEPATH leaves it out
    from vae.system.script import run_script

    run_script(
        "infer_vae.py", main, stopped="stopped: finished files are complete, the current one is missing"
    )
