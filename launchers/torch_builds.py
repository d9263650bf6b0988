"""What the set-up says of builds of PyTorch: which suits this machine and why, which ended, which misfits.

The facts of drivers, cards and builds stand with their sources in vae/checks/cuda_builds.py; the versions
that ended are from pytorch.org/get-started/previous-versions.
"""

from dataclasses import dataclass

from vae.checks.cuda_builds import BUILDS, NEWEST_DRIVER, driver_branch, has_code_for, suggested_build
from vae.checks.facts import Smi

# Last torch with wheels for it; the oldest that is supported here stands in requirements-torch.txt.
ENDED = {"cu118": ("CUDA 11.8", "2.7"), "cu121": ("CUDA 12.1", "2.5"), "cu124": ("CUDA 12.4", "2.6")}
OTHERS = {"rocm": "ROCm (AMD, Linux)", "cpu": "CPU", "index": "whatever the general Python index gives"}


@dataclass(frozen=True)
class Machine:
    """What nvidia-smi says: the driver's branch, and each card's name and compute capability, if told."""

    driver: int
    cards: tuple[tuple[str, tuple[int, int] | None], ...] = ()

    @property
    def newest(self) -> tuple[str, tuple[int, int] | None]:
        """The card that decides; an empty name where none was told."""
        return max(self.cards, key=lambda card: card[1] or (0, 0), default=("", None))

    @classmethod
    def of(cls, smi: Smi) -> "Machine | None":
        """What nvidia-smi's answer says; None where it names no driver."""
        branch = driver_branch(smi.driver) if smi.driver else None
        if branch is None:
            return None
        return cls(branch, tuple((card.name, card.capability) for card in smi.cards))


def title(build: str) -> str:
    """What a build is called."""
    return BUILDS[build].title if build in BUILDS else OTHERS[build]


def build_for(machine: Machine | None, platform: str) -> tuple[str, str]:
    """The build that `auto` stands for on sys.platform `platform`, and the reason in words."""
    if platform == "darwin":
        return "index", "macOS"
    if machine is None:
        return "cpu", "no NVIDIA driver answers"
    name, capability = machine.newest
    if machine.driver < min(build.driver for build in BUILDS.values()):
        return "cpu", f"NVIDIA driver {machine.driver} is too old for every build: update to {NEWEST_DRIVER}"
    build = suggested_build(machine.driver, capability, windows=platform == "win32")
    if build is None:
        reason = f"NVIDIA driver {machine.driver} does not know {name}: update to {NEWEST_DRIVER}"
        return nearest(machine), reason
    if build == "cpu":
        return build, f"{name}: no build has code for compute capability {_dotted(capability)}"
    card = f", {name}" if name else ""
    return build, f"NVIDIA driver {machine.driver}{card}" + _left_out(build, machine)


def _left_out(build: str, machine: Machine) -> str:
    names = sorted({name for name, capability in machine.cards if not has_code_for(build, capability)})
    return f"; it has no code for {', '.join(names)}" if names else ""


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def nearest(machine: Machine | None) -> str:
    """The oldest CUDA build there is that has code for the newest card."""
    capability = machine.newest[1] if machine else None
    return next((build for build in reversed(BUILDS) if has_code_for(build, capability)), "cu126")


def ended(build: str, machine: Machine | None) -> str:
    """One sentence on a build that is no more, and what comes nearest."""
    name, last = ENDED[build]
    instead = nearest(machine)
    return (
        f"{name} builds ended with torch {last}; the nearest there is: {title(instead)} (--torch {instead})"
    )


def misfit(build: str, machine: Machine | None) -> str | None:
    """One sentence where driver or card will not work with a build that was asked for."""
    if machine is None or build not in BUILDS:
        return None
    name, capability = machine.newest
    if not has_code_for(build, capability):
        return f"{title(build)} has no code for {name} (compute capability {_dotted(capability)}): take auto"
    needed = BUILDS[build].driver
    if machine.driver < needed:
        return (
            f"{title(build)} needs NVIDIA driver {needed} or newer, and this is {machine.driver}: update it"
        )
    return None
