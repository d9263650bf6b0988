"""The output of the PyTorch process is parsed, also if the process ends early."""

import json

import pytest

from vae.checks.facts import Card
from vae.checks.torch_process import parse
from vae.system.child_process import FinishedProcess

CARD = {"arch_list": ["sm_120"], "devices": [["RTX 5090", [12, 0], 32129]]}


def line(**facts) -> str:
    return json.dumps({"facts": facts}) + "\n"


STARTED = line(unfinished="loading torch")
RUNNING = STARTED + line(unfinished="computing", **CARD)
WHOLE = RUNNING + line(compute_error="RuntimeError: no", unfinished=None, **CARD)


def test_complete_output():
    loaded = parse(FinishedProcess(0, WHOLE, ""))
    assert (loaded.arch_list, loaded.devices) == (("sm_120",), (Card("RTX 5090", (12, 0), 32129),))
    assert loaded.compute_error == "RuntimeError: no"
    assert (loaded.unfinished, loaded.ended, loaded.error) == (None, None, None)


def test_foreign_lines_are_ignored():
    noise = 'Welcome to a library\n{"facts": broken\n{"other": 1}\n'
    assert parse(FinishedProcess(0, noise + WHOLE, "")) == parse(FinishedProcess(0, WHOLE, ""))


@pytest.mark.parametrize("cut", [len(RUNNING), len(RUNNING) + 20])  # before the last line, and within it
def test_crash_reports_what_was_running(cut):
    loaded = parse(FinishedProcess(-11, WHOLE[:cut], "warning\nFatal Python error: Segmentation fault\n"))
    assert loaded.unfinished == "computing"
    assert loaded.ended == "killed by signal 11: Fatal Python error: Segmentation fault"
    assert loaded.compute_error is None


@pytest.mark.parametrize(
    ("process", "unfinished", "ended"),
    [
        (FinishedProcess(None, STARTED, ""), "loading torch", "it exceeded the time limit"),
        (
            FinishedProcess(1, "", "Fatal: no codec\n"),
            "starting Python",
            "ended with code 1: Fatal: no codec",
        ),
    ],
)
def test_early_end(process, unfinished, ended):
    loaded = parse(process)
    assert (loaded.unfinished, loaded.ended) == (unfinished, ended)
