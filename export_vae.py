#!/usr/bin/env python3
"""Write a trained VAE for other programs: `python export_vae.py --help`."""


def main(argv: list[str]) -> int:
    """Export as the flags in `argv` specify; returns the exit code."""
    from vae.config.trained_vae_flags import parse_export_flags

    config = parse_export_flags(argv)
    from vae.interop.command import check_command

    check_command(config)  # finds mistakes before PyTorch is imported, which takes seconds
    from vae.interop.exporting import export

    export(config)
    return 0


if __name__ == "__main__":
    import _signal  # signal would first import enum
    import os
    import sys

    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # no traceback of an import
    sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # PYTHONSAFEPATH leaves it out
    from vae.system.script import run_script

    run_script("export_vae.py", main, stopped="stopped: nothing was written")
