"""--wandb sends every record to Weights & Biases: tested with a small package that stands in for wandb."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.harness.blocked_imports import without_pytorch
from tests.harness.training_runs import SHORT, records, train_short
from vae.config.flags import command_words
from vae.system.errors import UserError
from vae.training.output.wandb_run import ID_NAME, WandbRun
from vae.training.run import train

FAKE = """
import json, os, sys

def write(**line):
    with open(os.environ["FAKE_WANDB_LOG"], "a") as file:
        file.write(json.dumps(line) + "\\n")

class Image:
    def __init__(self, pixels):
        self.shape = pixels.shape

class Run:
    def __init__(self, id):
        self.id = id or "a1b2"

    def define_metric(self, name, step_metric=None):
        write(call="define_metric", name=name, step_metric=step_metric)

    def log(self, values):
        if os.environ.get("FAKE_WANDB_BREAKS") and values["step"] >= 2:
            raise RuntimeError("the network is gone")
        plain = {k: list(v.shape) if isinstance(v, Image) else v for k, v in values.items()}
        write(call="log", values=plain)

    def finish(self):
        write(call="finish")

def init(**options):
    if os.environ.get("FAKE_WANDB_REFUSES"):
        raise RuntimeError("api_key not configured (no-tty)\\nmore lines")
    write(call="init", argv=sys.argv, **options)
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


def test_every_record_and_image_is_logged_with_its_step(tiny, tmp_path, calls):
    folder = tmp_path / "my run"
    train_short(tiny, folder, wandb=True, wandb_project="faces", val_split=0.25, save_samples_freq=2)
    (start,) = calls("init")
    assert (start["project"], start["name"], start["id"]) == ("faces", "my run", None)
    assert start["dir"] == str(folder)
    assert start["config"]["channels"] == tiny["channels"]
    assert [call["name"] for call in calls("define_metric")] == ["step", "*"]
    logged = [call["values"] for call in calls("log")]
    images = [values for values in logged if "samples" in values]
    assert [values["step"] for values in images] == [2, 3]  # as often as sample files, and at the end
    assert all(values["samples"][2] == 3 for values in images)
    expected = []
    for record in records(folder):
        kind, step = record.pop("kind"), record.pop("step")
        prefix = f"{kind}/{record.pop('codec')}" if "codec" in record else kind
        numbers = {f"{prefix}/{k}": v for k, v in record.items() if isinstance(v, int | float)}
        expected += [{"step": step, **numbers}] if numbers else []  # the record of the run's id has none
    assert [values for values in logged if "samples" not in values] == expected
    assert any("validation/psnr" in values for values in expected)
    assert calls()[-1] == {"call": "finish"}


def test_resumed_run_continues_the_same_run(tiny, tmp_path, calls):
    given = {**tiny, **SHORT, "wandb": True, "output_dir": str(tmp_path / "run")}
    assert train({**given, "max_steps": 2}) == 0
    assert train({**given, "resume_from": "latest"}) == 0
    assert [call["id"] for call in calls("init")] == [None, "a1b2"]
    assert (tmp_path / "run" / ID_NAME).read_text() == "a1b2\n"
    steps = [call["values"]["step"] for call in calls("log") if "train/loss" in call["values"]]
    assert steps == [1, 2, 3, 4]


def test_the_command_line_that_is_uploaded_has_no_credentials(tmp_path, calls, monkeypatch):
    given = ["train_vae.py", "--data_path", "https://bob:pa55word@host/dataset.json?sig=5ecret", "--wandb"]
    monkeypatch.setattr(sys, "argv", given)
    WandbRun(tmp_path / "run", "faces", {})
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


def test_failure_while_logging_is_one_warning(tiny, tmp_path, calls, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_WANDB_BREAKS", "1")
    train_short(tiny, tmp_path / "run", wandb=True)
    assert capsys.readouterr().out.count("--wandb: logging has stopped (the network is gone)") == 1
    assert [record["step"] for record in records(tmp_path / "run", "train")] == [1, 2, 3, 4]
    assert {call["values"]["step"] for call in calls("log")} == {1}


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
        WandbRun(tmp_path / "run", "project", {})
