#!/usr/bin/env python3
"""Make a training set: `--mode demo` draws one. The other modes are not built yet."""

import argparse
import signal
import sys

from vae.config.errors import EXIT_FAILED, EXIT_INTERRUPTED, UsageError, UserError

MODES = ("preprocess", "validate", "analyze", "split", "demo")


class OneLineParser(argparse.ArgumentParser):
    """A parser whose complaints are one line."""

    def error(self, message: str):
        raise UsageError(f"{message}; --help lists the flags")


def read_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; raises UsageError where it cannot be read."""
    parser = OneLineParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--mode", required=True, choices=MODES, help="what to do; only demo is built yet")
    parser.add_argument("--output_dir", default="./data/demo", metavar="DIR", help="folder for the pictures")
    parser.add_argument("--count", type=int, default=64, help="number of pictures")
    parser.add_argument("--target_size", type=int, default=256, help="side of the pictures, px")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other pictures")
    parser.add_argument("--format", choices=("png", "jpeg"), default="png", help="jpeg: quality 95, 4:4:4")
    parser.add_argument("--num_workers", default="auto", metavar="N", help="drawing processes")
    arguments, unknown = parser.parse_known_args(argv)
    if arguments.mode != "demo":
        raise UsageError(f"--mode {arguments.mode} is not built yet: only --mode demo is")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    for flag, least in (("count", 1), ("target_size", 8), ("seed", 0)):
        value = getattr(arguments, flag)
        if value < least:
            raise UsageError(f"--{flag} {value} is too small: the least is {least}")
    return arguments


def main() -> int:
    """Run one mode; a user's mistake is one line and an exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as cleanly as Ctrl-C
    try:
        arguments = read_arguments()
        from vae.data.workers import resolve_num_workers
        from vae.prepare.writing import DemoSettings, write_demo

        settings = DemoSettings(arguments.target_size, arguments.seed, arguments.format)
        workers = resolve_num_workers(arguments.num_workers)
        drawn = write_demo(arguments.output_dir, arguments.count, settings, workers)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        print(f"error: {error.name} is not installed: run setup.sh or setup_windows.bat", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("stopped: the same command goes on from here", file=sys.stderr)
        return EXIT_INTERRUPTED
    print(f"{arguments.output_dir}: {arguments.count} pictures, {drawn} of them drawn now")
    return 0


if __name__ == "__main__":
    sys.exit(main())
