"""Each record is one line; a resumed run removes later ones and incomplete lines; a stub package is W&B."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.harness.runs import ROOT
from tests.harness.training_runs import SHORT, records, train_short
from vae.config.flags import command_words, trainer_options
from vae.interop.vae_path import METRICS_NAME
from vae.system.errors import UserError
from vae.training.early_checks import check_command
from vae.training.logbook import ID_NAME, Logbook, start_wandb
from vae.training.run import train


def steps(folder: Path) -> list[int]:
    return [record["step"] for record in records(folder)]


def write(folder: Path, first_step: int, last_step: int) -> None:
    """Write the records of the steps after `first_step`."""
    logbook = Logbook(folder, first_step, active=True)
    for step in range(first_step + 1, last_step + 1):
        logbook.record("train", step, {"loss": 1 / step})
    logbook.close()


def test_record_is_one_line_and_its_numbers_are_scalars(tmp_path):
    logbook = Logbook(tmp_path, 0, active=True)
    logbook.record("train", 3, {"loss": 0.5, "epoch": 1})
    logbook.record("baseline", 3, {"codec": "mean_colour", "psnr": 12.5})
    line, other = map(json.loads, (tmp_path / METRICS_NAME).read_text().splitlines())  # flushed at once
    logbook.close()
    assert line == {"kind": "train", "step": 3, "loss": 0.5, "epoch": 1}
    assert other == {"kind": "baseline", "step": 3, "codec": "mean_colour", "psnr": 12.5}
    board = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("train/loss")] == [(3, 0.5)]
    assert board.Scalars("baseline/mean_colour/psnr")[0].value == 12.5
    assert board.Tags()["scalars"] == ["train/loss", "train/epoch", "baseline/mean_colour/psnr"]


@pytest.mark.parametrize("first_step", [0, 4, 9])
def test_records_after_the_resumed_step_are_removed(tmp_path, first_step):
    write(tmp_path, 0, 6)
    Logbook(tmp_path, first_step, active=True).close()
    assert steps(tmp_path) == list(range(1, min(6, first_step) + 1))


def test_tensorboard_shows_only_the_records_of_the_resumed_run(tmp_path):
    write(tmp_path, 0, 6)
    write(tmp_path, 4, 5)
    board = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("incomplete", ['{"kind": "train", "st', "\0\0\0\0", '{"kind": "train"}'])
def test_incomplete_line_of_a_crash_is_removed(tmp_path, incomplete):
    write(tmp_path, 0, 3)
    with (tmp_path / METRICS_NAME).open("a", encoding="utf-8") as file:
        file.write(incomplete)
    write(tmp_path, 3, 4)
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_image_is_saved_and_shown_in_tensorboard(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    logbook = Logbook(tmp_path, 0, active=True)
    logbook.image("samples", 12, pixels)
    logbook.close()
    (path,) = (tmp_path / "samples").iterdir()
    assert path.name == "samples_step_0000012.png"
    assert np.array_equal(np.asarray(Image.open(path)), pixels)
    board = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert [event.step for event in board.Images("samples")] == [12]


@pytest.mark.slow
def test_run_finishes_if_its_output_is_closed(tiny):
    """After one line, as by `| head -1`."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train_vae.py", *command_words(tiny)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    run = subprocess.Popen(command, cwd=ROOT, env=environ, **pipes)
    assert run.stdout.readline()
    run.stdout.close()
    printed = run.stderr.read()
    assert run.wait(timeout=300) == 0
    assert printed.count("training continues") == 1
    assert METRICS_NAME in printed
    assert "Traceback" not in printed
    folder = Path(tiny["output_dir"])
    assert (folder / "checkpoint_epoch_2.pt").exists()
    assert (folder / "vae" / "config.json").exists()
    assert len(steps(folder)) > 0


@pytest.mark.parametrize(
    ("log_freq", "max_steps", "steps"), [(4, None, [4, 6]), (5, None, [6]), (3, 5, [3, 5]), (3, 4, [4])]
)
def test_records_are_means_of_about_as_many_steps(tiny, log_freq, max_steps, steps):
    """The last one has half as many or more, so that no curve ends with the value of one batch."""
    assert train({**tiny, "log_freq": log_freq, "max_steps": max_steps}) == 0
    assert [record["step"] for record in records(Path(tiny["output_dir"]), "train")] == steps


def test_log_file_gets_lines_and_no_progress_bar(tiny, capfd):
    assert train({**tiny, "log_freq": 2}) == 0
    out, err = capfd.readouterr()
    printed = re.findall(r"^step (\d+): .* images/s", out, re.M)
    assert printed == ["2", "4", "6"]  # although the epochs end at 3 and 6
    assert "step/s" not in err


# ---- W&B -------------------------------------------------------------------------------------------------


FAKE = """
import json, os, sys

def write(**line):
    with open(os.environ["FAKE_WANDB_LOG"], "a") as file:
        file.write(json.dumps(line) + "\\n")

class Run:
    def __init__(self, id):
        self.id = id or "a1b2"

    def finish(self):
        write(call="finish")

def init(**options):
    if os.environ.get("FAKE_WANDB_REFUSES"):
        raise RuntimeError("api_key not configured (no-tty)\\nmore lines")
    logs = os.path.join(options["dir"], "logs")
    events = os.listdir(logs) if os.path.isdir(logs) else []
    write(call="init", argv=sys.argv, events=len(events), **options)
    return Run(options["id"])
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """A function that returns the calls of the package since it was last called."""
    (tmp_path / "packages" / "wandb").mkdir(parents=True)
    (tmp_path / "packages" / "wandb" / "__init__.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    log = tmp_path / "calls.jsonl"
    monkeypatch.setenv("FAKE_WANDB_LOG", str(log))

    def read(kind: str | None = None) -> list[dict]:
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return [line for line in lines if kind in (None, line["call"])]

    yield read
    sys.modules.pop("wandb", None)


def test_the_run_begins_before_the_records_of_tensorboard_which_it_reads(tiny, tmp_path, calls):
    folder = tmp_path / "my run"
    train_short(tiny, folder, wandb=True, wandb_project="faces")
    (start,) = calls("init")
    assert (start["project"], start["name"], start["id"]) == ("faces", "my run", None)
    assert (start["sync_tensorboard"], start["events"]) == (True, 0)
    assert start["dir"] == str(folder)
    assert start["config"]["channels"] == tiny["channels"]
    assert calls()[-1] == {"call": "finish"}


def test_resumed_run_continues_the_same_run(tiny, tmp_path, calls):
    given = {**tiny, **SHORT, "wandb": True, "output_dir": str(tmp_path / "run")}
    assert train({**given, "max_steps": 2}) == 0
    assert train({**given, "resume_from": "latest"}) == 0
    assert [call["id"] for call in calls("init")] == [None, "a1b2"]
    assert (tmp_path / "run" / ID_NAME).read_text() == "a1b2\n"


def test_the_command_line_that_is_uploaded_has_no_credentials(tmp_path, calls, monkeypatch):
    given = ["train_vae.py", "--data_path", "https://bob:pa55word@host/dataset.json?sig=5ecret", "--wandb"]
    monkeypatch.setattr(sys, "argv", given)
    start_wandb(tmp_path / "run", "faces", {})
    (start,) = calls("init")
    assert start["argv"] == ["train_vae.py", "--data_path", "https://host/dataset.json", "--wandb"]
    assert sys.argv == given


@pytest.mark.skipif(find_spec("wandb") is not None, reason="the package wandb is installed")
def test_missing_package_is_one_line_with_the_command_that_installs_it(tiny):
    with pytest.raises(UserError, match=r"--wandb needs .* pip install wandb, or use --no-wandb"):
        check_command(trainer_options({**tiny, "wandb": True}))
