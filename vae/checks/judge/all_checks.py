"""All checks together, in the order of the report."""

from vae.checks.facts import Facts
from vae.checks.judge.cards import judge_cards
from vae.checks.judge.host import judge_host
from vae.checks.judge.kernels import judge_kernels
from vae.checks.judge.software import judge_software
from vae.checks.results import Check

GROUPS = {
    "torch": "PyTorch",
    "card": "Card and driver",
    "kernels": "Test computations",
    "software": "Python and packages",
    "system": "System",
    "disk": "Disks and files",
}


def judge(facts: Facts) -> list[Check]:
    """Every check, sorted by group; a pure function of the facts."""
    checks = [*judge_software(facts), *judge_cards(facts), *judge_kernels(facts), *judge_host(facts)]
    return sorted(checks, key=lambda check: list(GROUPS).index(check.group))
