"""System, memory and disks: the requirements match the trainer's settings, and each fault is found."""

import pytest
import torch

from tests.harness.machines import DESKTOP, changed, folder, statuses, verdict
from vae.checks.facts import WeightsFile, WindowsFacts
from vae.checks.judge.host import (
    CHECKPOINT_BYTES,
    DEFAULT_PARAMETERS,
    VGG_BYTES,
    batch_bytes,
    max_page_file_bytes,
    synced_by,
    workers,
)
from vae.checks.results import FAIL, PASS, SKIP, WARN
from vae.config.options import Config
from vae.data.workers import resolve_num_workers
from vae.model.autoencoder import AutoencoderKL
from vae.system.host import GIB


def test_default_parameters_match_the_model():
    with torch.device("meta"):
        model = AutoencoderKL(Config().model)
    assert sum(p.numel() for p in model.parameters()) == DEFAULT_PARAMETERS


@pytest.mark.parametrize("system", ["Linux", "Windows"])
@pytest.mark.parametrize("cores", [1, 2, 3, 6, 14, 64])
def test_workers_match_num_workers_auto(monkeypatch, cores, system):
    monkeypatch.setattr("vae.data.workers.usable_cores", lambda: cores)
    monkeypatch.setattr("vae.data.workers.sys.platform", "win32" if system == "Windows" else "linux")
    facts = changed(DESKTOP, host={"cores_usable": cores, "system": system})
    assert workers(facts) == resolve_num_workers("auto")


def test_batch_bytes():
    assert batch_bytes() == Config().run.batch_size * 3 * Config().data.image_size ** 2
    assert batch_bytes("standard") == 16 * 3 * 1024 * 1024


def test_shared_memory_of_docker_is_too_small():
    """Docker's default of 64 MiB is smaller than the prefetched default batches of 12 decoding processes."""
    check = verdict(changed(DESKTOP, host={"shared_memory": 64 * 2**20}), "system.shm")
    assert check.status == FAIL
    assert "--shm-size=3g" in check.remedy
    assert verdict(changed(DESKTOP, host={"shared_memory": GIB}), "system.shm").status == WARN
    assert verdict(changed(DESKTOP, host={"shared_memory": None}), "system.shm").status == FAIL
    assert verdict(changed(DESKTOP, host={"system": "Darwin"}), "system.shm").status == SKIP


def test_memory_respects_the_container_limit():
    assert verdict(DESKTOP, "system.memory").status == PASS
    assert verdict(changed(DESKTOP, host={"memory_limit": 6 * GIB}), "system.memory").status == WARN
    assert verdict(changed(DESKTOP, host={"memory_free": GIB}), "system.memory").status == FAIL


def test_container_with_too_few_cores():
    limited = changed(DESKTOP, host={"cores_usable": 2})
    assert verdict(limited, "system.cores").status == WARN
    assert "docker" in verdict(limited, "system.cores").remedy


def test_wsl():
    assert verdict(changed(DESKTOP, host={"wsl": 2}), "system.os").status == PASS
    assert verdict(changed(DESKTOP, host={"wsl": 1}), "system.os").status == WARN


@pytest.mark.parametrize(
    ("lines", "limit"),
    [
        (("?:\\pagefile.sys",), None),  # Windows manages drive and size
        (("C:\\pagefile.sys 0 0",), None),
        (("C:\\pagefile.sys",), None),
        (("C:\\pagefile.sys 1024 4096",), 4 * GIB),
        (("C:\\pagefile.sys 1024 4096", "D:\\pagefile.sys 1024 2048"), 6 * GIB),
        (("C:\\pagefile.sys 1024 4096", "D:\\pagefile.sys 0 0"), None),
        ((), 0),
        (("",), 0),
    ],
)
def test_page_file_size_from_the_registry(lines, limit):
    assert max_page_file_bytes(lines) == limit


@pytest.mark.parametrize(
    ("windows", "page_file", "long_paths"),
    [
        (None, SKIP, SKIP),
        (WindowsFacts(True, ("?:\\pagefile.sys",)), PASS, PASS),
        (WindowsFacts(False, ()), WARN, WARN),
        (WindowsFacts(None, ("C:\\pagefile.sys 400 800",)), WARN, WARN),
        (WindowsFacts(True, ("C:\\pagefile.sys 65536 65536",)), PASS, PASS),
        (WindowsFacts(True, None), SKIP, PASS),
    ],
)
def test_windows_settings(windows, page_file, long_paths):
    facts = changed(DESKTOP, host={"windows": windows})
    assert verdict(facts, "system.page_file").status == page_file
    assert verdict(facts, "system.long_paths").status == long_paths


def test_remedy_for_short_paths_is_a_reg_command():
    facts = changed(DESKTOP, host={"windows": WindowsFacts(long_paths=False)})
    assert "reg add HKLM\\SYSTEM\\CurrentControlSet\\Control\\FileSystem /v LongPathsEnabled" in (
        verdict(facts, "system.long_paths").remedy
    )


def with_runs(**changed_folder):
    """DESKTOP with changed facts about the folder of the runs."""
    runs = folder("the runs", "--output_dir", "/data/runs", **changed_folder)
    return changed(DESKTOP, folders=(runs, *DESKTOP.folders[1:]))


@pytest.mark.parametrize(
    ("free", "status"),
    [(500 * GIB, PASS), (3 * CHECKPOINT_BYTES, WARN), (CHECKPOINT_BYTES, FAIL), (0, FAIL), (None, SKIP)],
)
def test_space_for_checkpoints(free, status):
    assert verdict(with_runs(free=free), "disk.space").status == status


def test_folder_with_problem_on_network_or_synced():
    assert verdict(with_runs(problem="Permission denied"), "disk.runs").status == FAIL
    assert verdict(with_runs(file_system="nfs4"), "disk.runs").status == WARN
    assert verdict(with_runs(file_system="network"), "disk.runs").status == WARN
    assert verdict(with_runs(file_system="ext4"), "disk.runs").status == PASS
    assert verdict(with_runs(nearest="/Users/me/Dropbox (Work)/runs"), "disk.runs").status == WARN


def test_missing_images_fail_only_if_the_flag_is_given():
    for given, status in ((False, SKIP), (True, FAIL)):
        images = folder("the images", "--data_path", "./data/train", exists=False, given=given)
        facts = changed(DESKTOP, folders=(DESKTOP.folders[0], images, DESKTOP.folders[2]))
        assert verdict(facts, "disk.images").status == status


@pytest.mark.parametrize(
    ("path", "windows", "service"),
    [
        ("C:\\Users\\me\\OneDrive - Firma GmbH\\vae", True, "OneDrive - Firma GmbH"),
        ("C:\\Users\\me\\OneDrive\\vae", True, "OneDrive"),
        ("C:\\vae", True, None),
        ("/home/me/Dropbox/vae", False, "Dropbox"),
        ("/home/me/GoogleDrive/vae", False, "GoogleDrive"),
        ("/home/me/dropboxes/vae", False, None),
        ("/Users/me/Library/Mobile Documents/com~apple~CloudDocs", False, "Mobile Documents"),
    ],
)
def test_synced_folders(path, windows, service):
    assert synced_by(path, windows=windows) == service


def test_weights_of_lpips_missing_or_incomplete():
    for size, status in ((VGG_BYTES, PASS), (1000, WARN), (None, WARN)):
        facts = changed(DESKTOP, vgg=WeightsFile("/c/vgg16-397923af.pth", size))
        assert verdict(facts, "disk.vgg").status == status
        assert "disk.vgg" not in statuses(facts, FAIL)  # training without LPIPS does not need them
