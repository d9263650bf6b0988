"""Processes that hang, die or are lost: the run is saved and goes on bit for bit, and none waits for ever."""

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from shutil import copytree

import pytest
import torch

from tests.harness.faults import VARIABLE as FAULTS_VARIABLE
from tests.harness.faults import Fault, child_processes, run_forked, start_forked, train_forked
from tests.harness.runs import ROOT, TINY
from tests.harness.sharded_runs import VARIABLE as SAMPLES_VARIABLE
from tests.harness.sharded_runs import samples_in_order, samples_of_steps
from tests.harness.shards import write_shards
from tests.harness.steps import before_steps
from tests.harness.training_runs import assert_same_result, last_checkpoint, records
from tests.harness.waiting import wait_until
from tests.harness.workers import notice_deaths_at_once
from vae.config.flags import command_words
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


def test_stop_signal_acts_while_a_worker_is_stopped(given, undisturbed, tmp_path):
    log = tmp_path / "log"
    (process,) = start_forked(given, Fault("stop_workers", "step", nth=5), log=log)
    last = -1
    while last < 4 or last != steps(tmp_path / "run"):
        assert process.is_alive()
        last = steps(tmp_path / "run")
        time.sleep(0.7)
    os.kill(process.pid, signal.SIGTERM)
    process.join(120)  # the images would take 600 s
    assert process.exitcode == EXIT_SAVED_RESUMABLE, log.read_text()
    assert last_checkpoint(tmp_path / "run")["position"]["step"] == steps(tmp_path / "run") >= 4
    assert train({**given, "resume_from": "latest"}) == 0
    assert_same_result(tmp_path / "run", undisturbed)


def steps(folder: Path) -> int:
    """Number of training records."""
    return len(records(folder, "train")) if (folder / "metrics.jsonl").exists() else 0


@pytest.mark.parametrize(
    ("fault", "stack"),
    [
        (Fault("slow", r"open:val/.*png$", nth=16, value=600), "in validate"),  # the validation of epoch 1
        (Fault("slow", "step", nth=5, value=600), "in watched_step"),
    ],
    ids=["validation", "without_reaction"],
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
    assert ("--data_path" in line) == (fault.point != "step")
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
    """Each of 2 takes 1.8 s, the step more than the 3 s of --hang_minutes 0.05."""
    forward = AutoencoderKL.forward

    def slow_forward(self, images, *rest):
        if torch.is_grad_enabled() and images.device.type != "meta":
            time.sleep(1.8)
        return forward(self, images, *rest)

    monkeypatch.setattr(AutoencoderKL, "forward", slow_forward)
    slow = {**HANG, "micro_batch_size": 1, "num_workers": "0", "max_steps": 1}
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


# ---- processes that are killed or lost ---------------------------------------------------------------------


def start_torchrun(given: dict, log: Path, *words: str, **variables: str) -> subprocess.Popen:
    """Start tests.harness.faulty_train under torchrun with these words."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", *words, "-m", "tests.harness.faulty_train"]
    with log.open("a") as output:
        return subprocess.Popen(
            [*command, *command_words(given)], env=environ | variables, cwd=ROOT, stdout=output, stderr=output
        )


def test_run_continues_after_a_process_ran_out_of_memory(tiny, tmp_path):
    """In the last step of rank 1; then fewer steps are left than would run out of memory again."""
    given = {**tiny, "batch_size": 2, "checkpoint_steps": 1, "resume_from": "latest", "hang_minutes": 0.5}
    fault, log = Fault("fail", "train_pass", nth=6, rank=1), tmp_path / "log"
    words = "--standalone", "--nproc_per_node", "2", "--max_restarts", "2"
    process = start_torchrun(given, log, *words, **{FAULTS_VARIABLE: json.dumps([asdict(fault)])})
    assert process.wait(timeout=200) == 0, log.read_text()[-3000:]
    (line,) = [line for line in log.read_text().splitlines() if "out of memory" in line]
    assert "--micro_batch_size 1" in line
    assert log.read_text().count("limits the plan to --micro_batch_size 1 --recompute none") == 1
    assert last_checkpoint(tmp_path / "run")["position"]["step"] == 6


def test_process_that_loses_another_one_names_it(tiny, tmp_path):
    """Rank 1 is killed within a step; nothing ends rank 0 from outside."""
    fault = Fault("kill", "train_pass", nth=2, rank=1)
    log, given = tmp_path / "log", {**tiny, "batch_size": 2, "hang_minutes": 0.5}
    main, other = start_forked(given, fault, processes=2, log=log)
    for process in (main, other):
        process.join(60)
    assert (main.exitcode, other.exitcode) == (EXIT_FAILED, -signal.SIGKILL)
    said = log.read_text()
    assert "Traceback" not in said
    for token in ("another of the 2 processes", "resume with: python train_vae.py", "--resume_from latest"):
        assert token in said.splitlines()[-1]


def test_process_that_is_alone_does_not_wait_for_ever(tiny, tmp_path):
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "0"}
    given = {**tiny, "hang_minutes": 0.02}
    arguments = (given, (), environ, tmp_path / "log")
    process = multiprocessing.get_context("fork").Process(target=train_forked, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode == EXIT_FAILED
    (line,) = (tmp_path / "log").read_text().splitlines()
    for token in ("the 2 processes", "127.0.0.1:", "0.02 minutes"):
        assert token in line


def start_node(given: dict, port: int, is_first: bool, samples: Path, log: Path) -> subprocess.Popen:
    """Start one of two nodes with a process each, as docs/cluster.md does."""
    words = ["--nnodes", "2", "--nproc_per_node", "1", "--max_restarts", "3"]
    words += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}", "--rdzv_id", "first"]
    # Both have one address here. A node that is lost is noticed after 6 s instead of 15.
    words += ["--rdzv_conf", f"is_host={int(is_first)},keep_alive_interval=2"]
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", SAMPLES_VARIABLE: str(samples)}
    return start_torchrun(given, log, *words, **variables)


def kill_node(process: subprocess.Popen) -> None:
    """Kill torchrun and its processes at once."""
    for pid in (process.pid, *child_processes(process.pid)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def test_lost_node_that_comes_back_continues_with_the_same_samples(tiny, tmp_path):
    dataset, run = write_shards(tmp_path, count=75, shard_bytes=30_000), tmp_path / "run"
    given = {**tiny, "data_path": str(dataset), "num_epochs": 5, "checkpoint_steps": 3, "hang_minutes": 1}
    given |= {"resume_from": "latest", "batch_size": 4}
    del given["val_split"]
    samples, log = tmp_path / "samples.jsonl", tmp_path / "log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = [start_node(given, port, is_first, samples, log) for is_first in (True, False)]
    try:
        wait_until(lambda: list(run.glob("checkpoint_step_*.pt")))
        kill_node(nodes[1])
        nodes[1] = start_node(given, port, False, samples, log)
        codes = [node.wait(timeout=180) for node in nodes]
    finally:
        for node in nodes:
            kill_node(node)
    assert codes == [0, 0], log.read_text()[-3000:]
    assert "another of the 2 processes of this run has ended" in log.read_text()
    assert samples_of_steps(samples, dataset) == samples_in_order(dataset, steps=45, batch=8)
