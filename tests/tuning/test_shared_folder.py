"""A search that is killed, stopped and joined: no trial is lost or doubled; damaged and foreign journals."""

import signal
import sys

import pytest
from PIL import Image

from tests.harness.stub_trainer import STEPS, rows_of, start_search, starts_of
from tests.harness.waiting import wait_until
from vae.system.errors import UserError
from vae.tuning.search import JOURNAL_NAME

SPACE = {"learning_rate": {"low": 1e-6, "high": 1e-1, "log": True}}
posix = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


@pytest.fixture
def words(tune, base, tmp_path) -> list[str]:
    """A command; the defaults are trained already."""
    tune(SPACE, "--trials", "1", "--pruner", "none")
    space = str(tmp_path / "space.json")
    return ["--config", str(base), "--space", space, "--output_dir", str(tmp_path / "search")]


@posix
@pytest.mark.slow
def test_killed_and_joined_search_loses_and_doubles_no_trial(words, stub, tmp_path, monkeypatch):
    monkeypatch.setenv("STUB_SECONDS", "0.05")
    folder, command = tmp_path / "search", [*words, "--trials", "6", "--pruner", "none"]
    first = start_search(stub, *command)
    metrics = folder / "trials" / "0001" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2)
    first.kill()
    first.wait()
    processes = [start_search(stub, *command) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    killed, *rows = sorted(rows_of(folder), key=lambda row: row["state"] != "interrupted")
    assert (killed["trial"], killed["state"], killed["folder"]) == (1, "interrupted", "0001")
    assert {row["state"] for row in rows} == {"complete"}
    assert len(rows) == len({row["folder"] for row in rows}) == 6
    for row in rows:
        starts = starts_of(folder, row)
        if row["folder"] == "0001":  # continued, from where the orphan had saved
            assert len(starts) == 2
            assert 2 < starts[1] <= STEPS
            assert row["params"] == killed["params"]
        else:
            assert len(starts) == 1
        lines = (folder / "trials" / row["folder"] / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == STEPS  # no step twice


@posix
@pytest.mark.slow
def test_stopped_search_saves_its_trial_and_says_how_to_continue(words, stub, tmp_path, monkeypatch):
    monkeypatch.setenv("STUB_SECONDS", "0.1")
    command = [*words, "--trials", "2", "--pruner", "none"]
    process = start_search(stub, *command)
    run = tmp_path / "search" / "trials" / "0001"
    wait_until(lambda: (run / "metrics.jsonl").exists())
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert 0 < int((run / "checkpoint_step_1.pt").read_text()) < STEPS
    output = start_search(stub, *command).communicate(timeout=60)[0]
    assert "best    trial" in output
    assert [row["folder"] for row in rows_of(tmp_path / "search")] == ["0000", "0001", "0001"]


def test_incomplete_last_record_is_removed(tune):
    folder = tune(SPACE, "--trials", "2")
    with (folder / JOURNAL_NAME).open("ab") as file:
        file.write(b'{"op_code": 4, "worker')  # of a full disk
    tune(SPACE, "--trials", "3")
    assert len(rows_of(tune(SPACE, "--trials", "4"))) == 4


def test_a_search_of_other_images_or_another_space_is_refused(tune, tmp_path):
    tune(SPACE, "--trials", "1")
    with pytest.raises(UserError, match=r"--space beta1 was None, and is now .*another folder"):
        tune({**SPACE, "beta1": [0.5, 0.9]})
    with pytest.raises(UserError, match="--space learning_rate was"):
        tune({"learning_rate": {"low": 1e-5, "high": 1e-1, "log": True}})
    with pytest.raises(UserError, match=r"--objective was \['loss'\]"):
        tune(SPACE, "--objective", "psnr", "ssim")
    (tmp_path / "other").mkdir()
    for index in range(20):
        Image.new("RGB", (40, 40)).save(tmp_path / "other" / f"{index}.png")
    with pytest.raises(UserError, match="the number of training images was"):
        tune(SPACE, "--data_path", str(tmp_path / "other"))
