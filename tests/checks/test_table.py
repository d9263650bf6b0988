"""The checks on whole machines and on machines with one fault, and their report."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from tests.harness.machines import (
    ARCHS_126,
    DESKTOP,
    NO_CARD,
    RTX_5090,
    WINDOWS,
    WITHOUT_TORCH,
    changed,
    folder,
    statuses,
    verdict,
)
from vae.checks.facts import TIME_LIMIT, Card, Requirement, Smi
from vae.checks.report import GROUPS, SCHEMA_VERSION, as_json, as_text, exit_code
from vae.checks.table import (
    CHECKPOINT_BYTES,
    DEFAULT_PARAMETERS,
    FAIL,
    PASS,
    SKIP,
    WARN,
    judge,
    synced_by,
    workers,
)
from vae.config.options import Config
from vae.data.workers import resolve_num_workers
from vae.model.autoencoder import AutoencoderKL
from vae.system.host import GIB

MACHINES = [DESKTOP, WINDOWS, NO_CARD, WITHOUT_TORCH]
SETUP_130 = "./setup.sh --torch cu130"
PYTHON = "/home/me/vae/.venv/bin/python"
REINSTALL = f"{PYTHON} -m pip install --force-reinstall torch torchvision --index-url https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize("facts", [DESKTOP, WINDOWS], ids=["linux", "windows"])
def test_good_machine_passes_without_remedies(facts):
    assert statuses(facts, FAIL) == statuses(facts, WARN) == set()
    assert exit_code(judge(facts), strict=True) == 0
    assert not any(result.remedy for result in judge(facts))


@pytest.mark.parametrize("facts", MACHINES)
def test_every_machine_gets_the_same_checks_from_pure_functions(facts):
    before, results = asdict(facts), judge(facts)
    assert results == judge(facts)
    assert asdict(facts) == before
    ids = [result.id for result in results]
    assert ids == [result.id for result in judge(DESKTOP)]
    assert len(set(ids)) == len(ids)
    assert list(dict.fromkeys(result.group for result in results)) == list(GROUPS)
    for result in results:
        if result.status in (FAIL, WARN):
            assert result.found, result.id
            assert result.expected, result.id


def test_missing_card_is_only_a_warning():
    assert (statuses(NO_CARD, WARN), statuses(NO_CARD, FAIL)) == ({"card.present"}, set())
    assert exit_code(judge(NO_CARD), strict=False) == 0
    assert exit_code(judge(NO_CARD), strict=True) == 3


# --- one fault: the check, its status, and texts in its finding or remedy, in DESKTOP with changes


def devices(*names_and_capabilities) -> dict:
    return {"loaded": {"devices": tuple(Card(n, c, 11 * 1024) for n, c in names_and_capabilities)}}


def package(*row) -> dict:
    return {"requirements": (*DESKTOP.requirements[:2], Requirement(*row))}


def runs(**values) -> dict:
    return {"folders": (folder("--output_dir", "/data/runs", **values), DESKTOP.folders[1])}


def images(**values) -> dict:
    there = folder("--data_path", "./data/train", **values)
    return {"folders": (DESKTOP.folders[0], there)}


NO_DEVICES = {"loaded": {"devices": ()}}
OLD_DRIVER = {"smi": {"driver": "572.16"}}
CPU_BUILD = {"torch_files": {"version": "2.14.0+cpu", "cuda": None, "vision_version": "0.29.0+cpu"}}
BUILD_126 = {"torch_files": {"version": "2.14.0+cu126", "cuda": "12.6"}, "loaded": {"arch_list": ARCHS_126}}
HANGING, MISMATCH = Smi("hanging", "no answer in 15 s"), Smi("failed", "Driver/library version mismatch")
RTX_4090 = {
    "smi": {"driver": "535.183.01", "cards": (replace(RTX_5090, capability=(8, 9)),)},
    **devices(("NVIDIA GeForce RTX 4090", (8, 9))),
}
NO_IMAGE = "RuntimeError: CUDA error: no kernel image is available for execution on the device"

TWO_CARDS = devices(("NVIDIA GeForce RTX 5090", (12, 0)), ("NVIDIA GeForce GTX 1080", (6, 1)))
SLOW = {"loaded": {"unfinished": "loading torch", "ended": TIME_LIMIT}}
CRASH = {"loaded": {"unfinished": "loading torch", "ended": "signal 4"}}
HIDDEN = {**NO_DEVICES, "host": {"visible_devices": "-1"}}

FAULTS = [
    # Python and packages
    ("software.packages", FAIL, package("Pillow", ">=13", "12.1.0"), "Pillow 12.1.0", "./setup.sh"),
    ("software.packages", FAIL, package("Pillow", ">=13", None), "Pillow is missing"),
    ("software.packages", WARN, package("simplejpeg", ">=1.8", None), "slower"),  # all works without it
    # the build of PyTorch
    ("torch.loads", FAIL, {"loaded": {"error": "OSError: libcudart.so"}}, "libcudart", "--force-reinstall"),
    ("torch.loads", FAIL, CRASH, "signal 4"),
    ("torch.loads", FAIL, {"loaded": {"unfinished": "starting Python", "ended": "time limit"}}, "time limit"),
    ("torch.loads", FAIL, SLOW, "end other programs and check again; if"),
    ("torch.pair", FAIL, {"torch_files": {"version": "2.9.1+cu130"}}, "--force-reinstall"),
    ("torch.pair", FAIL, {"torch_files": {"version": "2.14.0+cpu"}}, "two different builds", REINSTALL),
    ("torch.pair", FAIL, {"torch_files": {"vision_version": None}}, "not installed"),
    ("torch.pair", FAIL, {"loaded": {"vision_error": "operator torchvision::nms"}}, "torchvision::nms"),
    ("torch.pair", FAIL, {"loaded": {"vision_error": "a: HF_HOME is a"}}, "set HF_HOME to a folder"),
    # the general index lists both versions without a build
    ("torch.pair", PASS, {"torch_files": {"version": "2.14.0", "vision_version": "0.29.0"}}),
    ("torch.build", FAIL, {**CPU_BUILD, **NO_DEVICES}, "no CUDA", SETUP_130),
    ("torch.build", PASS, {**CPU_BUILD, **NO_DEVICES, "smi": Smi("missing")}),
    ("torch.build", FAIL, BUILD_126, "RTX 5090 (sm_120)", SETUP_130),
    ("torch.build", FAIL, {**BUILD_126, **OLD_DRIVER}, "./setup.sh --torch cu128"),
    # CUDA does not start: from nvidia-smi
    ("torch.build", FAIL, {"loaded": {"devices": (), "arch_list": ARCHS_126}}, "sm_120"),
    ("torch.build", WARN, TWO_CARDS, "export CUDA_VISIBLE_DEVICES=0"),
    ("torch.triton", WARN, {"torch_files": {"triton_version": None}}, f"{PYTHON} -m pip install triton"),
    ("torch.triton", SKIP, {"torch_files": {"cuda": None, "triton_version": None}}),
    ("torch.compiler", WARN, {"host": {"c_compiler": None}}, "sudo apt install gcc g++"),
    # cards and driver
    ("card.driver", FAIL, OLD_DRIVER, "install driver 580", "./setup.sh --torch cu128"),
    ("card.driver", FAIL, {**OLD_DRIVER, "host": {"wsl": True}}, "in Windows"),
    # CUDA 12.8 runs on a driver of CUDA 12.2 if that driver supports the card
    ("card.driver", PASS, {**RTX_4090, "torch_files": {"cuda": "12.8"}}),
    ("card.present", FAIL, {**NO_DEVICES, "smi": HANGING}, "no answer", "restart"),
    ("card.present", FAIL, {**NO_DEVICES, "smi": MISMATCH}, "mismatch"),
    ("card.present", WARN, {**NO_DEVICES, "smi": Smi("missing"), "host": {"system": "Darwin"}}, "MPS"),
    ("card.present", WARN, {"smi": MISMATCH}),  # PyTorch can use the card in spite of that
    ("card.present", PASS, {"smi": Smi("missing")}, "its state is unknown"),
    ("card.usable", FAIL, {"loaded": {"devices": (), "cuda_message": "unknown"}}, "unknown", "restart"),
    ("card.usable", FAIL, {**NO_DEVICES, **OLD_DRIVER}, "install driver 580"),  # one remedy, not two
    ("card.usable", WARN, HIDDEN, "unset CUDA_VISIBLE_DEVICES"),
    ("card.computes", FAIL, {"loaded": {"compute_error": NO_IMAGE}}, SETUP_130),
    # in a container without nvidia-smi: never the CPU build if PyTorch finds a card
    ("card.computes", FAIL, {"loaded": {"compute_error": NO_IMAGE}, "smi": Smi("missing")}, SETUP_130),
    ("card.computes", FAIL, {"loaded": {"compute_error": "CUDA out of memory."}}, "nvidia-smi"),
    ("card.computes", FAIL, {"loaded": {"unfinished": "computing", "ended": "signal 11"}}, "signal 11"),
    ("card.computes", SKIP, {"loaded": {"unfinished": "loading torch", "ended": "signal 11"}}, "not reached"),
    # system
    ("system.memory", WARN, {"host": {"memory_free": 6 * GIB}}, "--num_workers 1"),
    ("system.memory", FAIL, {"host": {"memory_free": GIB}}),
    # Docker's default is smaller than the prefetched default batches of 12 decoding processes
    ("system.shm", FAIL, {"host": {"shared_memory": 64 * 2**20}}, "--shm-size=3g"),
    ("system.shm", WARN, {"host": {"shared_memory": GIB}}),
    ("system.shm", FAIL, {"host": {"shared_memory": None}}, "missing"),
    ("system.shm", SKIP, {"host": {"system": "Darwin"}}),
    # folders
    ("disk.runs", FAIL, runs(problem="Permission denied"), "Permission denied"),
    ("disk.runs", WARN, runs(file_system="nfs4"), "nfs4"),
    ("disk.runs", WARN, runs(nearest="/Users/me/Dropbox (Work)/runs"), "uploads every file"),
    ("disk.images", SKIP, images(exists=False, given=False)),
    ("disk.images", FAIL, images(exists=False, given=True), "does not exist"),  # the flag was given
    ("disk.space", WARN, runs(free=3 * CHECKPOINT_BYTES)),
    ("disk.space", FAIL, runs(free=CHECKPOINT_BYTES)),
    ("disk.space", SKIP, runs(free=None)),
    ("disk.vgg", WARN, {"vgg_sha256": "00"}, "damaged"),  # training without LPIPS does not need them
    ("disk.vgg", WARN, {"vgg_sha256": None}, "not downloaded"),
    ("disk.vgg", WARN, {"vgg_path": "~/.cache/torch/hub/checkpoints/vgg16-397923af.pth"}, "no home folder"),
]


@pytest.mark.parametrize(("check", "status", "changes", "texts"), [(*row[:3], row[3:]) for row in FAULTS])
def test_fault(check, status, changes, texts):
    result = verdict(changed(DESKTOP, **changes), check)
    assert result.status == status
    for text in texts:
        assert text in f"{result.found}\n{result.remedy}"
    assert bool(result.remedy) == (status in (WARN, FAIL))


WINDOWS_FAULTS = [
    (
        "torch.loads",
        FAIL,
        {"loaded": {"error": "OSError: [WinError 126] x. Error loading shm.dll or one of its dependencies."}},
        "setup_windows.bat",
    ),
    ("torch.triton", WARN, {"torch_files": {"triton_version": None}}, 'install "triton-windows==3.8.*"'),
    ("torch.triton", WARN, {"torch_files": {"version": "2.15.0+cu130"}}, "setup_windows.bat --torch cu130"),
    ("torch.compiler", SKIP, {"host": {"c_compiler": None}}),
]


@pytest.mark.parametrize(
    ("check", "status", "changes", "texts"), [(*row[:3], row[3:]) for row in WINDOWS_FAULTS]
)
def test_fault_on_windows(check, status, changes, texts):
    result = verdict(changed(WINDOWS, **changes), check)
    assert result.status == status
    assert all(text in result.remedy for text in texts)


# --- faults that concern several checks, or what a check expects


def test_expected_driver_states_its_reasons():
    old = verdict(changed(DESKTOP, **OLD_DRIVER), "card.driver")
    assert old.expected == "580 or newer: CUDA 13.0 needs 580, RTX 50 and B200 need 570"
    for_card = changed(DESKTOP, smi={"driver": "550.54.14"}, torch_files={"cuda": "12.8"})
    assert verdict(for_card, "card.driver").expected.startswith("570 or newer")
    assert "--torch" not in verdict(for_card, "card.driver").remedy  # no build helps


def test_crash_fails_a_check():
    for unfinished in (
        "starting Python",
        "loading torch",
        "loading torchvision",
        "looking for cards",
        "computing",
    ):
        part = {"unfinished": unfinished, "ended": "killed by signal 11", "devices": ()}
        assert statuses(changed(DESKTOP, loaded=part), FAIL), unfinished
        assert statuses(changed(NO_CARD, loaded=part), FAIL), unfinished


# --- requirements of the trainer


def test_default_parameters_match_the_model():
    with torch.device("meta"):
        model = AutoencoderKL(Config().model)
    assert sum(p.numel() for p in model.parameters()) == DEFAULT_PARAMETERS


@pytest.mark.parametrize("platform", ["Linux", "Windows"])
def test_workers_match_num_workers_auto(monkeypatch, platform):
    monkeypatch.setattr("vae.data.workers.sys.platform", "win32" if platform == "Windows" else "linux")
    for cores in (1, 3, 64):
        monkeypatch.setattr("vae.data.workers.usable_cores", lambda cores=cores: cores)
        facts = changed(DESKTOP, host={"cores_usable": cores, "system": platform})
        assert workers(facts) == resolve_num_workers("auto")


@pytest.mark.parametrize(
    ("path", "windows", "service"),
    [
        ("C:\\Users\\me\\OneDrive - Firma GmbH\\vae", True, "OneDrive - Firma GmbH"),
        ("C:\\vae", True, None),
        ("/home/me/GoogleDrive/vae", False, "GoogleDrive"),
        ("/home/me/dropboxes/vae", False, None),
        ("/Users/me/Library/Mobile Documents/com~apple~CloudDocs", False, "Mobile Documents"),
    ],
)
def test_synced_folders(path, windows, service):
    assert synced_by(path, windows=windows) == service


@pytest.mark.parametrize("facts", [DESKTOP, NO_CARD, WITHOUT_TORCH])
def test_every_check_and_group_is_in_the_text(facts):
    checks = judge(facts)
    text = as_text(checks)
    for group in GROUPS.values():
        assert f"\n{group}\n" in text
    for check in checks:
        assert check.title in text
        if check.status not in ("pass", "skip"):
            assert check.remedy in text  # on one line, to be copied
    assert text.isascii()


def test_json():
    checks = judge(NO_CARD)
    content = json.loads(as_json(NO_CARD, checks, exit_code(checks, strict=True)))
    assert content["schema_version"] == SCHEMA_VERSION == 2
    assert (content["ok"], content["exit_code"]) == (True, 3)
    assert [check["id"] for check in content["checks"]] == [check.id for check in checks]
    assert set(content["checks"][0]) == {"id", "group", "title", "status", "found", "expected", "remedy"}
    assert content["environment"]["torch_files"]["version"] == "2.14.0+cu130"
