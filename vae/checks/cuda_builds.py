"""CUDA builds of PyTorch: the driver each one needs, the cards it supports, and the best one for a machine.

The supported cards and the versions of torch per build are from the support matrices of PyTorch's releases
2.10 to 2.15 (github.com/pytorch/pytorch, RELEASE.md and issues 172663, 178665, 190355, 190385). The set-up
uses this file too, before any package is installed.
"""

import re
from dataclasses import dataclass

from vae.checks.machine import release

# CUDA's major version -> first driver branch that runs all of its minor versions: NVIDIA's "CUDA
# Compatibility", table of minor version compatibility
# (https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html).
FIRST_DRIVER = {12: 525, 13: 580}
NEWEST_DRIVER = FIRST_DRIVER[13]  # the branch to update to: it runs every build in BUILDS

# R570 is the first branch that supports compute capability 10 and 12; its first public Linux driver came with
# the CUDA 12.8 release, whose notes list the architecture (docs.nvidia.com/cuda/archive/12.8.0).
BLACKWELL = (10, 0)
BLACKWELL_DRIVER = 570

# CUDA 13.0 no longer compiles for anything before Turing (its release notes).
CUDA_13_CAPABILITY = (7, 5)


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
    # It runs on older drivers too, but those do not support the cards it is chosen for. No Volta since 2.11.
    "cu128": Build("CUDA 12.8", BLACKWELL_DRIVER, (7, 5), 12),
    "cu126": Build("CUDA 12.6", FIRST_DRIVER[12], (5, 0), 9),
}
# The first build that driver and card support. Without 13.2: it targets driver 595 and has no advantage here.
AUTO_ORDER = ("cu130", "cu128", "cu126")

# torch's version -> Triton's minor version for Windows, which torch's own metadata does not list
# (github.com/triton-lang/triton-windows); its newest is 3.8. The set-up installs no newer torch on Windows.
WINDOWS_TRITON = {(2, 10): "3.6", (2, 11): "3.6", (2, 12): "3.7", (2, 13): "3.7", (2, 14): "3.8"}


def driver_branch(driver: str) -> int | None:
    """580 for 580.95.05."""
    match = re.match(r"(\d+)\.", driver)
    return int(match[1]) if match else None


def needed_branch(cuda: str | None, capability: tuple[int, int] | None) -> int:
    """The oldest driver branch for a build with this CUDA version on this card; 0 if none is documented."""
    runtime = FIRST_DRIVER.get(int(cuda.split(".")[0]), 0) if cuda else 0
    card = BLACKWELL_DRIVER if capability and capability >= BLACKWELL else 0
    return max(runtime, card)


def runs_on(capability: tuple[int, int], arch_list: tuple[str, ...]) -> bool:
    """Whether a build for `arch_list` (sm_90, sm_120a, compute_90) has code for the card.

    Machine code runs on the same major capability and the same or a higher minor one. Architecture-specific
    code (sm_90a) runs only on exactly that capability. PTX is compiled for every newer card. Source: NVIDIA's
    Blackwell Compatibility Guide.
    """
    for arch in arch_list:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", arch)
        if match:
            built = (int(match[2]), int(match[3]))
            is_general = not match[4] and (match[1] == "compute" or built[0] == capability[0])
            if built == capability or (is_general and built < capability):
                return True
    return False


def has_code_for(build: str, capability: tuple[int, int] | None) -> bool:
    """Whether a build of BUILDS runs on such a card; True if the capability is unknown."""
    known = BUILDS[build]
    return capability is None or (known.lowest <= capability and capability[0] <= known.highest_major)


def suggested_build(branch: int | None, capability: tuple[int, int] | None) -> str | None:
    """The build for this driver branch and card; None if the driver must be updated first.

    "cpu" without a driver, or if no build has code for the card.
    """
    if branch is None or not any(has_code_for(build, capability) for build in BUILDS):
        return "cpu"
    for build in AUTO_ORDER:
        if branch >= BUILDS[build].driver and has_code_for(build, capability):
            return build
    return None


def triton_for_windows(torch: str) -> str | None:
    """Minor version of triton-windows for a torch version such as 2.11.0+cu128; None if there is none."""
    major, minor, *_ = (*release(torch), 0, 0)
    return WINDOWS_TRITON.get((major, minor))
