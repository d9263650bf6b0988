"""Which driver a CUDA build needs, which cards a build runs on, which build suits a machine."""

import re

# CUDA's major version -> first driver branch that runs all of its minor versions: NVIDIA's "CUDA
# Compatibility", table of minor version compatibility
# (https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html).
FIRST_DRIVER = {11: 450, 12: 525, 13: 580}

# R570 is the first branch that knows compute capability 10 and 12; its first public Linux driver came with
# the CUDA 12.8 release, whose notes list the architecture (docs.nvidia.com/cuda/archive/12.8.0).
BLACKWELL, BLACKWELL_DRIVER = (10, 0), 570

# CUDA 13.0 no longer compiles for anything before Turing (its release notes).
CUDA_13_CAPABILITY = (7, 5)

# Builds the project's own index offers today, by the driver each needs; cu128 is the oldest with sm_120.
BUILDS = ((580, "cu130"), (BLACKWELL_DRIVER, "cu128"), (525, "cu126"))

# Triton's minor version beside torch's, for Windows, where torch's own metadata names none
# (github.com/triton-lang/triton-windows); its newest is 3.8.
WINDOWS_TRITON = {(2, 10): "3.6", (2, 11): "3.6", (2, 12): "3.7", (2, 13): "3.7", (2, 14): "3.8"}

# NVML's nvmlClocksEventReasons that mean trouble; idling and the power cap under load do not.
CLOCK_REASONS = {
    0x08: "hardware slowdown (heat or power)",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake of the power supply",
}


def driver_branch(driver: str) -> int | None:
    """580 for 580.95.05."""
    found = re.match(r"(\d+)\.", driver)
    return int(found[1]) if found else None


def needed_branch(cuda: str | None, capability: tuple[int, int] | None) -> int:
    """The oldest driver branch for a build with this CUDA on this card; 0 where none is stated."""
    runtime = FIRST_DRIVER.get(int(cuda.split(".")[0]), 0) if cuda else 0
    card = BLACKWELL_DRIVER if capability and capability >= BLACKWELL else 0
    return max(runtime, card)


def runs_on(capability: tuple[int, int], arch_list: tuple[str, ...]) -> bool:
    """Whether a build for `arch_list` (sm_90, sm_120a, compute_90) has code for the card.

    Machine code runs on the same major capability from its minor one on, architecture-specific code (sm_90a)
    on that one alone; PTX is translated for everything newer. Source: NVIDIA's Blackwell Compatibility Guide.
    """
    for arch in arch_list:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", arch)
        if not found:
            continue
        built = (int(found[2]), int(found[3]))
        if found[4]:
            runs = built == capability
        elif found[1] == "sm":
            runs = built[0] == capability[0] and built[1] <= capability[1]
        else:
            runs = built <= capability
        if runs:
            return True
    return False


def suggested_build(branch: int | None, capability: tuple[int, int] | None) -> str | None:
    """The build for this driver and card; None where the driver must be renewed first."""
    if branch is None:
        return "cpu"
    old_card = capability is not None and capability < CUDA_13_CAPABILITY
    new_card = capability is not None and capability >= BLACKWELL
    for needed, build in BUILDS:
        if branch < needed or (old_card and build != "cu126") or (new_card and build == "cu126"):
            continue
        return build
    return None
