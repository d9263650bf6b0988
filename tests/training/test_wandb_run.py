"""--wandb starts a run that reads TensorBoard's records; a small package stands in for wandb."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.harness.blocked_imports import without_pytorch
from tests.harness.faults import start_forked
from tests.harness.training_runs import SHORT, train_short
from vae.config.flags import command_words
from vae.system.errors import EXIT_CONFIG, UserError
from vae.training.logbook import ID_NAME, start_wandb
from vae.training.run import train

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


def test_nothing_is_logged_without_the_flag(tiny, tmp_path, calls):
    train_short(tiny, tmp_path / "run")
    assert calls() == []
    assert not (tmp_path / "run" / ID_NAME).exists()


def test_refused_start_is_one_line_and_the_command_can_be_repeated(tiny, tmp_path, calls, monkeypatch):
    given = {**tiny, **SHORT, "wandb": True, "output_dir": str(tmp_path / "run")}
    monkeypatch.setenv("FAKE_WANDB_REFUSES", "1")
    with pytest.raises(UserError, match="--wandb: api_key") as caught:
        train(given)
    assert "WANDB_MODE=offline" in str(caught.value)
    assert "\n" not in str(caught.value)
    monkeypatch.delenv("FAKE_WANDB_REFUSES")
    assert train(given) == 0


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no fork")
def test_refused_start_ends_all_processes(tiny, tmp_path, calls, monkeypatch):
    monkeypatch.setenv("FAKE_WANDB_REFUSES", "1")
    log, given = tmp_path / "log", {**tiny, **SHORT, "batch_size": 2, "wandb": True}
    processes = start_forked(given, processes=2, log=log)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [EXIT_CONFIG] * 2
    assert log.read_text().count("WANDB_MODE=offline") == 1


@pytest.mark.skipif(find_spec("wandb") is not None, reason="the package wandb is installed")
def test_missing_package_is_one_line_with_the_command_that_installs_it(tiny, tmp_path):
    found = without_pytorch("train_vae.py", *command_words({**tiny, "wandb": True}))
    assert found.returncode == 78
    assert "--wandb needs the package wandb" in found.stderr
    assert "pip install wandb" in found.stderr
    assert "--no-wandb" in found.stderr  # a resumed run inherits the flag
    assert found.stderr.count("\n") == 1
    assert not Path(tiny["output_dir"]).exists()


def test_folder_with_files_of_earlier_runs_is_not_the_package(tmp_path, monkeypatch):
    (tmp_path / "wandb" / "offline-run-1").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="pip install wandb"):
        start_wandb(tmp_path / "run", "project", {})
