"""The report: for people, grouped and coloured on a terminal only; for programs, JSON."""

import json
import os
import platform
import sys
import textwrap
from dataclasses import asdict
from typing import TextIO

from vae.checks.facts import Facts
from vae.checks.judge.all_checks import GROUPS
from vae.checks.results import FAIL, PASS, SKIP, WARN, Check, count

SCHEMA_VERSION = 1
WORDS = {PASS: "ok", WARN: "WARN", FAIL: "FAIL", SKIP: "skip"}
COLOURS = {PASS: "32", WARN: "33", FAIL: "31", SKIP: "2"}
WIDTH, TITLE = 100, 22  # letters of a line, and of a check's title


def as_json(facts: Facts, checks: list[Check], code: int) -> str:
    """One object: schema_version, ok, exit_code, counts, checks, environment; ASCII only."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "ok": not count(checks)[FAIL],
        "exit_code": code,
        "counts": count(checks),
        "checks": [{**asdict(check), "group": check.group} for check in checks],
        "environment": {"platform": platform.platform(), **asdict(facts)},
    }
    return json.dumps(content, indent=2)


def as_text(checks: list[Check], colour: bool) -> str:
    """What to do first, then every check by group, then the sum."""
    lines = _to_do(checks)
    for group, title in GROUPS.items():
        lines += ["", title]
        for check in checks:
            if check.group == group and check.status != SKIP:
                lines += _lines(check, colour)
        lines += _skipped([c for c in checks if c.group == group and c.status == SKIP], colour)
    lines += ["", summary(checks)]
    return "\n".join(lines)


def summary(checks: list[Check]) -> str:
    counts = count(checks)
    words = f"{counts[FAIL]} failed, {counts[WARN]} warnings, {counts[PASS]} fine, {counts[SKIP]} skipped"
    if counts[FAIL]:
        return f"{words}. Training will not run well before what failed is mended."
    if counts[WARN]:
        return f"{words}. Training works here; the warnings say what it will lack."
    return f"{words}. Everything is ready."


def _to_do(checks: list[Check]) -> list[str]:
    """The lines that mend what failed, each once, in the order in which they are to be done."""
    mends = list(dict.fromkeys(check.mend for check in checks if check.status == FAIL and check.mend))
    if not mends:
        return ["This machine and the VAE trainer"]
    return ["To do first:", *(f"    {mend}" for mend in mends)]


def _lines(check: Check, colour: bool) -> list[str]:
    lines = _wrapped(check.status, f"{check.title:<{TITLE}}", check.found, colour)
    if check.status in (WARN, FAIL):
        lines += [f"{'':<8}expected: {check.expected}"] if check.expected else []
        lines += [f"{'':<8}mend:     {check.mend}"] if check.mend else []  # one line, to be copied
    return lines


def _skipped(checks: list[Check], colour: bool) -> list[str]:
    """Skipped checks in one line for each reason."""
    titles: dict[str, list[str]] = {}
    for check in checks:
        titles.setdefault(check.found, []).append(check.title)
    lines = []
    for reason, those in titles.items():
        lines += _wrapped(SKIP, "", f"{', '.join(those)}: {reason}", colour)
    return lines


def _wrapped(status: str, title: str, text: str, colour: bool) -> list[str]:
    word = f"{WORDS[status]:<4}"
    if colour:
        word = f"\033[{COLOURS[status]}m{word}\033[0m"
    start = f"  {word}  {title} " if title else f"  {word}  "
    indent = 8 + (len(title) + 1 if title else 0)
    first, *rest = textwrap.wrap(text, WIDTH - indent, break_on_hyphens=False) or [""]
    return [start + first, *(" " * indent + line for line in rest)]


def wants_colour(stream: TextIO) -> bool:
    """Only a terminal that understands it gets colour, and none where NO_COLOR is set (no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty():
        return False
    return _windows_console_colours() if sys.platform == "win32" else True


def _windows_console_colours() -> bool:
    """Ask the Windows console to understand colours; False where it is too old."""
    import ctypes

    kernel, mode = ctypes.windll.kernel32, ctypes.c_uint()
    handle = kernel.GetStdHandle(-11)  # STD_OUTPUT_HANDLE
    if not kernel.GetConsoleMode(handle, ctypes.byref(mode)):
        return False
    return bool(kernel.SetConsoleMode(handle, mode.value | 4))  # ENABLE_VIRTUAL_TERMINAL_PROCESSING
