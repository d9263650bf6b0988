"""Builds of PyTorch for the set-up: the best one for a machine with the reason, and builds that do not fit.

The facts about drivers, cards and builds are in vae/checks/cuda_builds.py, with their sources. The last
versions of ended builds are from pytorch.org/get-started/previous-versions.
"""

from dataclasses import dataclass

from vae.checks.cuda_builds import BUILDS, NEWEST_DRIVER, driver_branch, has_code_for, suggested_build
from vae.checks.facts import Smi

# The title and the last torch version with wheels for it; requirements.txt sets the oldest supported version.
ENDED = {"cu118": ("CUDA 11.8", "2.7"), "cu121": ("CUDA 12.1", "2.5"), "cu124": ("CUDA 12.4", "2.6")}
OTHERS = {"rocm": "ROCm (AMD, Linux)", "cpu": "CPU", "index": "the build from the general Python index"}


@dataclass(frozen=True)
class Machine:
    """The driver branch, and the name and (if reported) the compute capability of each card."""

    driver: int
    cards: tuple[tuple[str, tuple[int, int] | None], ...] = ()

    @property
    def newest(self) -> tuple[str, tuple[int, int] | None]:
        """The card with the highest capability, which decides the build; an empty name if there is none."""
        return max(self.cards, key=lambda card: card[1] or (0, 0), default=("", None))

    @classmethod
    def of(cls, smi: Smi) -> "Machine | None":
        """The machine that nvidia-smi describes; None if it reports no driver."""
        branch = driver_branch(smi.driver) if smi.driver else None
        if branch is None:
            return None
        return cls(branch, tuple((card.name, card.capability) for card in smi.cards))


def title(build: str) -> str:
    """The display name of a build."""
    return BUILDS[build].title if build in BUILDS else OTHERS[build]


def build_for(machine: Machine | None, platform: str) -> tuple[str, str]:
    """The build that `auto` selects on sys.platform `platform`, and the reason."""
    if platform == "darwin":
        return "index", "macOS"
    if machine is None:
        return "cpu", "no NVIDIA driver found"
    name, capability = machine.newest
    if machine.driver < min(build.driver for build in BUILDS.values()):
        return "cpu", f"NVIDIA driver {machine.driver} is too old for every build: update to {NEWEST_DRIVER}"
    build = suggested_build(machine.driver, capability)
    if build is None:
        reason = f"NVIDIA driver {machine.driver} does not support {name}: update to {NEWEST_DRIVER}"
        return nearest(machine), reason
    if build == "cpu":
        return build, f"no build has code for {_named(machine.newest)}"
    card = f", {name}" if name else ""
    return build, f"NVIDIA driver {machine.driver}{card}" + _unsupported_cards(build, machine)


def _unsupported_cards(build: str, machine: Machine) -> str:
    names = sorted({name for name, capability in machine.cards if not has_code_for(build, capability)})
    return f"; it has no code for {', '.join(names)}" if names else ""


def _named(card: tuple[str, tuple[int, int] | None]) -> str:
    name, capability = card
    return f"{name} (compute capability {'.'.join(map(str, capability or ('unknown',)))})"


def nearest(machine: Machine | None) -> str:
    """The oldest available CUDA build that has code for the newest card."""
    capability = machine.newest[1] if machine else None
    return next((build for build in reversed(BUILDS) if has_code_for(build, capability)), "cu126")


def ended(build: str, machine: Machine | None) -> str:
    """A sentence on a build that is no longer published, and the nearest available one."""
    name, last = ENDED[build]
    instead = nearest(machine)
    return (
        f"{name} builds ended with torch {last}; the nearest available: {title(instead)} (--torch {instead})"
    )


def misfit(build: str, machine: Machine | None) -> str | None:
    """A sentence if the driver or the card does not support a build; None if both do."""
    if machine is None or build not in BUILDS:
        return None
    if not has_code_for(build, machine.newest[1]):
        return f"{title(build)} has no code for {_named(machine.newest)}: use --torch auto"
    needed = BUILDS[build].driver
    if machine.driver < needed:
        return (
            f"{title(build)} needs NVIDIA driver {needed} or newer, but this is {machine.driver}: update it"
        )
    return None
