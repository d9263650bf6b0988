"""A search that is killed, stopped and joined: no trial is lost or doubled; damaged and foreign journals."""

import signal
import subprocess
import sys

import pytest
from PIL import Image

from tests.harness.runs import ROOT
from tests.harness.stub_trainer import STEPS, rows_of, start_search, starts_of
from tests.harness.waiting import wait_until
from vae.system.errors import UserError
from vae.tuning.study import JOURNAL_NAME, open_study

SPACE = {"learning_rate": {"low": 1e-6, "high": 1e-1, "log": True}}
posix = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


@pytest.fixture
def words(tune, base, tmp_path) -> list[str]:
    """A command; the noise is measured already."""
    tune(SPACE, "--trials", "1", "--pruner", "none")
    space = str(tmp_path / "space.json")
    return ["--config", str(base), "--space", space, "--output_dir", str(tmp_path / "search")]


@posix
@pytest.mark.slow
def test_killed_and_joined_search_loses_and_doubles_no_trial(words, stub, tmp_path, monkeypatch):
    monkeypatch.setenv("STUB_SECONDS", "0.05")
    folder, command = tmp_path / "search", [*words, "--trials", "6", "--pruner", "none"]
    first = start_search(stub, *command)
    metrics = folder / "trials" / "0001" / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2)
    first.kill()
    first.wait()
    processes = [start_search(stub, *command) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    rows = rows_of(folder)
    assert [row["trial"] for row in rows] == list(range(6))
    assert {row["state"] for row in rows} == {"complete"}
    starts = [starts_of(folder / row["folder"]) for row in rows]
    assert len(starts[1]) == 2  # continued, from where the orphan had saved
    assert 2 < starts[1][1][0] <= STEPS
    assert all(len(one) == 1 for number, one in enumerate(starts) if number != 1)
    for row in rows:
        lines = (folder / row["folder"] / "run" / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == STEPS  # no step twice


@posix
@pytest.mark.slow
def test_stopped_search_saves_its_trial_and_says_how_to_continue(words, stub, tmp_path, monkeypatch):
    monkeypatch.setenv("STUB_SECONDS", "0.1")
    command = [*words, "--trials", "2", "--pruner", "none"]
    process = start_search(stub, *command)
    run = tmp_path / "search" / "trials" / "0001" / "run"
    wait_until(lambda: (run / "metrics.jsonl").exists())
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert 0 < int((run / "checkpoint_step_1.pt").read_text()) < STEPS


@posix
@pytest.mark.slow
def test_one_process_per_card(words, stub, tmp_path):
    process = start_search(stub, *words, "--trials", "5", "--pruner", "none", "--cards", "0", "3")
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    folder = tmp_path / "search"
    cards = [starts_of(folder / row["folder"])[0][1] for row in rows_of(folder)]
    assert cards[0] == "None"  # of the fixture
    assert set(cards[1:]) <= {"0", "3"}
    assert "3" in output


def test_incomplete_last_record_is_removed(tune, tmp_path, capsys):
    folder = tune(SPACE, "--trials", "2")
    with (folder / "journal.log").open("ab") as file:
        file.write(b'{"op_code": 4, "worker')  # a process that was killed while it wrote
    tune(SPACE, "--trials", "3")
    assert len(rows_of(folder)) == 3
    assert "incomplete last record" in capsys.readouterr().out


def test_torn_record_of_another_process_is_removed_before_the_next_one(tmp_path):
    study = open_study(tmp_path, ["psnr"])
    with (tmp_path / JOURNAL_NAME).open("ab") as file:
        file.write(b'{"op_code": 4, "worker')
    study.set_user_attr("after", 1)
    assert open_study(tmp_path, ["psnr"]).user_attrs == {"after": 1}


@posix
def test_record_on_a_full_disk_leaves_nothing_behind(tmp_path):
    """The limit of the file's size stands for the end of the disk: a part of the record still fits."""
    code = f"""
import resource
from pathlib import Path
from vae.tuning.study import JOURNAL_NAME, open_study
folder = Path({str(tmp_path)!r})
study = open_study(folder, ["psnr"])
study.set_user_attr("before", 1)
before = (folder / JOURNAL_NAME).read_bytes()
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, hard))
try:
    study.set_user_attr("during", 2)
    raise SystemExit("a full disk has to raise OSError")
except OSError:
    assert (folder / JOURNAL_NAME).read_bytes() == before
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
study.set_user_attr("after", 3)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert open_study(tmp_path, ["psnr"]).user_attrs == {"before": 1, "after": 3}


@pytest.mark.parametrize(
    "damage",
    [b"not json\n", b'{"op_code": 6}\n', b'{"op_code": 99, "worker_id": "a"}\n', b"[" * 100_000 + b"\n"],
)
def test_damaged_journal_is_one_line(tune, damage):
    folder = tune(SPACE, "--trials", "1")
    path = folder / "journal.log"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], damage, *lines[3:]]))
    with pytest.raises(UserError, match=r"--output_dir.*journal\.log is damaged.*another folder"):
        tune(SPACE, "--trials", "2")


def test_a_search_of_other_images_or_another_space_is_refused(tune, image_folder, tmp_path):
    tune(SPACE, "--trials", "1")
    with pytest.raises(UserError, match=r'another space: "beta1" was not set, and is now \[0.5, 0.9\]'):
        tune({**SPACE, "beta1": [0.5, 0.9]})
    with pytest.raises(UserError, match=r'another space: "learning_rate"'):
        tune({"learning_rate": {"low": 1e-5, "high": 1e-1, "log": True}})
    with pytest.raises(UserError, match="other objectives"):
        tune(SPACE, "--objective", "psnr", "ssim")
    with pytest.raises(UserError, match="another --objective, psnr"):
        tune(SPACE, "--objective", "ssim")
    (tmp_path / "other").mkdir()
    for count, refusal in (
        (3, "--batch_size .* training images: lower it"),
        (20, "another set of images: repeat its"),
    ):
        for index in range(count):
            Image.new("RGB", (40, 40)).save(tmp_path / "other" / f"{index}.png")
        with pytest.raises(UserError, match=refusal):
            tune(SPACE, "--data_path", str(tmp_path / "other"))
