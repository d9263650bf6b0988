"""A terminal gets a bar; a log file gets a few plain lines and never a carriage return."""

import io
import os
import subprocess
import sys

import pytest

from tests.harness.runs import ROOT
from vae import progress
from vae.progress import Progress, track
from vae.system import console


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets, in seconds."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_log_file_gets_a_line_at_round_numbers_every_30_seconds_and_one_at_the_end(clock, capsys):
    with Progress("validate", 400, "image") as bar:
        for number in range(400):
            clock[0] += 17 / 64  # 30 s after 113 images
            bar.update(note=f"{number // 100} bad")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "validate: 120 of 400 images, 1 bad, 3.8 images/s, 01:14 left",
        "validate: 240 of 400 images, 2 bad, 3.8 images/s, 00:42 left",
        "validate: 360 of 400 images, 3 bad, 3.8 images/s, 00:10 left",
        "validate: 400 of 400 images, 3 bad, 3.8 images/s, took 01:46",
    ]


def test_short_work_prints_one_line_or_none(clock, capsys):
    assert list(track("abc", "one", 3, "file")) == list("abc")
    assert capsys.readouterr().err == "one: 3 of 3 files, took 00:00\n"
    assert list(track("abc", "two", 3, "file", keep=False)) == list("abc")
    assert capsys.readouterr().err == ""


def test_work_that_fails_prints_no_last_line(clock, capsys):
    with pytest.raises(ZeroDivisionError), Progress("one", 3, "file"):
        raise ZeroDivisionError
    next(track("abc", "one", 3, "file"))  # the loop ends early
    assert capsys.readouterr().err == ""


def test_terminal_gets_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress("validate", 4, "image") as bar:
        bar.update(4, note="1 bad")
    assert "\r" in terminal.getvalue()
    assert "4/4" in terminal.getvalue()
    assert "1 bad" in terminal.getvalue()


def test_only_the_main_process_prints_lines(clock, capsys):
    console.configure(is_main_process=False)
    try:
        list(track("abc", "one", 3, "file"))
    finally:
        console.configure()
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(os.name == "nt", reason="a closed pipe raises another error there")
def test_closed_stderr_does_not_stop_the_work():
    code = "from vae.progress import track\n"
    code += "for _ in range(99): list(track('abc', 'one', 3, 'file'))\nprint('done')"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stderr.close()
    assert process.stdout.read() == "done\n"
    assert process.wait(timeout=60) == 0
