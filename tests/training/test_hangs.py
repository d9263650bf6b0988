"""Decoding processes that die or hang, and runs without progress: nothing is lost, no run waits for ever."""

import os
import re
import signal
import time
from pathlib import Path
from shutil import copytree

import pytest
import torch

from tests.harness.faults import Fault, run_forked, start_forked
from tests.harness.runs import TINY
from tests.harness.steps import before_steps
from tests.harness.training_runs import assert_same_result, last_checkpoint, records
from tests.harness.waiting import wait_until
from tests.harness.workers import notice_deaths_at_once
from vae.model.autoencoder import AutoencoderKL
from vae.system.errors import EXIT_FAILED, EXIT_SAVED_RESUMABLE, EXIT_WORKER
from vae.training import liveness
from vae.training.liveness import LoadingStoppedError
from vae.training.run import train

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name == "nt", reason="processes are forks")]
# 16 steps of 2 images; a worker has decoded at most two batches when it is killed or stopped.
RECIPE = {"batch_size": 2, "num_epochs": 2, "log_freq": 1, "num_workers": "2", "prefetch_factor": 1}
RECIPE |= {"max_val_images": 4}
HANG = {"hang_minutes": 0.05}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    """The forked processes inherit these."""
    notice_deaths_at_once(monkeypatch)
    monkeypatch.setattr(liveness, "LOADING_SECONDS", 0.3)


@pytest.fixture(scope="module")
def undisturbed(image_folder, other_images, tmp_path_factory) -> Path:
    """A finished run; the validation images are in `val` beside it."""
    folder = tmp_path_factory.mktemp("hangs")
    copytree(other_images, folder / "val")
    torch.set_num_threads(1)
    given = {**TINY, **RECIPE, "data_path": str(image_folder), "val_path": str(folder / "val")}
    assert train({**given, "output_dir": str(folder / "run")}) == 0
    return folder / "run"


@pytest.fixture
def given(tiny, undisturbed) -> dict:
    return {**tiny, **RECIPE, "val_path": str(undisturbed.with_name("val"))}


def test_a_killed_worker_saves_and_exits_with_79(given, undisturbed, tmp_path):
    assert run_forked(given, Fault("kill_workers", "step", nth=5), log=tmp_path / "log") == [EXIT_WORKER]
    printed = (tmp_path / "log").read_text()
    assert "Traceback" not in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("train_vae.py:")]
    for token in ("SIGKILL", "--num_workers", "--resume_from latest"):
        assert token in line
    assert 4 <= last_checkpoint(tmp_path / "run")["position"]["step"] < 16
    assert train({**given, "resume_from": "latest"}) == 0
    assert_same_result(tmp_path / "run", undisturbed)


@pytest.mark.parametrize(
    ("workers", "fault"),
    [
        ("2", Fault("stop_workers", "step", nth=5)),
        ("0", Fault("slow", r"open:val/.*png$", nth=16, value=600)),  # after epoch 1
    ],
    ids=["stopped_worker", "validation"],
)
def test_stop_signal_acts_while_images_do_not_arrive(given, undisturbed, tmp_path, workers, fault):
    log = tmp_path / "log"
    (process,) = start_forked({**given, "num_workers": workers}, fault, log=log)
    last = -1
    while last < 4 or last != steps(tmp_path / "run"):
        assert process.is_alive()
        last = steps(tmp_path / "run")
        time.sleep(0.7)
    os.kill(process.pid, signal.SIGTERM)
    process.join(120)  # the images would take 600 s
    assert process.exitcode == EXIT_SAVED_RESUMABLE, log.read_text()
    assert last_checkpoint(tmp_path / "run")["position"]["step"] == steps(tmp_path / "run") >= 4
    if workers == "2":
        assert train({**given, "resume_from": "latest"}) == 0
        assert_same_result(tmp_path / "run", undisturbed)


def steps(folder: Path) -> int:
    """Number of training records."""
    return len(records(folder, "train")) if (folder / "metrics.jsonl").exists() else 0


@pytest.mark.parametrize(
    ("fault", "stack"),
    [
        (Fault("stop_workers", "step", nth=5), "in take_step|in _next"),
        (Fault("slow", r"open:val/.*png$", nth=16, value=600), "in validate"),  # the validation of epoch 1
        (Fault("slow", "step", nth=5, value=600), "in watched_step"),
    ],
    ids=["loading", "validation", "without_reaction"],
)
def test_hang_writes_stacks_saves_and_exits(given, undisturbed, tmp_path, fault, stack):
    started = time.monotonic()
    assert run_forked({**given, **HANG}, fault, log=tmp_path / "log") == [EXIT_FAILED]
    assert time.monotonic() - started < 300  # the fault lasts 600 s
    printed = (tmp_path / "log").read_text()
    assert "Traceback" not in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("train_vae.py:")]
    for token in ("--hang_minutes 0.05", "--resume_from latest"):
        assert token in line
    assert ("--data_path" in line) == (fault.point != "step" or fault.action == "stop_workers")
    assert re.search(stack, printed)
    assert last_checkpoint(tmp_path / "run")["position"]["step"] >= 4
    if stack == "in validate":
        assert train({**given, "resume_from": "latest"}) == 0
        assert_same_result(tmp_path / "run", undisturbed)


def test_hang_within_the_change_of_the_weights_saves_nothing(given, tmp_path):
    fault = Fault("slow", "update", nth=2, value=600)
    assert run_forked({**given, **HANG}, fault, log=tmp_path / "log") == [EXIT_FAILED]
    assert "nothing new is saved" in (tmp_path / "log").read_text()
    assert list((tmp_path / "run").glob("*.pt")) == []


def test_stop_signal_in_a_hanging_last_validation_exports_when_resumed(given, tmp_path):
    def hang_at_the_end(loop, _batch):
        def hangs():
            raise LoadingStoppedError

        loop.validate_final = hangs

    with before_steps(hang_at_the_end):
        assert train({**given, "max_steps": 2}) == EXIT_SAVED_RESUMABLE
    assert last_checkpoint(tmp_path / "run")["position"]["step"] == 2
    assert train({**given, "max_steps": 2, "resume_from": "latest"}) == 0
    assert (tmp_path / "run" / "vae" / "config.json").exists()


def test_a_micro_batch_is_progress(given, monkeypatch):
    """Each of 2 takes 3.5 s, the step more than the 6 s of --hang_minutes 0.1."""
    forward = AutoencoderKL.forward

    def slow_forward(self, images, *rest):
        if torch.is_grad_enabled() and images.device.type != "meta":
            time.sleep(3.5)
        return forward(self, images, *rest)

    monkeypatch.setattr(AutoencoderKL, "forward", slow_forward)
    slow = {"hang_minutes": 0.1, "micro_batch_size": 1, "num_workers": "0", "max_steps": 1}
    assert train({**given, **slow}) == 0


def test_progress_is_no_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(liveness, "CHECK_SECONDS", 0.05)
    ends = []
    monkeypatch.setattr(liveness.Watchdog, "_exit", lambda self: (ends.append(self), self.end()))
    with liveness.Watchdog(1 / 60, "") as watched:
        for _ in range(30):
            watched.beat()
            time.sleep(0.05)
        assert not ends
        wait_until(lambda: ends)
