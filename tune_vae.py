#!/usr/bin/env python3
"""Search for the settings of train_vae.py on your own images: `python tune_vae.py --help`."""


def main(argv: list[str]) -> int:
    """Parse the flags and search; returns the exit code."""
    from vae.config.tune_flags import parse_tune_flags

    config = parse_tune_flags(argv)
    from vae.tuning.defaults import check_command

    base = check_command(config)  # finds mistakes before Optuna is imported
    if config.cards and len(config.cards) > 1:
        from vae.tuning.training_process import search_on_cards

        search_on_cards(config, argv)
        return 0
    from vae.tuning.search import search

    search(config, base)
    return 0


if __name__ == "__main__":
    import _signal  # signal would first import enum

    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # no traceback of an import
    from vae.system.script import run_script

    run_script("tune_vae.py", main, stopped="stopped: the same command continues the search")
