"""--train_minutes chooses the number of epochs from measured steps, and changes nothing else."""

import json
import signal
from pathlib import Path

import pytest

from tests.harness.faults import Fault, injected
from tests.harness.training_runs import (
    assert_same,
    last_checkpoint,
    reproducible_records,
    train_on_two_processes,
)
from vae.config.resolve import PER_COMMAND
from vae.training.run import train
from vae.training.stages import StageSteps
from vae.training.trials import stage_length
from vae.training.trials.stage_length import MAX_EPOCHS, MIN_STEPS, epochs_for

FOUR_MINUTES = 240.0
# Every part of the state: EMA, discriminator from the first step, fp32. 12 training images: 3 steps an epoch.
EVERY_PART = {
    "adversarial_weight": 0.5,
    "disc_channels": 8,
    "disc_layers": 1,
    "disc_start": 0,
    "log_freq": 1,
    "val_freq": 2,
}
SMALL = {
    "image_size": 32,
    "channels": [8, 16],
    "norm_groups": 4,
    "init": "default",
    "device": "cpu",
    "num_workers": "0",
}


def steps(per_epoch: int) -> StageSteps:
    return StageSteps(0, 1, per_epoch, 4, 4)


@pytest.fixture
def fast_measurement(monkeypatch):
    """Two measured steps, then two epochs of three steps."""
    monkeypatch.setattr(stage_length, "MEASURED_SECONDS", 0.0)
    monkeypatch.setattr(stage_length, "MEASURED_STEPS", 2)
    monkeypatch.setattr(stage_length, "MIN_STEPS", 5)
    monkeypatch.setattr(stage_length, "MAX_EPOCHS", 2)


def train_for(minutes: float, given: dict, folder: Path, **changes) -> int:
    """A run with --train_minutes instead of --num_epochs."""
    options = {**given, "init": "default", "output_dir": str(folder), "train_minutes": minutes, **changes}
    options.pop("num_epochs", None)
    return train(options)


@pytest.mark.parametrize(
    ("seconds_per_step", "per_epoch", "expected"),
    [(0.5, 14, 34), (2.0, 14, 9), (0.05, 14, 343), (1.0, 240, 1), (0.9, 160, 2)],
)
def test_epochs_take_about_the_wanted_time(seconds_per_step, per_epoch, expected):
    assert epochs_for(FOUR_MINUTES, seconds_per_step, steps(per_epoch)) == (expected, "")


def test_limits_on_slow_and_fast_machines_are_reported():
    epochs, limit = epochs_for(FOUR_MINUTES, 30.0, steps(14))
    assert 14 * (epochs - 1) < MIN_STEPS <= 14 * epochs
    assert f"{MIN_STEPS} steps" in limit
    epochs, limit = epochs_for(FOUR_MINUTES, 1e-4, steps(14))
    assert epochs == MAX_EPOCHS
    assert "--num_epochs" in limit


@pytest.mark.slow
def test_run_equals_one_with_the_chosen_number_of_epochs(tiny, tmp_path, capsys, fast_measurement):
    given = {**tiny, **EVERY_PART, "init": "default"}
    assert train_for(0.01, given, tmp_path / "measured") == 0
    output = capsys.readouterr().out
    saved = json.loads((tmp_path / "measured" / "config.json").read_text())
    epochs = saved["num_epochs"]
    assert saved["train_minutes"] is None
    assert output.startswith(f"--train_minutes 0.01: {epochs} epochs")
    assert "images/s" in output.splitlines()[0]

    assert train({**given, "output_dir": str(tmp_path / "typed"), "num_epochs": epochs}) == 0
    folders = [tmp_path / "measured", tmp_path / "typed"]
    measured, typed = map(last_checkpoint, folders)
    for content in (measured, typed):
        content["config"] = {k: v for k, v in content["config"].items() if k not in PER_COMMAND}
        del content["run"], content["contract"]  # random ids
    assert measured["discriminator"]
    assert measured["ema"]
    assert_same(measured, typed, "checkpoint")
    assert_same(*map(reproducible_records, folders), "records")


@pytest.mark.slow
def test_resumed_run_keeps_its_number_of_epochs(tiny, tmp_path, capsys, fast_measurement, monkeypatch):
    assert train_for(0.01, tiny, tmp_path / "run") == 0
    epochs = last_checkpoint(tmp_path / "run")["position"]["epoch"]
    for path in (tmp_path / "run").glob(f"checkpoint_epoch_{epochs}.*"):
        path.unlink()
    capsys.readouterr()
    monkeypatch.setattr(stage_length, "measure_step", None)  # a resumed stage is not measured
    assert train_for(9.0, tiny, tmp_path / "run", resume_from="latest") == 0
    assert (
        f"--train_minutes 9: the stage has begun, so it keeps its {epochs} epochs" in capsys.readouterr().out
    )
    assert last_checkpoint(tmp_path / "run")["position"]["epoch"] == epochs
    assert train({"output_dir": str(tmp_path / "run"), "resume_from": "latest", "device": "cpu"}) == 0
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.slow
def test_new_stage_of_a_resumed_run_is_measured(tiny, tmp_path, fast_measurement):
    assert train({**tiny, "init": "default", "num_epochs": 1, "output_dir": str(tmp_path / "run")}) == 0
    given = {
        "resume_from": str(tmp_path / "run" / "checkpoint_epoch_1.pt"),
        "device": "cpu",
        "image_size": 16,
    }
    assert train({**given, "train_minutes": 0.01}) == 0
    first, second = last_checkpoint(tmp_path / "run")["stages"]
    assert (first["num_epochs"], second["image_size"]) == (1, 16)
    assert second["num_epochs"] == 2


def test_profile_is_named_as_the_source(image_folder, tmp_path, capsys, fast_measurement, monkeypatch):
    monkeypatch.setattr(stage_length, "measure_step", lambda *_: 20.0)  # as on a very slow machine
    given = {**SMALL, "profile": "demo", "data_path": str(image_folder), "output_dir": str(tmp_path / "run")}
    assert train(given) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("--profile demo: 2 epochs (")]
    assert line.endswith("), about 2 min at 0.2 images/s")


def test_stop_signal_while_measuring_writes_nothing(tiny, tmp_path, capfd):
    stop = Fault("signal", "update", value=signal.SIGINT)
    with injected(stop), pytest.raises(KeyboardInterrupt):
        train_for(1.0, tiny, tmp_path / "run")
    assert "training has not started" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_processes_choose_the_same_number(tiny, tmp_path):
    patched = """
        from vae.training.trials import stage_length
        stage_length.MEASURED_SECONDS, stage_length.MEASURED_STEPS, stage_length.MAX_EPOCHS = 0.0, 2, 3
    """
    given = {**tiny, "init": "default", "batch_size": 2, "train_minutes": 9.0}
    del given["num_epochs"]
    found = train_on_two_processes(given, before=patched)
    assert "--train_minutes 9: 3 epochs" in found.stdout
    assert last_checkpoint(tmp_path / "run")["position"]["epoch"] == 3
