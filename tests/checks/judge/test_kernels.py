"""Test computations: wrong results, errors and crashes are found and have the right remedy."""

from dataclasses import replace

import pytest

from tests.harness.machines import DESKTOP, NO_CARD, changed, statuses, verdict
from vae.checks.facts import KernelRun, Smi
from vae.checks.results import FAIL, SKIP, WARN


def kernels_with(name: str, **part) -> tuple[KernelRun, ...]:
    """The kernels of DESKTOP with one of them changed."""
    return tuple(replace(k, **part) if k.name == name else k for k in DESKTOP.loaded.kernels)


def test_wrong_result_fails():
    facts = changed(DESKTOP, loaded={"kernels": kernels_with("conv", difference=0.5)})
    assert statuses(facts, FAIL) == {"kernels.conv"}
    assert "wrong results" in verdict(facts, "kernels.conv").found
    infinite = changed(DESKTOP, loaded={"kernels": kernels_with("conv", difference=float("inf"))})
    assert statuses(infinite, FAIL) == {"kernels.conv"}


def test_error_has_its_remedy():
    error = "RuntimeError: CUDA error: no kernel image is available for execution on the device"
    facts = changed(DESKTOP, loaded={"kernels": kernels_with("conv", error=error)})
    assert verdict(facts, "kernels.conv").remedy == "./setup.sh --torch cu130"
    # In a container without nvidia-smi: never the CPU build if PyTorch finds a card.
    facts = replace(facts, smi=Smi("missing"))
    assert verdict(facts, "kernels.conv").remedy == "./setup.sh --torch cu130"
    error = "OutOfMemoryError: CUDA out of memory."
    facts = changed(DESKTOP, loaded={"kernels": kernels_with("step", error=error)})
    assert "nvidia-smi" in verdict(facts, "kernels.step").remedy


def test_compile_error_is_a_warning():
    kernels = kernels_with("compile", error="RuntimeError: no C compiler found")
    facts = changed(DESKTOP, loaded={"kernels": kernels})
    assert statuses(facts, WARN) == {"kernels.compile"}
    assert statuses(facts, FAIL) == set()


def test_broken_triton_kernel_is_a_warning_because_training_replaces_it():
    error = "RuntimeError: normalize (bf16) differs from its PyTorch reference by 2.0e+00"
    facts = changed(DESKTOP, loaded={"kernels": kernels_with("triton", error=error)})
    assert statuses(facts, WARN) == {"kernels.triton"}
    assert statuses(facts, FAIL) == set()
    assert "training replaces them" in verdict(facts, "kernels.triton").found


def test_triton_kernel_that_crashes_the_process_fails():
    part = {"kernels": DESKTOP.loaded.kernels[:3], "unfinished": "kernel triton", "ended": "killed by 11"}
    facts = changed(DESKTOP, loaded=part)
    assert statuses(facts, FAIL) == {"kernels.triton"}
    assert "--kernels torch" in verdict(facts, "kernels.triton").remedy


def test_triton_kernels_are_skipped_without_a_card():
    kernels = tuple(run for run in DESKTOP.loaded.kernels if run.name != "triton")
    assert "kernels.triton" in statuses(changed(NO_CARD, loaded={"kernels": kernels}), SKIP)


def test_kernel_that_crashed_the_process_fails():
    part = {
        "kernels": DESKTOP.loaded.kernels[:2],
        "unfinished": "kernel channels_last",
        "ended": "killed by signal 11",
    }
    facts = changed(DESKTOP, loaded=part)
    assert statuses(facts, FAIL) == {"kernels.channels_last"}
    assert {"kernels.attention", "kernels.step", "kernels.compile"} <= statuses(facts, SKIP)


@pytest.mark.parametrize(
    "unfinished",
    ["starting Python", "loading torch", "loading torchvision", "looking for cards", "loading the model"],
)
def test_crash_before_any_kernel_fails_a_check(unfinished):
    part = {"kernels": (), "unfinished": unfinished, "ended": "killed by signal 11", "devices": ()}
    assert statuses(changed(DESKTOP, loaded=part), FAIL)
    assert statuses(changed(NO_CARD, loaded=part), FAIL)


def test_model_code_that_cannot_be_imported():
    part = {"kernels": (replace(DESKTOP.loaded.kernels[0], name="import", error="ImportError: numpy"),)}
    assert "kernels.step" in statuses(changed(DESKTOP, loaded=part), FAIL)
