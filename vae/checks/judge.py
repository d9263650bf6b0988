"""All checks, in the order of the report."""

from vae.checks.cards import CARDS
from vae.checks.computations import COMPUTATIONS
from vae.checks.facts import Facts
from vae.checks.software import SOFTWARE, TORCH, packages
from vae.checks.system import DISK, SYSTEM, folders
from vae.checks.table import Result

GROUPS = {
    "torch": "PyTorch",
    "card": "Card and driver",
    "kernels": "Test computations",
    "software": "Python and packages",
    "system": "System",
    "disk": "Disks and files",
}


def judge(facts: Facts) -> list[Result]:
    """The result of every check; a pure function of the facts."""
    checks = [*TORCH, *CARDS, *COMPUTATIONS, *SOFTWARE, *packages(facts), *SYSTEM, *folders(facts), *DISK]
    return [check.result(facts) for check in checks]
