#!/usr/bin/env python3
"""Looks at this machine and says what works, what does not, and the line that mends it."""

# Any Python 3.6 or newer must be able to read this file, so that one too old is told so.
import os
import sys

LEAST_PYTHON = (3, 10)


def run(argv):
    """Flags, facts, judgement; returns the report and the exit code."""
    from pathlib import Path

    from vae.checks import report
    from vae.checks.gathering import gather
    from vae.checks.judging import judge
    from vae.checks.results import exit_code
    from vae.config.check_flags import read_arguments
    from vae.config.options import Config

    arguments = read_arguments(argv)
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
        return report.as_json(facts, checks, code), code
    return report.as_text(checks, report.wants_colour(sys.stdout)), code


def main():
    """Run and print; a pipe that was closed early is no mistake."""
    if sys.version_info < LEAST_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        script = "setup_windows.bat" if os.name == "nt" else "./setup.sh"
        print(f"Python {found} is too old: 3.10 or newer is needed. To do first:\n    {script}")
        return 1
    try:
        text, code = run(sys.argv[1:])
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    sys.stdout.reconfigure(errors="backslashreplace")  # a name that this terminal has no letters for
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `| head -1` has what it wanted; nothing may be flushed into it at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


if __name__ == "__main__":
    sys.exit(main())
