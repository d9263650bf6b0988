#!/usr/bin/env python3
"""Looks at this machine and says what works, what does not, and the line that mends it."""

# Any Python 3.6 or newer must be able to read this file, so that one too old is told so.
import os
import sys

from launchers.output import flushed_output

LEAST_PYTHON = (3, 10)
SETUP = "setup_windows.bat" if os.name == "nt" else "./setup.sh"


def run_checks(arguments):
    """Facts, judgements and the report; returns the exit code."""
    from pathlib import Path

    from vae.checks import report
    from vae.checks.gathering import gather
    from vae.checks.judging import judge
    from vae.checks.results import exit_code
    from vae.config.options import Config

    if sys.stdout.isatty() and not (arguments.json or arguments.quick):
        print("Looking at the machine; the computations take up to a minute ...", file=sys.stderr)
    facts = gather(
        Path(__file__).resolve().parent,
        quick=arguments.quick,
        output_dir=arguments.output_dir,
        data_path=arguments.data_path,
        default_data=Config().data.data_path,
    )
    checks = judge(facts)
    code = exit_code(checks, arguments.strict)
    if arguments.json:
        text = report.as_json(facts, checks, code)
    else:
        text = report.as_text(checks, report.wants_colour(sys.stdout))
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _close_output()
    return code


def run_plan(arguments):
    """The table of what fits, or the same as JSON; returns the exit code."""
    import json

    from vae.config.errors import EXIT_FAILED, UserError

    try:
        from vae.memory.plan_table import plan_data, print_plan

        if arguments.json:
            print(json.dumps(plan_data(arguments.gpu, arguments.vram_gib), indent=2))
        else:
            print_plan(arguments.gpu, arguments.vram_gib)
        sys.stdout.flush()
    except UserError as error:
        print(f"check_compatibility.py: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        print(f"check_compatibility.py: {error.name} is not installed: run {SETUP}", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:
        _close_output()
    return 0


def _close_output():
    """The reader (`| head -1`) has what it wanted: nothing may be flushed into the pipe at exit either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv):
    """Flags to one call; returns the exit code."""
    if sys.version_info < LEAST_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        print(f"Python {found} is too old: 3.10 or newer is needed. To do first:\n    {SETUP}")
        return 1
    from vae.config.check_flags import read_arguments
    from vae.config.errors import EXIT_FAILED, EXIT_INTERRUPTED

    arguments = read_arguments(argv)
    sys.stdout.reconfigure(errors="backslashreplace")  # a name that this terminal has no letters for
    sys.stderr.reconfigure(errors="backslashreplace")
    try:
        return run_plan(arguments) if arguments.plan else run_checks(arguments)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OSError as error:  # a file of the project that is missing or may not be read
        print(f"check_compatibility.py: {error}", file=sys.stderr)
        return EXIT_FAILED


if __name__ == "__main__":
    with flushed_output():
        sys.exit(main(sys.argv[1:]))
