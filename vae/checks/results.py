"""The result of one check: its status, what was found, what was expected, and the remedy."""

from dataclasses import dataclass

PASS, WARN, FAIL, SKIP = "pass", "warn", "fail", "skip"
EXIT_STRICT = 3  # warnings under --strict


@dataclass(frozen=True)
class Check:
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


def count(checks: list[Check]) -> dict[str, int]:
    """How many checks have each status."""
    return {status: sum(c.status == status for c in checks) for status in (PASS, WARN, FAIL, SKIP)}


def exit_code(checks: list[Check], strict: bool) -> int:
    """0: nothing failed (warnings are allowed), 1: a check failed, 3: warnings under --strict."""
    counts = count(checks)
    if counts[FAIL]:
        return 1
    return EXIT_STRICT if strict and counts[WARN] else 0
