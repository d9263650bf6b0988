#!/usr/bin/env python3
"""Search for the settings of train_vae.py on your own images: `python tune_vae.py --help`."""


def main(argv: list[str]) -> int:
    """Parse the flags and search; returns the exit code."""
    from importlib.util import find_spec

    from vae.config.tune_flags import parse_tune_flags
    from vae.system.errors import UserError

    config = parse_tune_flags(argv)
    if find_spec("optuna") is None:
        raise UserError("tune_vae.py needs optuna: run pip install -r requirements-tune.txt")
    from vae.tuning.search import check_command, search

    search(config, check_command(config))
    return 0


if __name__ == "__main__":
    import _signal  # signal would first import enum
    import os
    import sys

    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # no traceback of an import
    sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # PYTHONSAFEPATH leaves it out
    from vae.system.script import run_script

    run_script("tune_vae.py", main, stopped="stopped: the same command continues the search")
