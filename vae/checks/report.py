"""The report of check_compatibility.py: as text for a person, as JSON for a program."""

import json
import platform
import textwrap
from dataclasses import asdict

from vae.checks.facts import Facts
from vae.checks.table import FAIL, PASS, SKIP, WARN, Result
from vae.system.console import public_line

GROUPS = {
    "torch": "PyTorch",
    "card": "Card and driver",
    "software": "Packages",
    "system": "System",
    "disk": "Disks and files",
}
SCHEMA_VERSION = 2
EXIT_STRICT = 3  # warnings under --strict
WORDS = {PASS: "ok", WARN: "WARN", FAIL: "FAIL", SKIP: "skip"}
WIDTH, TITLE_WIDTH = 100, 22  # characters of a line, and of a check's title


def count(results: list[Result]) -> dict[str, int]:
    """The number of checks with each status."""
    return {status: sum(r.status == status for r in results) for status in WORDS}


def exit_code(results: list[Result], strict: bool) -> int:
    """0: nothing failed (warnings are allowed), 1: a check failed, 3: warnings under --strict."""
    counts = count(results)
    return 1 if counts[FAIL] else EXIT_STRICT if strict and counts[WARN] else 0


def as_json(facts: Facts, checks: list[Result], code: int) -> str:
    """One object: schema_version, ok, exit_code, counts, checks, environment; ASCII only."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "ok": not count(checks)[FAIL],
        "exit_code": code,
        "counts": count(checks),
        "checks": [{**check._asdict(), "group": check.group} for check in checks],
        "environment": {"platform": platform.platform(), **asdict(facts)},
    }
    return json.dumps(content, indent=2)


def as_text(checks: list[Result]) -> str:
    """The commands to run first, then every check by group, then the summary."""
    lines = _to_do(checks)
    for group, title in GROUPS.items():
        lines += ["", title]
        for check in checks:
            lines += _lines(check) if check.group == group else []
    return "\n".join([*lines, "", summary(checks)])


def summary(checks: list[Result]) -> str:
    counts = count(checks)
    words = f"{counts[FAIL]} failed, {counts[WARN]} warnings, {counts[PASS]} ok, {counts[SKIP]} skipped"
    if counts[FAIL]:
        return f"{words}. Fix the failures before you train."
    if counts[WARN]:
        return f"{words}. Training works on this machine, with the limits that the warnings describe."
    return f"{words}. Everything is ready."


def _to_do(checks: list[Result]) -> list[str]:
    """The remedies of the failed checks, each once, in the order in which they must be applied."""
    failed = (check for check in checks if check.status == FAIL)
    remedies = list(dict.fromkeys(check.remedy for check in failed if check.remedy))
    if not remedies:
        return ["Compatibility of this machine with the VAE trainer"]
    return ["To do first:", *(f"    {remedy}" for remedy in remedies)]


def _lines(check: Result) -> list[str]:
    start = f"  {WORDS[check.status]:<4}  {check.title:<{TITLE_WIDTH}} "
    first, *rest = textwrap.wrap(public_line(check.found), WIDTH - len(start), break_on_hyphens=False) or [""]
    lines = [start + first, *(" " * len(start) + line for line in rest)]
    lines += [f"{'':<8}expected: {check.expected}"] if check.expected else []
    lines += [f"{'':<8}remedy:   {check.remedy}"] if check.remedy else []  # one line, to be copied
    return lines
