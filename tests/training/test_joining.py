"""Several processes join, also after torchrun has started them again; a process never waits for ever."""

import multiprocessing
import os
import signal

import pytest

from tests.harness.faults import Fault, start_faulty, start_forked, train_forked
from tests.harness.training_runs import last_checkpoint
from vae.system.errors import EXIT_FAILED

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name == "nt", reason="processes are forks")]


def test_run_continues_after_torchrun_has_started_it_again(tiny, tmp_path):
    """Rank 1 is killed, then the processes resume. One store of torchrun serves all starts."""
    given = {**tiny, "batch_size": 2, "checkpoint_steps": 1, "resume_from": "latest", "hang_minutes": 0.5}
    fault = Fault("kill", "train_pass", nth=8, rank=1)
    process = start_faulty(given, fault)
    _out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err[-3000:]
    assert "cannot join" not in err
    assert last_checkpoint(tmp_path / "run")["position"]["step"] == 6


def test_run_continues_after_a_process_ran_out_of_memory(tiny, tmp_path):
    """In the last step of rank 1; then fewer steps are left than would run out of memory again."""
    given = {**tiny, "batch_size": 2, "checkpoint_steps": 1, "resume_from": "latest", "hang_minutes": 0.5}
    process = start_faulty(given, Fault("fail", "train_pass", nth=6, rank=1))
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err[-3000:]
    (line,) = [line for line in err.splitlines() if "out of memory" in line]
    assert "out of memory in process 1: all processes end, and use --micro_batch_size 1" in line
    assert out.count("limits the plan to --micro_batch_size 1 --recompute none") == 1
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
