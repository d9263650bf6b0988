"""The judgement on one thing: its status, what was found, what was expected, and what mends it."""

from dataclasses import dataclass

PASS, WARN, FAIL, SKIP = "pass", "warn", "fail", "skip"
EXIT_STRICT = 3  # warnings under --strict


@dataclass(frozen=True)
class Check:
    """`id` is stable between versions; its part before the point is the group."""

    id: str
    title: str
    status: str
    found: str
    expected: str = ""
    mend: str = ""  # the exact line, or a sentence where no line does it

    @property
    def group(self) -> str:
        return self.id.split(".")[0]


def count(checks: list[Check]) -> dict[str, int]:
    """How many checks have each status."""
    return {status: sum(c.status == status for c in checks) for status in (PASS, WARN, FAIL, SKIP)}


def exit_code(checks: list[Check], strict: bool) -> int:
    """0 fine (warnings allowed), 1 something failed, 3 warnings under --strict."""
    counts = count(checks)
    if counts[FAIL]:
        return 1
    return EXIT_STRICT if strict and counts[WARN] else 0
