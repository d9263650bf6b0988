"""Which build of PyTorch suits the driver and the cards of this machine.

Sources: drivers and the first card of CUDA 13 stand with theirs in vae/checks/cuda_facts.py; which build has
code for which card, and for which versions of torch, is from the support matrices of PyTorch's releases 2.10
to 2.15 (github.com/pytorch/pytorch, RELEASE.md and issues 172663, 178665, 190355, 190385); the versions that
ended from pytorch.org/get-started/previous-versions.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass

from vae.checks.cuda_facts import BLACKWELL_DRIVER, CUDA_13_CAPABILITY, FIRST_DRIVER, WINDOWS_TRITON

NVIDIA_SMI_TIMEOUT_SECONDS = 15  # it may take seconds to wake a card
NEWEST_DRIVER = FIRST_DRIVER[13]  # the branch to update to: every build there is works with it


@dataclass(frozen=True)
class Build:
    """A CUDA build of PyTorch: the driver branch it needs and the compute capabilities it has code for."""

    title: str
    driver: int
    lowest: tuple[int, int]
    highest_major: int


BUILDS = {
    "cu132": Build("CUDA 13.2", FIRST_DRIVER[13], CUDA_13_CAPABILITY, 12),
    "cu130": Build("CUDA 13.0", FIRST_DRIVER[13], CUDA_13_CAPABILITY, 12),
    # Works with older drivers too, but those do not know the cards it is taken for. Without Volta since 2.11.
    "cu128": Build("CUDA 12.8", BLACKWELL_DRIVER, (7, 5), 12),
    "cu126": Build("CUDA 12.6", FIRST_DRIVER[12], (5, 0), 9),
}
# The first that driver and card bear. 13.2 is left out: it is built for driver 595, and 13.0 serves as well.
AUTO_ORDER = ("cu130", "cu128", "cu126")
# Triton for Windows ends with torch 2.14, so a newer torch could not compile there: 12.8 ends with 2.11.
AUTO_ORDER_WINDOWS = ("cu128", "cu130", "cu126")

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


def read_machine() -> Machine | None:
    """What nvidia-smi says, or None where there is no answer; raises TimeoutError where it hangs."""
    # Under WSL the program lies where PATH does not always lead.
    program = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/lib/wsl/lib")
    if program is None:
        return None
    # Drivers of about 2021 and before do not know compute_cap and refuse the whole question.
    for fields in ("driver_version,compute_cap,name", "driver_version"):
        query = [program, f"--query-gpu={fields}", "--format=csv,noheader"]
        try:
            answer = subprocess.run(query, capture_output=True, timeout=NVIDIA_SMI_TIMEOUT_SECONDS)
        except OSError:
            return None
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"nvidia-smi gave no answer in {NVIDIA_SMI_TIMEOUT_SECONDS} s") from error
        if answer.returncode == 0:
            return parse_answer(answer.stdout.decode("utf-8", "replace"))
    return None


def parse_answer(text: str) -> Machine | None:
    """Lines such as `575.51.03, 12.0, NVIDIA GeForce RTX 5090`, or of the driver alone."""
    driver, cards = None, []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",", 2)]
        branch = re.match(r"(\d+)\.", parts[0])
        if not branch:
            continue
        driver = int(branch.group(1))
        capability = re.fullmatch(r"(\d+)\.(\d+)", parts[1]) if len(parts) == 3 else None
        if len(parts) == 3:
            cards.append((parts[2], capability and (int(capability.group(1)), int(capability.group(2)))))
    return None if driver is None else Machine(driver, tuple(cards))


def title(build: str) -> str:
    """What a build is called."""
    return BUILDS[build].title if build in BUILDS else OTHERS[build]


def has_code_for(build: str, capability: tuple[int, int] | None) -> bool:
    """Whether the build runs on such a card; True where the capability is not known."""
    known = BUILDS[build]
    return capability is None or (known.lowest <= capability and capability[0] <= known.highest_major)


def build_for(machine: Machine | None, platform: str) -> tuple[str, str]:
    """The build that `auto` stands for on sys.platform `platform`, and the reason in words."""
    if platform == "darwin":
        return "index", "macOS"
    if machine is None:
        return "cpu", "no NVIDIA driver answers"
    name, capability = machine.newest
    if machine.driver < min(build.driver for build in BUILDS.values()):
        return "cpu", f"NVIDIA driver {machine.driver} is too old for every build: update to {NEWEST_DRIVER}"
    card = f", {name}" if name else ""
    for build in AUTO_ORDER_WINDOWS if platform == "win32" else AUTO_ORDER:
        if machine.driver >= BUILDS[build].driver and has_code_for(build, capability):
            return build, f"NVIDIA driver {machine.driver}{card}" + _left_out(build, machine)
    if not any(has_code_for(build, capability) for build in BUILDS):
        return "cpu", f"{name}: no build has code for compute capability {_dotted(capability)}"
    return nearest(machine), f"NVIDIA driver {machine.driver} does not know {name}: update to {NEWEST_DRIVER}"


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


def triton_windows(torch: str) -> str | None:
    """Version of triton-windows for a version of torch such as 2.11.0+cu128; None where there is none."""
    major, minor = torch.split(".")[:2]
    return WINDOWS_TRITON.get((int(major), int(minor)))
