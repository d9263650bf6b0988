#!/usr/bin/env python3
"""Check this machine: prints what works, what does not, and the remedy for each problem."""

import sys


def run_checks(config):
    """Gather facts, judge them, print the report; returns the exit code."""
    from pathlib import Path

    from vae.checks.machine import gather
    from vae.checks.report import as_json, as_text, exit_code
    from vae.checks.table import judge

    if sys.stdout.isatty() and not config.json:
        print("Checking this machine ...", file=sys.stderr)
    facts = gather(Path(__file__).resolve().parent, config.output_dir, config.data_path)
    checks = judge(facts)
    code = exit_code(checks, config.strict)
    if config.json:
        print(as_json(facts, checks, code))
    else:
        print(as_text(checks))
    return code


def run_plan(config):
    """Print the profiles that fit; returns the exit code."""
    import json

    from vae.system.gpus import find_cards

    if config.gpu is not None:
        find_cards(config.gpu)  # finds a mistake before PyTorch is imported, which takes seconds
    from vae.memory.plan_table import plan_data, print_plan

    if config.json:
        print(json.dumps(plan_data(config.gpu, config.vram_gib), indent=2))
    else:
        print_plan(config.gpu, config.vram_gib)
    return 0


def main(argv):
    """Flags to one call; returns the exit code."""
    from vae.config.check_flags import parse_check_flags

    config = parse_check_flags(argv)
    return run_plan(config) if config.plan else run_checks(config)


if __name__ == "__main__":
    import _signal  # signal would first import enum
    import os

    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # no traceback of an import
    sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # PYTHONSAFEPATH leaves it out
    from vae.system.script import run_script

    run_script("check_compatibility.py", main)
