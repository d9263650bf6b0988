"""A search that is killed, stopped and joined: no trial is doubled; damaged and foreign journals."""

import signal
import sys

import pytest
from PIL import Image

from tests.harness.stub_trainer import STEPS, rows_of, start_search
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
def test_killed_and_joined_search_doubles_no_trial_and_the_killed_one_has_failed(
    words, stub, tmp_path, monkeypatch
):
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
    states = {row["trial"]: row["state"] for row in rows_of(folder)}
    assert states == {number: "fail" if number == 1 else "complete" for number in range(6)}
    for number in {*states} - {1}:
        lines = (folder / "trials" / f"{number:04d}" / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == STEPS  # no step twice


@posix
@pytest.mark.slow
def test_stopped_search_ends_its_trial_and_goes_on_with_the_next(words, stub, tmp_path, monkeypatch):
    monkeypatch.setenv("STUB_SECONDS", "0.1")
    command = [*words, "--trials", "3", "--pruner", "none"]
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
    assert [row["state"] for row in rows_of(tmp_path / "search")] == ["complete", "fail", "complete"]


def test_a_damaged_journal_is_one_line_and_stays_as_it_is(tune):
    journal = tune(SPACE, "--trials", "1") / JOURNAL_NAME
    whole = journal.read_bytes()
    lines = whole.splitlines(keepends=True)
    cut = b'{"op_code": 4, "wor'
    for damaged, place in (
        (whole + cut, "its last line"),  # by a full disk
        (whole[:-1], "its last line"),
        (b"".join([*lines[:2], cut + b"\n", *lines[3:]]), ""),
        (b"".join([*lines[:2], b"\0" * len(lines[2][:-1]) + b"\n", *lines[3:]]), ""),  # by a bad block
        (b"{}\n" + whole, "op_code"),
    ):
        journal.write_bytes(damaged)
        with pytest.raises(UserError, match=f"cannot read .*{JOURNAL_NAME}.*{place}"):
            tune(SPACE, "--trials", "2")
        assert journal.read_bytes().startswith(damaged)
    journal.write_bytes(whole)
    assert len(rows_of(tune(SPACE, "--trials", "2"))) == 2


def test_a_search_of_other_images_or_another_space_is_refused(tune, tmp_path):
    tune(SPACE, "--trials", "1")
    with pytest.raises(UserError, match=r"--space beta1: .*another folder"):
        tune({**SPACE, "beta1": [0.5, 0.9]})
    with pytest.raises(UserError, match="--space learning_rate:"):
        tune({"learning_rate": {"low": 1e-5, "high": 1e-1, "log": True}})
    with pytest.raises(UserError, match="--objective:"):
        tune(SPACE, "--objective", "psnr", "ssim")
    (tmp_path / "other").mkdir()
    for index in range(20):
        Image.new("RGB", (40, 40)).save(tmp_path / "other" / f"{index}.png")
    with pytest.raises(UserError, match="number of training images:"):
        tune(SPACE, "--data_path", str(tmp_path / "other"))
