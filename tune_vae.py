#!/usr/bin/env python3
"""Search for the settings of train_vae.py on your own images: `python tune_vae.py --help`."""


def main(argv: list[str]) -> int:
    """Parse the flags and search; returns the exit code."""
    from vae.config.tune_flags import parse_tune_flags

    config = parse_tune_flags(argv)
    from vae.tuning.precheck import check_command

    base = check_command(config)  # finds mistakes before Optuna is imported
    if config.cards and len(config.cards) > 1:
        from vae.tuning.cards import search_on_cards

        search_on_cards(config, argv)
        return 0
    from vae.tuning.search import search

    search(config, base)
    return 0


if __name__ == "__main__":
    import signal

    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of an import
    from vae.system.script import run_script

    run_script("tune_vae.py", main, stopped="stopped: the same command continues the search")
