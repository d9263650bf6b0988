"""Records are data: one line each, whole after a crash, cut off where a run is taken up again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.harness.runs import ROOT, as_flags
from vae.training.logbook import METRICS_NAME, Logbook
from vae.training.run import train


def steps(folder) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / METRICS_NAME).read_text().splitlines()]


def write(folder, first_step: int, upto: int) -> None:
    logbook = Logbook(folder, first_step, active=True)
    for step in range(first_step + 1, upto + 1):
        logbook.record("train", step, {"loss": 1 / step})
    logbook.close()


def test_a_record_is_one_line_and_one_scalar(tmp_path):
    logbook = Logbook(tmp_path, 0, active=True)
    logbook.record("train", 3, {"loss": 0.5, "epoch": 1})
    logbook.record("baseline", 3, {"codec": "mean_colour", "psnr": 12.5})
    line, other = map(json.loads, (tmp_path / METRICS_NAME).read_text().splitlines())  # flushed at once
    logbook.close()
    assert line == {"kind": "train", "step": 3, "loss": 0.5, "epoch": 1}
    assert other == {"kind": "baseline", "step": 3, "codec": "mean_colour", "psnr": 12.5}
    board = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("train/loss")] == [(3, 0.5)]
    assert board.Scalars("baseline/psnr")[0].value == 12.5
    assert "baseline/codec" not in board.Tags()["scalars"]


@pytest.mark.parametrize("first_step", [0, 1, 4, 6, 9])
def test_records_after_the_step_gone_on_from_are_cut_off(tmp_path, first_step):
    write(tmp_path, 0, 6)
    Logbook(tmp_path, first_step, active=True).close()
    assert steps(tmp_path) == list(range(1, min(6, first_step) + 1))


def test_tensorboard_shows_the_later_course_only(tmp_path):
    write(tmp_path, 0, 6)
    write(tmp_path, 4, 5)
    board = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "torn", ['{"kind": "train", "st', "\0\0\0\0", "[]", "7", '{"kind": "train"}', "\ufffd"]
)
def test_a_line_torn_by_a_crash_goes(tmp_path, torn):
    write(tmp_path, 0, 3)
    with (tmp_path / METRICS_NAME).open("a", encoding="utf-8") as file:
        file.write(torn)
    write(tmp_path, 3, 4)
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_only_one_process_writes(tmp_path):
    logbook = Logbook(tmp_path, 0, active=False)
    logbook.record("train", 1, {"loss": 1.0})
    logbook.image("samples", 1, np.zeros((4, 4, 3), np.uint8))
    logbook.close()
    assert list(tmp_path.iterdir()) == []


def test_images_are_kept_and_shown(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    logbook = Logbook(tmp_path, 0, active=True)
    logbook.image("samples", 12, pixels)
    logbook.close()
    (path,) = (tmp_path / "samples").iterdir()
    assert path.name == "samples_step_0000012.png"
    assert np.array_equal(np.asarray(Image.open(path)), pixels)
    board = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert [event.step for event in board.Images("samples")] == [12]


def test_unusable_images_are_listed(tmp_path, capsys):
    logbook = Logbook(tmp_path, 0, active=True)
    logbook.rejected("a.png: unreadable (no such file)")
    logbook.rejected("b.png: truncated (at byte 7)")
    logbook.close()
    lines = (tmp_path / "rejected_images.txt").read_text().splitlines()
    assert lines == ["a.png: unreadable (no such file)", "b.png: truncated (at byte 7)"]
    assert capsys.readouterr().out.splitlines() == [f"skipped {line}" for line in lines]


@pytest.mark.slow
def test_a_run_whose_console_goes_away_is_finished(tiny):
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train_vae.py", *as_flags(tiny)]
    pipe = subprocess.PIPE
    run = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=pipe, stderr=pipe, text=True)
    assert run.stdout.readline()
    run.stdout.close()
    said = run.stderr.read()
    assert run.wait(timeout=300) == 0
    assert said.count("training goes on") == 1
    assert "Traceback" not in said
    folder = Path(tiny["output_dir"])
    assert (folder / "checkpoint_epoch_2.pt").exists()
    assert (folder / "vae" / "config.json").exists()
    assert len(steps(folder)) > 0


@pytest.mark.slow
def test_a_run_both_of_whose_outputs_go_away_is_finished(tiny):
    """As under `2>&1 | head -1`."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train_vae.py", *as_flags(tiny)]
    run = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert run.stdout.readline()
    run.stdout.close()
    assert run.wait(timeout=300) == 0
    folder = Path(tiny["output_dir"])
    assert (folder / "checkpoint_epoch_2.pt").exists()
    assert (folder / "vae" / "config.json").exists()


def test_a_log_file_gets_lines_and_no_bar(tiny, capfd):
    assert train({**tiny, "log_freq": 2}) == 0
    out, err = capfd.readouterr()
    said = [line.split(":")[0] for line in out.splitlines() if line.startswith("step ")]
    assert said == ["step 2", "step 3", "step 4", "step 6"]  # every second, and the last of each epoch
    assert "step/s" not in err
