"""A run that diverges ends with its last good checkpoint as the newest; the next start halves the rate."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from tests.harness.faults import KILLED, Fault, injected, run_forked
from tests.harness.steps import before_steps
from tests.harness.training_runs import SHORT, records
from vae.system.errors import EXIT_NON_FINITE, NonFiniteError
from vae.training.checkpoints import load_newest
from vae.training.run import train
from vae.training.stability import NOT_FINITE

# 4 steps per epoch, with a record of each and a checkpoint after each second one. Files are written at once,
# so that it is known which one is the last good one.
RECIPE = {**SHORT, "num_epochs": 5, "checkpoint_steps": 2, "keep_checkpoints": 2, "background_save": False}


@pytest.fixture
def given(tiny) -> dict[str, Any]:
    return {**tiny, **RECIPE}


def newest(folder: Path) -> dict[str, Any]:
    """The content of the checkpoint that --resume_from latest takes."""
    found = load_newest(folder)
    assert found is not None
    return found[1]


def learning_rates(folder: Path) -> dict[int, float]:
    return {record["step"]: record["learning_rate"] for record in records(folder, "train")}


def diverge(given: dict[str, Any], *faults: Fault, match: str = "last good checkpoint") -> str:
    """Train until the run ends as diverged; returns its line."""
    with injected(*faults), pytest.raises(NonFiniteError, match=match) as caught:
        train(given)
    assert caught.value.exit_code == EXIT_NON_FINITE
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- non-finite steps ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_next_start_continues_the_last_good_checkpoint_with_half_the_learning_rate(given, tmp_path):
    """Steps 9 to 13 are not finite: 6 is the last good checkpoint, because an ordinary record follows it."""
    folder, given = tmp_path / "run", {**given, "lr_schedule": "constant", "max_nonfinite_steps": 5}
    line = diverge(given, Fault("nan", "step", nth=9, times=5))
    for words in ("step 13, learning rate 0.0001: 5 steps in a row", "checkpoint_step_6.pt", "latest"):
        assert words in line
    assert {path.name for path in (folder / "abandoned").glob("*.pt")} == {"checkpoint_epoch_2.pt"}
    assert newest(folder)["position"]["step"] == 6
    latest = {**given, "resume_from": "latest", "init_from": "gone.safetensors"}  # as a launcher repeats it
    assert train({**latest, "max_steps": 8}) == 0
    (record,) = records(folder, "divergence")
    assert (record["step"], record["diverged_at"]) == (6, 13)
    assert record["checkpoint"] == "checkpoint_step_6.pt"
    line = diverge({**latest, "max_steps": 90}, Fault("nan", "step", nth=11, times=5))
    for words in ("lower --learning_rate (now 5e-05)", "--max_steps 90", "--num_workers 0"):
        assert words in line
    assert train({**latest, "max_steps": 10}) == 0
    assert train({**latest, "learning_rate": 3e-5}) == 0  # a new attempt
    rates = learning_rates(folder)
    assert list(rates) == list(range(1, 21))
    assert [rates[step] / rates[6] for step in range(7, 11)] == [0.5, 0.5, 0.25, 0.25]
    assert {rates[step] for step in range(11, 21)} == {3e-5}


@pytest.mark.slow
@pytest.mark.usefixtures("computes_fp16")
def test_streak_in_fp16_leaves_fp16_with_the_same_learning_rate(given, tmp_path):
    folder, given = tmp_path / "run", {**given, "mixed_precision": True, "max_nonfinite_steps": 3}
    given |= {"lr_schedule": "constant"}
    assert "continue it without fp16" in diverge(given, Fault("nan", "step", nth=9, times=3))
    assert train({**given, "resume_from": "latest"}) == 0
    assert {rate for step, rate in learning_rates(folder).items() if step >= 4} == {1e-4}
    assert [r["step"] for r in records(folder, "train") if "loss_scale" in r] == [*range(1, 7)]
    content = newest(folder)
    assert (content["fp16"], content["overflows_fp16"]) == (False, True)


@pytest.mark.slow
def test_the_next_stage_begins_with_the_full_learning_rate(tiny, tmp_path):
    given = {**tiny, **RECIPE, "progressive": "32:2:4,16:3:4", "max_nonfinite_steps": 3}
    diverge(given, Fault("nan", "step", nth=5, times=3))
    # Steps 9 to 11 are the first ones of stage 2: the last good checkpoint is within stage 1.
    diverge({**given, "resume_from": "latest"}, Fault("nan", "step", nth=9, times=3))
    assert newest(tmp_path / "run")["position"]["step"] == 6
    assert json.loads((tmp_path / "run" / "diverged.json").read_text())["by_stage"] == {"0": 1, "2": 1}
    assert train({**given, "resume_from": "latest"}) == 0


@pytest.mark.slow
def test_run_without_a_good_checkpoint_has_nothing_to_start_again_from(given, tmp_path):
    given |= {"num_epochs": 10, "max_nonfinite_steps": 10, "warmup_epochs": 0, "learning_rate": 1e3}
    line = diverge(given, match=r"step .*; no checkpoint is good: lower --learning_rate \(now 1000\)")
    assert "--resume_from" not in line
    assert not (tmp_path / "run" / "diverged.json").exists()


def test_nothing_is_saved_or_pruned_while_steps_are_not_finite(given, tmp_path, capsys):
    folder, seen = tmp_path / "run", {}

    def watch(loop, _batch):
        seen[loop.state.position.step] = {p.name: p.stat().st_mtime_ns for p in folder.glob("*.pt")}

    with injected(Fault("nan", "step", nth=9, times=8)), before_steps(watch):
        assert train({**given, "num_epochs": 5}) == 0
    assert set(seen[8]) == {"checkpoint_step_6.pt", "checkpoint_epoch_2.pt"}
    assert all(seen[step] == seen[8] for step in range(9, 17))
    assert "checkpoint_step_10.pt is not saved: the last 2 steps were not finite" in capsys.readouterr().out
    assert set(seen[18]) == {"checkpoint_epoch_2.pt", "checkpoint_step_18.pt"}


@pytest.mark.slow
def test_weights_that_are_not_finite_end_the_run_at_once(given, tmp_path):
    diverge(given, Fault("scale_weights", "step", nth=9, value=math.inf), match=NOT_FINITE)
    (found,) = records(tmp_path / "run", "divergence")
    assert (found["step"], found["diverged_at"]) == (6, 9)
    assert newest(tmp_path / "run")["position"]["step"] == 6


@pytest.mark.slow
def test_run_that_is_killed_while_it_diverges_ends_at_its_good_checkpoint(given, tmp_path):
    """The newest checkpoint was saved when the weights had been damaged already, and is still finite."""
    folder = tmp_path / "run"
    given |= {"checkpoint_steps": 1, "log_freq": 4, "num_epochs": 10}
    # saved after step 9; its record would be that of 12
    damage = Fault("scale_weights", "step", nth=9, value=1e4)
    assert run_forked(given, damage, Fault("kill", "step", nth=10)) == [KILLED]
    assert json.loads((folder / "run.json").read_text())["good_checkpoint"] == "checkpoint_epoch_1.pt"
    assert newest(folder)["position"]["step"] == 9
    diverge({**given, "resume_from": "latest"})
    assert newest(folder)["position"]["step"] == 4
    assert train({**given, "resume_from": "latest"}) == 0


# ---- spikes ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_checkpoint_of_a_jump_is_not_saved_and_not_the_best(given, tmp_path, capsys):
    given |= {"val_split": 0.25, "num_epochs": 12}
    diverge(given, Fault("scale_weights", "step", nth=20, value=3.0), match="jump")
    assert "is not saved: the loss has just jumped" in capsys.readouterr().out
    history = newest(tmp_path / "run")["history"]
    assert (tmp_path / "run" / history["best_checkpoint"]).exists()


# ---- several processes -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="forked processes")
def test_all_processes_end_together_with_one_line(given, tmp_path):
    log, fault = tmp_path / "output.txt", Fault("nan", "step", nth=9, times=4, rank=1)
    given |= {"max_nonfinite_steps": 4, "batch_size": 2, "num_epochs": 8}
    assert EXIT_NON_FINITE in run_forked(given, fault, processes=2, log=log), log.read_text()
    assert log.read_text().count("is the last good checkpoint") == 1
    assert run_forked({**given, "resume_from": "latest"}, processes=2, log=log) == [0, 0], log.read_text()
    rates = learning_rates(tmp_path / "run")
    assert rates[7] < 0.6 * rates[6]
