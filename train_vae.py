#!/usr/bin/env python3
"""Train a high-resolution image VAE on a folder of pictures: `python train_vae.py --help`."""

import sys

from launchers.output import flushed_output
from vae.config.errors import EXIT_FAILED, UserError
from vae.config.flags import parse_flags
from vae.config.recipes import profile_table


def main(argv: list[str]) -> int:
    """Flags to one call; a user's mistake is one line and its exit code."""
    try:
        given = parse_flags(argv)
        if given.pop("list_profiles", False):
            print(profile_table())
            return 0
        try:
            from vae.training.run import train
        except ModuleNotFoundError as error:
            print(
                f"{error.name} is not installed: run ./setup.sh (Windows: setup_windows.bat)", file=sys.stderr
            )
            return EXIT_FAILED
        return train(given)
    except UserError as error:
        print(f"train_vae.py: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a full disk, a folder taken away: nothing of ours to mend
        print(f"train_vae.py: {error}", file=sys.stderr)
        return EXIT_FAILED


if __name__ == "__main__":
    with flushed_output():
        sys.exit(main(sys.argv[1:]))
