"""Cards and their driver: each fault is found and has the right remedy."""

from dataclasses import replace

import pytest

from tests.harness.machines import DESKTOP, GTX_1080, NO_CARD, RTX_5090, changed, statuses, verdict
from vae.checks.facts import CudaDevice, Smi
from vae.checks.judge.all_checks import judge
from vae.checks.results import FAIL, PASS, SKIP, WARN, exit_code


def test_missing_card_is_a_warning():
    assert statuses(NO_CARD, WARN) == {"card.present"}
    assert statuses(NO_CARD, FAIL) == set()
    assert exit_code(judge(NO_CARD), strict=False) == 0
    assert exit_code(judge(NO_CARD), strict=True) == 3


def test_driver_too_old_for_the_cuda_build():
    facts = changed(DESKTOP, smi={"driver": "572.16"})
    check = verdict(facts, "card.driver")
    assert check.status == FAIL
    assert check.expected == "580 or newer: CUDA 13.0 needs 580, RTX 50 and B200 need 570"
    assert "install driver 580" in check.remedy
    assert "./setup.sh --torch cu128" in check.remedy  # the alternative


def test_driver_too_old_for_the_card():
    facts = changed(DESKTOP, smi={"driver": "550.54.14"}, torch_files={"cuda": "12.8"})
    check = verdict(facts, "card.driver")
    assert check.expected.startswith("570 or newer")
    assert "--torch" not in check.remedy  # no build helps


def test_minor_version_compatibility_passes():
    """CUDA 12.8 runs on a driver of CUDA 12.2 if that driver supports the card."""
    devices = (CudaDevice("NVIDIA GeForce RTX 4090", (8, 9), 24 * 2**30),)
    facts = changed(
        DESKTOP,
        smi={"driver": "535.183.01", "cards": (replace(RTX_5090, capability=(8, 9)),)},
        torch_files={"cuda": "12.8"},
        loaded={"devices": devices},
    )
    assert verdict(facts, "card.driver").status == PASS


def test_driver_of_wsl_is_updated_in_windows():
    facts = changed(DESKTOP, smi={"driver": "572.16"}, host={"wsl": 2})
    assert "in Windows" in verdict(facts, "card.driver").remedy


def test_nvidia_smi_hangs_or_fails():
    without_devices = changed(DESKTOP, loaded={"devices": ()})
    hanging = changed(without_devices, smi=Smi("hanging", "no answer in 15 s"))
    assert verdict(hanging, "card.present").status == FAIL
    assert "restart" in verdict(hanging, "card.present").remedy
    quick = replace(hanging, quick=True)
    assert verdict(quick, "card.present").status == WARN  # a sleeping card may need longer
    failed = Smi("failed", "Failed to initialize NVML: Driver/library version mismatch")
    assert verdict(changed(without_devices, smi=failed), "card.present").status == FAIL
    # PyTorch can use the card in spite of that
    assert verdict(changed(DESKTOP, smi=failed), "card.present").status == WARN


def test_card_without_nvidia_smi():
    facts = changed(DESKTOP, smi=Smi("missing"))
    assert verdict(facts, "card.present").status == PASS
    assert verdict(facts, "card.usable").status == PASS
    assert verdict(facts, "card.pcie").status == SKIP
    assert statuses(facts, FAIL) == set()


def test_card_that_pytorch_cannot_use():
    message = "RuntimeError: CUDA unknown error"
    facts = changed(DESKTOP, loaded={"devices": (), "cuda_message": message})
    check = verdict(facts, "card.usable")
    assert (check.status, check.found) == (FAIL, message)
    assert "restart" in check.remedy
    old = changed(facts, smi={"driver": "572.16"})
    assert verdict(old, "card.usable").remedy == verdict(old, "card.driver").remedy  # one remedy, not two


@pytest.mark.parametrize(("value", "status"), [("", WARN), ("-1", WARN), ("0", PASS)])
def test_cuda_visible_devices(value, status):
    facts = changed(DESKTOP, loaded={"devices": ()}, host={"variables": {"CUDA_VISIBLE_DEVICES": value}})
    check = verdict(facts, "card.visible")
    assert check.status == status
    if status == WARN:
        assert check.remedy == "unset CUDA_VISIBLE_DEVICES"
        assert verdict(facts, "card.usable").status == WARN


def test_several_different_cards():
    facts = changed(DESKTOP, smi={"cards": (RTX_5090, GTX_1080)}, loaded={"devices": ()})
    check = verdict(facts, "card.same")
    assert check.status == WARN
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in check.remedy
    equal = changed(DESKTOP, smi={"cards": (RTX_5090, replace(RTX_5090, index=1))}, loaded={"devices": ()})
    assert verdict(equal, "card.same").status == PASS


def test_memory_used_by_other_programs():
    used = changed(DESKTOP, smi={"cards": (replace(RTX_5090, memory_used_mib=28000),)})
    check = verdict(used, "card.memory")
    assert check.status == WARN
    assert "27.3 of 31.8 GiB" in check.found


@pytest.mark.parametrize(
    ("host", "status", "shown"),
    [
        ({"system": "Windows", "release": "11"}, PASS, "Windows"),
        ({"release": "5.15.153.1-microsoft-standard-WSL2"}, PASS, "WSL"),
        ({"variables": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}}, WARN, "max_split_size_mb:64"),
        ({"variables": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}}, WARN, "the driver refuses"),
    ],
)
def test_memory_segments_that_do_not_grow(host, status, shown):
    check = verdict(changed(DESKTOP, loaded={"growing_segments": False}, host=host), "card.segments")
    assert check.status == status
    assert shown in check.found
    assert bool(check.remedy) == (status == WARN)
    assert verdict(DESKTOP, "card.segments").status == PASS
    assert verdict(NO_CARD, "card.segments").status == SKIP


def test_missing_pcie_lanes():
    narrow = changed(DESKTOP, smi={"cards": (replace(RTX_5090, pcie_width=4),)})
    assert verdict(narrow, "card.pcie").status == WARN


@pytest.mark.parametrize(
    ("reasons", "status"), [(0x0, PASS), (0x1, PASS), (0x4, PASS), (0x20, WARN), (0x48, WARN), (0x80, WARN)]
)
def test_reduced_clocks(reasons, status):
    card = replace(RTX_5090, clock_reasons=reasons)
    assert verdict(changed(DESKTOP, smi={"cards": (card,)}), "card.clocks").status == status


def test_finding_contains_the_number_of_the_bad_card():
    cards = (RTX_5090, replace(RTX_5090, index=1, pcie_width=8))
    check = verdict(changed(DESKTOP, smi={"cards": cards}), "card.pcie")
    assert check.status == WARN
    assert "1: x8 of x16" in check.found


def test_values_that_a_card_does_not_report_are_skipped():
    card = replace(RTX_5090, power_limit_w=None, clock_reasons=None, temperature_c=None, memory_used_mib=None)
    facts = changed(DESKTOP, smi={"cards": (card,)})
    assert {"card.power", "card.clocks", "card.temperature", "card.memory"} <= statuses(facts, SKIP)


def test_card_without_bf16():
    devices = (CudaDevice("NVIDIA GeForce RTX 2080 Ti", (7, 5), 11 * 2**30),)
    check = verdict(changed(DESKTOP, loaded={"devices": devices}), "card.bf16")
    assert check.status == WARN
    assert "fp16" in check.remedy
