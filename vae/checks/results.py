"""The result of one check, chosen from its table of cases."""

from collections.abc import Sequence
from typing import Any, NamedTuple

PASS, WARN, FAIL, SKIP = "pass", "warn", "fail", "skip"
EXIT_STRICT = 3  # warnings under --strict

# (condition, status, what was found, remedy, another text for `expected`); the last two may be missing.
Case = tuple[Any, ...]


class Check(NamedTuple):
    """`id` is stable between versions; the part before the point is the group."""

    id: str
    title: str
    status: str
    found: str
    expected: str = ""
    remedy: str = ""  # the exact command, or a sentence if no command fixes it

    @property
    def group(self) -> str:
        return self.id.split(".")[0]


def check(id: str, title: str, expected: str, cases: Sequence[Case]) -> Check:
    """The first case whose condition holds; a skipped check expects nothing."""
    _, status, found, *rest = next(case for case in cases if case[0])
    remedy = rest[0] if rest else ""
    default = "" if status == SKIP else expected
    return Check(id, title, status, found, rest[1] if len(rest) > 1 else default, remedy)


def count(checks: list[Check]) -> dict[str, int]:
    """How many checks have each status."""
    return {status: sum(c.status == status for c in checks) for status in (PASS, WARN, FAIL, SKIP)}


def exit_code(checks: list[Check], strict: bool) -> int:
    """0: nothing failed (warnings are allowed), 1: a check failed, 3: warnings under --strict."""
    counts = count(checks)
    return 1 if counts[FAIL] else EXIT_STRICT if strict and counts[WARN] else 0
