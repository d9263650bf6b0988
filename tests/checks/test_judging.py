"""The judgements over whole machines: what is well is judged well, each fault is found by its check."""

from dataclasses import asdict, replace

import pytest

from tests.harness.machines import (
    ARCHS_126,
    DESKTOP,
    GTX_1080,
    NO_CARD,
    RTX_5090,
    WITHOUT_TORCH,
    changed,
    statuses,
    verdict,
)
from vae.checks.facts import CudaDevice, Requirement, Smi, WindowsFacts
from vae.checks.judge.all_checks import GROUPS, judge
from vae.checks.results import FAIL, PASS, SKIP, WARN, exit_code

WINDOWS = changed(
    DESKTOP,
    host={
        "system": "Windows",
        "release": "11",
        "shared_memory": None,
        "windows": WindowsFacts(long_paths=True, page_files=("?:\\pagefile.sys",)),
    },
    python={"executable": "C:\\Users\\Jörg B\\vae\\.venv\\Scripts\\python.exe"},
    torch_files={"triton_name": "triton-windows", "triton_wanted": None, "triton_version": "3.8.0.post26"},
)


@pytest.mark.parametrize("facts", [DESKTOP, WINDOWS], ids=["linux", "windows"])
def test_a_good_machine_has_nothing_to_mend(facts):
    assert statuses(facts, FAIL) == statuses(facts, WARN) == set()
    assert exit_code(judge(facts), strict=True) == 0
    assert not any(check.mend for check in judge(facts))


@pytest.mark.parametrize("facts", [DESKTOP, WINDOWS, NO_CARD, WITHOUT_TORCH])
def test_every_machine_gets_the_same_checks(facts):
    ids = [check.id for check in judge(facts)]
    assert ids == [check.id for check in judge(DESKTOP)]
    assert len(set(ids)) == len(ids)
    assert {check.group for check in judge(facts)} == set(GROUPS)


@pytest.mark.parametrize("facts", [DESKTOP, WINDOWS, NO_CARD, WITHOUT_TORCH])
def test_judging_changes_no_fact_and_depends_on_nothing_else(facts):
    before = asdict(facts)
    assert judge(facts) == judge(facts)
    assert asdict(facts) == before


def test_what_fails_or_warns_says_what_it_expected():
    for facts in (NO_CARD, WITHOUT_TORCH, changed(DESKTOP, smi={"driver": "550.54.14"})):
        for check in judge(facts):
            if check.status in (FAIL, WARN):
                assert check.expected, check.id
                assert check.found, check.id


# --- PyTorch ----------------------------------------------------------------------------------------------


def test_without_torch_the_first_thing_to_do_is_the_set_up():
    checks = judge(WITHOUT_TORCH)
    assert checks[0].id == "torch.loads"
    assert (checks[0].status, checks[0].mend) == (FAIL, "./setup.sh")
    windows = changed(WINDOWS, torch_files=WITHOUT_TORCH.torch_files)
    assert verdict(replace(windows, loaded=None), "torch.loads").mend == "setup_windows.bat"
    kernels = [check for check in checks if check.group == "kernels"]
    assert {check.status for check in kernels} == {SKIP}


def test_an_environment_that_was_not_entered_is_pointed_out():
    facts = changed(WITHOUT_TORCH, python={"project_python": ".venv/bin/python"})
    assert ".venv/bin/python check_compatibility.py" in verdict(facts, "torch.loads").found


def test_cpu_torch_with_cuda_torchvision():
    facts = changed(
        DESKTOP,
        torch_files={"version": "2.14.0+cpu", "cuda": None},
        loaded={"vision_error": "RuntimeError: operator torchvision::nms does not exist"},
    )
    pair = verdict(facts, "torch.pair")
    assert pair.status == FAIL
    assert "two different builds" in pair.found
    assert "nms does not exist" in pair.found
    assert pair.mend.startswith(
        "/home/me/vae/.venv/bin/python -m pip install --force-reinstall torch torchvision"
    )
    assert pair.mend.endswith("--index-url https://download.pytorch.org/whl/cpu")


def test_pair_of_other_versions():
    older = changed(DESKTOP, torch_files={"vision_version": "0.28.0+cu130", "vision_wants_torch": "==2.13.0"})
    assert "made for another torch" in verdict(older, "torch.pair").found
    none = changed(DESKTOP, torch_files={"vision_version": None})
    assert verdict(none, "torch.pair").status == FAIL
    # the general index gives versions without a build for both
    plain = changed(DESKTOP, torch_files={"version": "2.14.0", "vision_version": "0.29.0"})
    assert verdict(plain, "torch.pair").status == PASS


def test_torch_too_old_or_excluded():
    for version, status in (("2.9.1+cu128", FAIL), ("2.13.0+cpu", FAIL), ("2.13.0+cu130", PASS)):
        assert verdict(changed(DESKTOP, torch_files={"version": version}), "torch.version").status == status


def test_cpu_build_beside_a_card():
    facts = changed(
        DESKTOP, torch_files={"version": "2.14.0+cpu", "cuda": None, "vision_version": "0.29.0+cpu"}
    )
    facts = changed(facts, loaded={"devices": (), "cuda_available": False, "arch_list": ()})
    build = verdict(facts, "torch.build")
    assert (build.status, build.mend) == (FAIL, "./setup.sh --torch cu130")
    assert "no CUDA" in build.found
    assert verdict(changed(facts, smi=Smi("missing")), "torch.build").status == PASS


def test_wheel_without_the_cards_architecture():
    facts = changed(
        DESKTOP,
        torch_files={"version": "2.14.0+cu126", "cuda": "12.6"},
        loaded={"arch_list": ARCHS_126},
    )
    check = verdict(facts, "torch.architectures")
    assert check.status == FAIL
    assert check.expected == "sm_120"
    assert "RTX 5090 (sm_120)" in check.found
    assert check.mend == "./setup.sh --torch cu130"
    older_driver = changed(facts, smi={"driver": "572.16"})
    assert verdict(older_driver, "torch.architectures").mend == "./setup.sh --torch cu128"


def test_architecture_is_known_from_nvidia_smi_where_cuda_does_not_start():
    facts = changed(DESKTOP, loaded={"devices": (), "arch_list": ARCHS_126})
    assert verdict(facts, "torch.architectures").status == FAIL


def test_an_old_second_card_is_left_out():
    devices = (*DESKTOP.loaded.devices, CudaDevice("NVIDIA GeForce GTX 1080", (6, 1), 8 * 2**30))
    facts = changed(DESKTOP, loaded={"devices": devices}, smi={"cards": (RTX_5090, GTX_1080)})
    check = verdict(facts, "torch.architectures")
    assert (check.status, check.mend) == (WARN, "export CUDA_VISIBLE_DEVICES=0")


@pytest.mark.parametrize(
    ("part", "status", "words"),
    [
        ({"error": "OSError: libcudart.so.13: cannot open shared object file"}, FAIL, "libcudart"),
        ({"unfinished": "loading torch", "ended": "killed by signal 4"}, FAIL, "signal 4"),
        ({"unfinished": "loading torch", "ended": "it did not end in time"}, FAIL, "in time"),
    ],
)
def test_torch_that_does_not_load(part, status, words):
    check = verdict(changed(DESKTOP, loaded={**part, "kernels": ()}), "torch.loads")
    assert check.status == status
    assert words in check.found
    assert "--force-reinstall" in check.mend


def test_triton_pair():
    other = changed(DESKTOP, torch_files={"triton_version": "3.7.1"})
    check = verdict(other, "torch.triton")
    assert check.status == WARN  # training runs without it
    assert check.mend == "/home/me/vae/.venv/bin/python -m pip install 'triton~=3.8.0'"
    assert verdict(changed(DESKTOP, torch_files={"triton_version": None}), "torch.triton").status == WARN
    cpu = changed(DESKTOP, torch_files={"cuda": None, "triton_version": None})
    assert verdict(cpu, "torch.triton").status == SKIP


def test_triton_on_windows():
    missing = changed(WINDOWS, torch_files={"triton_version": None})
    mend = '"C:\\Users\\Jörg B\\vae\\.venv\\Scripts\\python.exe" -m pip install "triton-windows==3.8.*"'
    assert verdict(missing, "torch.triton").mend == mend
    too_new = changed(WINDOWS, torch_files={"version": "2.15.0+cu130"})
    check = verdict(too_new, "torch.triton")
    assert (check.status, check.mend) == (WARN, "setup_windows.bat --torch cu128")
    assert "without torch.compile" in check.found


def test_no_compiler():
    facts = changed(DESKTOP, host={"c_compiler": None})
    assert verdict(facts, "torch.compiler").mend == "sudo apt install gcc g++"
    assert verdict(changed(WINDOWS, host={"c_compiler": None}), "torch.compiler").status == SKIP


# --- cards ------------------------------------------------------------------------------------------------


def test_no_card_is_a_warning():
    assert statuses(NO_CARD, WARN) == {"card.present"}
    assert statuses(NO_CARD, FAIL) == set()
    assert exit_code(judge(NO_CARD), strict=False) == 0
    assert exit_code(judge(NO_CARD), strict=True) == 3


def test_driver_older_than_the_runtime():
    facts = changed(DESKTOP, smi={"driver": "572.16"})
    check = verdict(facts, "card.driver")
    assert check.status == FAIL
    assert check.expected == "580 or newer: CUDA 13.0 needs 580, RTX 50 and B200 570"
    assert "install driver 580" in check.mend
    assert "./setup.sh --torch cu128" in check.mend  # the other way out


def test_driver_that_does_not_know_the_card():
    facts = changed(DESKTOP, smi={"driver": "550.54.14"}, torch_files={"cuda": "12.8"})
    check = verdict(facts, "card.driver")
    assert check.expected.startswith("570 or newer")
    assert "--torch" not in check.mend  # no build helps


def test_minor_version_compatibility_is_no_fault():
    """CUDA 12.8 runs on a driver of CUDA 12.2 on a card that driver knows."""
    devices = (CudaDevice("NVIDIA GeForce RTX 4090", (8, 9), 24 * 2**30),)
    facts = changed(
        DESKTOP,
        smi={"driver": "535.183.01", "cards": (replace(RTX_5090, capability=(8, 9)),)},
        torch_files={"cuda": "12.8"},
        loaded={"devices": devices},
    )
    assert verdict(facts, "card.driver").status == PASS


def test_driver_in_wsl_is_renewed_in_windows():
    facts = changed(DESKTOP, smi={"driver": "572.16"}, host={"wsl": 2})
    assert "in Windows" in verdict(facts, "card.driver").mend


def test_hanging_and_failing_nvidia_smi():
    blind = changed(DESKTOP, loaded={"devices": ()})
    hanging = changed(blind, smi=Smi("hanging", "no answer in 15 s"))
    assert verdict(hanging, "card.present").status == FAIL
    assert "restart" in verdict(hanging, "card.present").mend
    quick = replace(hanging, quick=True)
    assert verdict(quick, "card.present").status == WARN  # a sleeping card may need longer
    failed = Smi("failed", "Failed to initialize NVML: Driver/library version mismatch")
    assert verdict(changed(blind, smi=failed), "card.present").status == FAIL
    # PyTorch computes on it all the same
    assert verdict(changed(DESKTOP, smi=failed), "card.present").status == WARN


def test_card_without_nvidia_smi():
    facts = changed(DESKTOP, smi=Smi("missing"))
    assert verdict(facts, "card.present").status == PASS
    assert verdict(facts, "card.usable").status == PASS
    assert verdict(facts, "card.pcie").status == SKIP
    assert statuses(facts, FAIL) == set()


def test_card_that_pytorch_does_not_see():
    message = "RuntimeError: CUDA unknown error"
    facts = changed(DESKTOP, loaded={"devices": (), "cuda_message": message})
    check = verdict(facts, "card.usable")
    assert (check.status, check.found) == (FAIL, message)
    assert "restart" in check.mend
    old = changed(facts, smi={"driver": "572.16"})
    assert verdict(old, "card.usable").mend == verdict(old, "card.driver").mend  # one thing to do, not two
    hidden = changed(facts, host={"variables": {"CUDA_VISIBLE_DEVICES": ""}})
    assert verdict(hidden, "card.usable").status == WARN
    assert verdict(hidden, "card.visible").mend == "unset CUDA_VISIBLE_DEVICES"
    assert (
        verdict(changed(DESKTOP, host={"variables": {"CUDA_VISIBLE_DEVICES": "0"}}), "card.visible").status
        == PASS
    )


def test_several_different_cards():
    facts = changed(DESKTOP, smi={"cards": (RTX_5090, GTX_1080)}, loaded={"devices": ()})
    check = verdict(facts, "card.same")
    assert check.status == WARN
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in check.mend
    equal = changed(DESKTOP, smi={"cards": (RTX_5090, replace(RTX_5090, index=1))}, loaded={"devices": ()})
    assert verdict(equal, "card.same").status == PASS


def test_memory_taken_by_others():
    taken = changed(DESKTOP, smi={"cards": (replace(RTX_5090, memory_used_mib=28000),)})
    check = verdict(taken, "card.memory")
    assert check.status == WARN
    assert check.found == "27.3 of 31.8 GiB taken by others"


def test_narrow_pcie_and_slowed_clocks():
    narrow = changed(DESKTOP, smi={"cards": (replace(RTX_5090, pcie_width=4),)})
    assert verdict(narrow, "card.pcie").status == WARN
    for reasons, status in ((0x0, PASS), (0x1, PASS), (0x4, PASS), (0x20, WARN), (0x48, WARN), (0x80, WARN)):
        card = replace(RTX_5090, clock_reasons=reasons)
        assert verdict(changed(DESKTOP, smi={"cards": (card,)}), "card.clocks").status == status, reasons


def test_one_bad_card_of_two_is_named():
    cards = (RTX_5090, replace(RTX_5090, index=1, pcie_width=8))
    check = verdict(changed(DESKTOP, smi={"cards": cards}), "card.pcie")
    assert check.status == WARN
    assert "1: x8 of x16" in check.found


def test_values_a_card_does_not_tell_are_skipped():
    card = replace(RTX_5090, power_limit=None, clock_reasons=None, temperature_c=None, memory_used_mib=None)
    facts = changed(DESKTOP, smi={"cards": (card,)})
    assert {"card.power", "card.clocks", "card.temperature", "card.memory"} <= statuses(facts, SKIP)


def test_card_before_bf16():
    devices = (CudaDevice("NVIDIA GeForce RTX 2080 Ti", (7, 5), 11 * 2**30),)
    check = verdict(changed(DESKTOP, loaded={"devices": devices}), "card.bf16")
    assert check.status == WARN
    assert "fp16" in check.mend


# --- kernels ----------------------------------------------------------------------------------------------


def kernel(name: str, **part):
    return tuple(replace(k, **part) if k.name == name else k for k in DESKTOP.loaded.kernels)


def test_a_wrong_result_fails():
    facts = changed(DESKTOP, loaded={"kernels": kernel("conv", difference=0.5)})
    assert statuses(facts, FAIL) == {"kernels.conv"}
    assert "wrong results" in verdict(facts, "kernels.conv").found
    nan = changed(DESKTOP, loaded={"kernels": kernel("conv", difference=float("inf"))})
    assert statuses(nan, FAIL) == {"kernels.conv"}


def test_an_error_has_the_line_that_mends_it():
    error = "RuntimeError: CUDA error: no kernel image is available for execution on the device"
    facts = changed(DESKTOP, loaded={"kernels": kernel("conv", error=error)})
    assert verdict(facts, "kernels.conv").mend == "./setup.sh --torch cu130"
    # In a container without nvidia-smi: never the CPU's build, where a card is seen.
    facts = replace(facts, smi=Smi("missing"))
    assert verdict(facts, "kernels.conv").mend == "./setup.sh --torch cu130"
    error = "OutOfMemoryError: CUDA out of memory."
    facts = changed(DESKTOP, loaded={"kernels": kernel("step", error=error)})
    assert "nvidia-smi" in verdict(facts, "kernels.step").mend


def test_compile_is_not_needed():
    facts = changed(DESKTOP, loaded={"kernels": kernel("compile", error="RuntimeError: no C compiler found")})
    assert statuses(facts, WARN) == {"kernels.compile"}
    assert statuses(facts, FAIL) == set()


def test_the_kernel_that_ended_the_process_is_named():
    ran = DESKTOP.loaded.kernels[:2]
    part = {"kernels": ran, "unfinished": "kernel channels_last", "ended": "killed by signal 11"}
    facts = changed(DESKTOP, loaded=part)
    assert statuses(facts, FAIL) == {"kernels.channels_last"}
    assert {"kernels.attention", "kernels.step", "kernels.compile"} <= statuses(facts, SKIP)


def test_a_process_that_ended_before_any_kernel_fails_somewhere():
    for unfinished in (
        "starting Python",
        "loading torch",
        "loading torchvision",
        "looking for cards",
        "loading the model",
    ):
        part = {"kernels": (), "unfinished": unfinished, "ended": "killed by signal 11", "devices": ()}
        assert statuses(changed(DESKTOP, loaded=part), FAIL), unfinished
        assert statuses(changed(NO_CARD, loaded=part), FAIL), unfinished


def test_model_code_that_does_not_load():
    part = {"kernels": (replace(DESKTOP.loaded.kernels[0], name="import", error="ImportError: numpy"),)}
    assert "kernels.step" in statuses(changed(DESKTOP, loaded=part), FAIL)


# --- packages ---------------------------------------------------------------------------------------------


def test_packages():
    old = Requirement("Pillow", ">=13", "12.1.0")
    check = verdict(changed(DESKTOP, requirements=(*DESKTOP.requirements[:2], old)), "software.pillow")
    assert check.status == FAIL
    assert check.mend == "/home/me/vae/.venv/bin/python -m pip install 'Pillow>=13'"
    missing = Requirement("simplejpeg", ">=1.8", None)
    check = verdict(
        changed(DESKTOP, requirements=(*DESKTOP.requirements[:2], missing)), "software.simplejpeg"
    )
    assert check.status == WARN  # all works without it


def test_python():
    assert verdict(changed(DESKTOP, python={"version": (3, 9, 18)}), "software.python").status == FAIL
    assert verdict(changed(DESKTOP, python={"bits": 32}), "software.python").status == FAIL


def test_file_names_that_are_not_utf8():
    facts = changed(DESKTOP, python={"file_name_encoding": "ascii", "text_encoding": "ANSI_X3.4-1968"})
    check = verdict(facts, "software.encoding")
    assert (check.status, check.mend) == (WARN, "export PYTHONUTF8=1")
    windows = changed(WINDOWS, python={"text_encoding": "cp1252"})
    assert verdict(windows, "software.encoding").status == PASS
