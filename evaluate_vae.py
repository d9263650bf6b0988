#!/usr/bin/env python3
"""Measure VAEs on a folder of pictures, side by side: `python evaluate_vae.py --help`."""

import signal
import sys

from vae.config.errors import EXIT_FAILED, EXIT_INTERRUPTED, UserError
from vae.config.evaluate_flags import parse_evaluate_flags


def main(argv: list[str]) -> int:
    """Flags to one call; a user's mistake is one line and its exit code."""
    try:
        config = parse_evaluate_flags(argv)
        try:
            from vae.evaluation.comparing import compare
        except ModuleNotFoundError as error:
            print(
                f"{error.name} is not installed: run ./setup.sh (Windows: setup_windows.bat)", file=sys.stderr
            )
            return EXIT_FAILED
        compare(config)
        return 0
    except UserError as error:
        print(f"evaluate_vae.py: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a full disk, a folder taken away: nothing of ours to mend
        print(f"evaluate_vae.py: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("stopped: no results were written", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as cleanly as Ctrl-C
    sys.exit(main(sys.argv[1:]))
