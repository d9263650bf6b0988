"""Drivers, architectures and builds follow the rules that NVIDIA documents."""

import pytest

from tests.harness.machines import ARCHS_126, ARCHS_130
from vae.checks.cuda_builds import driver_branch, needed_branch, runs_on


@pytest.mark.parametrize(
    ("capability", "arch_list", "runs"),
    [
        ((12, 0), ARCHS_130, True),
        ((12, 0), ARCHS_126, False),  # this wheel does not support the RTX 50
        ((8, 9), ARCHS_126, True),  # sm_86 code runs on 8.9
        ((8, 0), ("sm_86",), False),  # but not on 8.0
        ((9, 0), ("sm_86",), False),  # nor on another major capability
        ((12, 1), ARCHS_130, True),
        ((6, 1), ARCHS_130, False),
        ((6, 1), ARCHS_126, True),
        ((9, 0), ("sm_90a",), True),
        # architecture-specific code runs only on exactly that capability
        ((12, 0), ("sm_90a", "sm_100a"), False),
        ((12, 0), ("sm_90", "compute_90"), True),  # PTX is compiled for newer cards
        ((8, 0), ("compute_90",), False),
        ((12, 0), ("gfx1100",), False),
    ],
)
def test_runs_on(capability, arch_list, runs):
    assert runs_on(capability, arch_list) is runs


@pytest.mark.parametrize(
    ("cuda", "capability", "branch"),
    [
        ("13.2", None, 580),
        ("12.8", (8, 9), 525),  # minor version compatibility
        ("12.8", (12, 0), 570),  # but older drivers do not support the card
        ("13.0", (12, 0), 580),
        (None, (8, 9), 0),
        ("14.0", (8, 9), 0),  # no claim about a CUDA version that is not in the table
    ],
)
def test_needed_branch(cuda, capability, branch):
    assert needed_branch(cuda, capability) == branch


def test_driver_branch():
    assert driver_branch("580.95.05") == 580
    assert driver_branch("[N/A]") is None
