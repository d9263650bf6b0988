"""A check is one row: an id, a title, what is expected, and its cases."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from vae.checks.facts import Facts

PASS, WARN, FAIL, SKIP = "pass", "warn", "fail", "skip"
EXIT_STRICT = 3  # warnings under --strict

# (condition, status, what was found, remedy, another text for `expected`); the last two may be missing.
# A function of the facts yields the cases and stops at the first one that applies.
Case = tuple[Any, ...]
Cases = Iterable[Case]


class Result(NamedTuple):
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


class Check(NamedTuple):
    """A row of the table."""

    id: str
    title: str
    expected: str
    cases: Callable[[Facts], Cases]

    def result(self, facts: Facts) -> Result:
        status, found, remedy, expected = first(self.cases(facts))
        expected = (expected or self.expected) if status in (WARN, FAIL) else ""
        return Result(self.id, self.title, status, found, expected, remedy)


def first(cases: Cases) -> tuple[str, str, str, str]:
    """Status, finding, remedy and expectation of the first case that applies."""
    _, *values = next(case for case in cases if case[0])
    status, found, remedy, expected = (*values, "", "")[:4]
    return status, found, remedy, expected


def count(results: list[Result]) -> dict[str, int]:
    """How many checks have each status."""
    return {status: sum(r.status == status for r in results) for status in (PASS, WARN, FAIL, SKIP)}


def exit_code(results: list[Result], strict: bool) -> int:
    """0: nothing failed (warnings are allowed), 1: a check failed, 3: warnings under --strict."""
    counts = count(results)
    return 1 if counts[FAIL] else EXIT_STRICT if strict and counts[WARN] else 0
