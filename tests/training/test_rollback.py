"""A run that diverges goes back to its last good checkpoint, once, and never loses it."""

import copy
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.harness.faults import Fault, injected, run_forked
from tests.harness.steps import before_steps
from tests.harness.training_runs import ONE_PROCESS, SHORT, assert_same, loop_of, records
from vae.interop.checkpoint_file import load_checkpoint
from vae.system.errors import EXIT_NON_FINITE, EXIT_SAVED_RESUMABLE, NonFiniteError
from vae.training.checkpoints import store
from vae.training.checkpoints.store import load_newest
from vae.training.command import Command
from vae.training.recovery.rollback import Rollback
from vae.training.recovery.stability import NOT_FINITE
from vae.training.run import train
from vae.training.setup import prepare_run
from vae.training.state import snapshot

FOREVER = 10_000
# 4 steps per epoch, with a record of each and a checkpoint after each second one. Files are written at once,
# so that it is known which one is the last good one.
RECIPE = {**SHORT, "num_epochs": 5, "checkpoint_steps": 2, "keep_checkpoints": 2, "background_save": False}


@pytest.fixture
def given(tiny) -> dict[str, Any]:
    return {**tiny, **RECIPE}


def newest(folder: Path) -> dict[str, Any]:
    """The content of the checkpoint that --resume_from latest takes; loading checks that it is finite."""
    found = load_newest(folder)
    assert found is not None
    return found[1]


def learning_rates(folder: Path) -> dict[int, float]:
    return {record["step"]: record["learning_rate"] for record in records(folder, "train")}


# ---- non-finite steps ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_streak_goes_back_to_the_last_good_checkpoint_with_half_the_learning_rate(given, tmp_path, capsys):
    """Steps 9 to 13 are not finite: 6 is the last good checkpoint, because an ordinary record follows it."""
    folder = tmp_path / "run"
    assert train({**given, "output_dir": str(tmp_path / "other"), "lr_schedule": "constant"}) == 0
    with injected(Fault("nan", "step", nth=9, times=5)):
        assert train({**given, "max_nonfinite_steps": 5, "lr_schedule": "constant"}) == 0
    (rollback,) = records(folder, "rollback")
    assert (rollback["step"], rollback["diverged_at"]) == (6, 13)
    assert rollback["checkpoint"] == "checkpoint_step_6.pt"
    assert "5 steps in a row" in rollback["reason"]
    assert "WARNING: step 13, learning rate 0.0001: 5 steps in a row" in capsys.readouterr().out
    found, expected = learning_rates(folder), learning_rates(tmp_path / "other")
    assert list(found) == list(range(1, 21))
    assert all(found[step] == expected[step] * (0.5 if step > 6 else 1) for step in found)
    content = newest(folder)
    assert content["rollbacks"] == {0: [0.5]}
    assert content["position"]["step"] == 20
    assert content["run"]["restarts"] == 1
    assert [record["step"] for record in records(folder, "run")] == [0, 6]


@pytest.mark.slow
@pytest.mark.usefixtures("computes_fp16")
def test_streak_in_fp16_goes_back_and_leaves_fp16_with_the_same_learning_rate(given, tmp_path):
    """The next streak is a rollback, and a resumed run does not return to fp16."""
    folder, given = tmp_path / "run", {**given, "mixed_precision": True, "max_nonfinite_steps": 3}
    first, second = (Fault("nan", "step", nth=nth, times=3) for nth in (9, 13))
    with injected(first, second):
        assert train({**given, "lr_schedule": "constant", "max_steps": 18}) == 0
    assert [(r["step"], r["diverged_at"]) for r in records(folder, "rollback")] == [(6, 11), (10, 15)]
    rates = learning_rates(folder)
    assert [rates[step] / rates[6] for step in (10, 11, 18)] == [1, 0.5, 0.5]
    assert [r["step"] for r in records(folder, "train") if "loss_scale" in r] == [*range(1, 7)]
    assert train({"output_dir": str(folder), "resume_from": "latest", "max_steps": 20}) == 0
    content = newest(folder)
    assert (content["fp16"], content["overflows_fp16"], len(content["rollbacks"][0])) == (False, True, 1)


@pytest.mark.slow
def test_second_divergence_of_a_stage_stops_with_a_good_checkpoint_as_latest(given, tmp_path):
    """The next stage has a rollback of its own."""
    folder = tmp_path / "run"
    given |= {"max_nonfinite_steps": 3}
    faults = Fault("nan", "step", nth=9, times=3), Fault("nan", "step", nth=14, times=FOREVER)
    with injected(*faults), pytest.raises(NonFiniteError) as caught:
        train(given)
    assert caught.value.exit_code == EXIT_NON_FINITE
    message = str(caught.value)
    for token in ("--rollbacks 1", "--learning_rate (now 0.0001)", "checkpoint_epoch_3.pt", "latest"):
        assert token in message
    assert "\n" not in message
    content = newest(folder)
    assert (content["position"]["step"], len(content["rollbacks"][0])) == (12, 1)
    third = Fault("nan", "step", nth=15, times=3)
    with injected(third), pytest.raises(NonFiniteError, match="--rollbacks 1"):
        train({**given, "resume_from": "latest"})
    fewer = {"learning_rate": 3e-5}  # a new learning rate, and a rollback for it
    with injected(third):
        assert train({**given, **fewer, "resume_from": "latest"}) == 0
    assert len(newest(folder)["rollbacks"][0]) == 1


@pytest.mark.slow
def test_next_stage_begins_with_its_own_rollback_and_the_full_learning_rate(tiny, tmp_path):
    given = {**tiny, **RECIPE, "progressive": "32:2:4,16:3:4", "max_nonfinite_steps": 3}
    with injected(Fault("nan", "step", nth=5, times=3), Fault("nan", "step", nth=9, times=3)):
        assert train(given) == 0
    first, second = records(tmp_path / "run", "rollback")
    # Steps 9 to 11 are the first ones of stage 2: the last good checkpoint is within stage 1.
    assert [(r["step"], r["diverged_at"]) for r in (first, second)] == [(2, 7), (6, 11)]
    assert newest(tmp_path / "run")["rollbacks"].keys() == {0, 2}


@pytest.mark.slow
def test_run_that_diverges_by_its_learning_rate_stops_and_can_be_resumed(given, tmp_path):
    given |= {"num_epochs": 10, "max_nonfinite_steps": 10}
    options = {"warmup_epochs": 0, "learning_rate": 1e3}
    with pytest.raises(NonFiniteError, match=r"step .*--learning_rate"):
        train({**given, **options})
    assert newest(tmp_path / "run")["position"]["step"] == 0
    with pytest.raises(NonFiniteError):
        train({**given, **options, "resume_from": "latest"})
    assert train({**given, "resume_from": "latest", "learning_rate": 1e-4, "max_steps": 4}) == 0


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
def test_stop_signal_among_skipped_steps_saves_and_prunes_nothing(given, tmp_path):
    """The weights are those before the skipped steps, so nothing that was learned is lost."""
    folder = tmp_path / "run"
    faults = Fault("nan", "step", nth=9, times=3), Fault("signal", "step", nth=11, value=signal.SIGTERM)
    with injected(*faults):
        assert train({**given, "output_dir": str(folder)}) == EXIT_SAVED_RESUMABLE
    saved = {path.name: load_checkpoint(path) for path in folder.glob("*.pt")}
    assert set(saved) == {"checkpoint_step_6.pt", "checkpoint_epoch_2.pt", "checkpoint_step_11.pt"}
    assert_same(
        *(saved[name]["model"] for name in ("checkpoint_step_11.pt", "checkpoint_epoch_2.pt")), "model"
    )
    assert float(saved["checkpoint_step_11.pt"]["update"]["nonfinite_streak"]) == 3
    assert train({**given, "resume_from": "latest"}) == 0


@pytest.mark.slow
def test_weights_that_are_not_finite_go_back_at_once(given, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(
        store, "load_checkpoint", lambda path: read.append(path.name) or load_checkpoint(path)
    )
    with injected(Fault("scale_weights", "step", nth=9, value=math.inf)):
        assert train(given) == 0
    (found,) = records(tmp_path / "run", "rollback")
    assert (found["step"], found["diverged_at"]) == (6, 9)
    assert found["reason"] == NOT_FINITE
    assert read == ["checkpoint_step_6.pt"]  # once: what was verified is what is restored
    newest(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="the killed process is a fork")
def test_run_that_is_killed_while_it_diverges_resumes_and_goes_back(given, tmp_path):
    """The newest checkpoint was saved when the weights had been damaged already, and is still finite."""
    folder = tmp_path / "run"
    given |= {"checkpoint_steps": 1, "log_freq": 4, "num_epochs": 10}
    # saved after step 9; its record would be that of 12
    damage = Fault("scale_weights", "step", nth=9, value=1e4)
    assert run_forked(given, damage, Fault("kill", "step", nth=10)) == [-9]
    assert json.loads((folder / "run.json").read_text())["good_checkpoint"] == "checkpoint_epoch_1.pt"
    assert newest(folder)["position"]["step"] == 9
    assert train({**given, "resume_from": "latest"}) == 0
    (rollback,) = records(folder, "rollback")
    assert rollback["step"] == 4
    assert newest(folder)["position"]["step"] == 40


# ---- spikes ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_checkpoint_of_a_jump_is_not_saved_and_not_the_best(given, tmp_path, capsys):
    given |= {"val_split": 0.25, "num_epochs": 12, "rollbacks": 0}
    with (
        injected(Fault("scale_weights", "step", nth=20, value=3.0)),
        pytest.raises(NonFiniteError, match="jump"),
    ):
        train(given)
    assert "is not saved: the loss has just jumped" in capsys.readouterr().out
    history = newest(tmp_path / "run")["history"]
    assert (tmp_path / "run" / history["best_checkpoint"]).exists()


# ---- several processes -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="forked processes")
def test_all_processes_go_back_together(given, tmp_path):
    log, fault = tmp_path / "output.txt", Fault("nan", "step", nth=9, times=4, rank=1)
    given |= {"max_nonfinite_steps": 4, "batch_size": 2, "num_epochs": 8}
    assert run_forked(given, fault, processes=2, log=log) == [0, 0], log.read_text()
    (rollback,) = records(tmp_path / "run", "rollback")
    assert rollback["step"] == 6
    assert log.read_text().count("training goes back to step 6") == 1
    assert len(newest(tmp_path / "run")["rollbacks"][0]) == 1


# ---- what a rollback restores ----------------------------------------------------------------------------


def test_rollback_restores_everything_that_training_changed(given):
    """With the parts of a run: three steps, a save, a step that is undone."""
    given |= {"adversarial_weight": 0.5, "disc_start": 1, "disc_channels": 8, "disc_layers": 1}
    run = prepare_run(Command(given), ONE_PROCESS)
    loop, state = loop_of(run), run.state

    def content() -> dict[str, Any]:
        keys = ("model", "ema", "discriminator", "position", "running_sq_norms", "history", "update")
        found = copy.deepcopy(snapshot(state))
        return {key: found[key] for key in keys} | {"moments": [o["state"] for o in found["optimizers"]]}

    with loop.recorder, run.loader(loop.stepper.schedule, loop.alive) as loader:
        *batches, last = loader.batches(0)
        for batch in batches:
            loop.take_step(batch)
        loop.saver.save("checkpoint_step_3.pt", required=True)
        loop.stability.good, saved = run.output_dir / "checkpoint_step_3.pt", content()
        loop.take_step(last)
    assert content()["position"] != saved["position"]
    Rollback(run.config, loop.saver, loop.logbook).go_back("a test", loop.stepper.schedule.peak)
    assert_same(content(), saved, "state")
    assert len(state.rollbacks[0]) == 1
    assert newest(run.output_dir)["rollbacks"] == state.rollbacks  # a resumed run knows of it
