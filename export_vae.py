#!/usr/bin/env python3
"""Write a trained VAE for other programs: `python export_vae.py --help`."""

import sys

from launchers.output import flushed_output
from vae.config.errors import EXIT_FAILED, EXIT_INTERRUPTED, UserError
from vae.config.export_flags import parse_export_flags


def main(argv: list[str]) -> int:
    """Flags to one call; a user's mistake is one line and its exit code."""
    try:
        config = parse_export_flags(argv)
        try:
            from vae.interop.exporting import export
        except ModuleNotFoundError as error:
            print(
                f"{error.name} is not installed: run ./setup.sh (Windows: setup_windows.bat)", file=sys.stderr
            )
            return EXIT_FAILED
        export(config)
        return 0
    except UserError as error:
        print(f"export_vae.py: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a full disk, a folder taken away: nothing of ours to mend
        print(f"export_vae.py: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("stopped: nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    with flushed_output():
        sys.exit(main(sys.argv[1:]))
