#!/usr/bin/env python3
"""Reconstruct, encode and decode pictures with a trained VAE: `python infer_vae.py --help`."""

import signal
import sys

from vae.config.errors import EXIT_FAILED, EXIT_INTERRUPTED, UserError
from vae.config.infer_flags import parse_infer_flags


def main(argv: list[str]) -> int:
    """Flags to one call; a user's mistake is one line and its exit code."""
    try:
        config = parse_infer_flags(argv)
        try:
            from vae.inference.running import infer
            from vae.interop.vae_files import load_vae
        except ModuleNotFoundError as error:
            print(
                f"{error.name} is not installed: run ./setup.sh (Windows: setup_windows.bat)", file=sys.stderr
            )
            return EXIT_FAILED
        return infer(config, load_vae)
    except UserError as error:
        print(f"infer_vae.py: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a full disk, a folder taken away: nothing of ours to mend
        print(f"infer_vae.py: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("stopped: finished files are whole, the one at work is not there", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as cleanly as Ctrl-C
    sys.exit(main(sys.argv[1:]))
