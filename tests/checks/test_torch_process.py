"""The output of the PyTorch process is parsed, also if the process ends early."""

import json

from vae.checks.child_process import FinishedProcess
from vae.checks.torch_process import parse


def lines(*facts: dict) -> str:
    return "".join(json.dumps(fact) + "\n" for fact in facts)


WHOLE = lines(
    {"fact": "begin", "what": "loading torch"},
    {"fact": "loaded", "arch_list": ["sm_120"]},
    {"fact": "begin", "what": "looking for cards"},
    {"fact": "cuda", "cuda_available": True, "devices": [["RTX 5090", [12, 0], 34_000_000_000]]},
    {"fact": "begin", "what": "kernel conv"},
    {"fact": "kernel", "name": "conv", "seconds": 0.1, "difference": 0.001, "tolerance": 0.03},
    {"fact": "begin", "what": "kernel step"},
    {"fact": "kernel", "name": "step", "seconds": 0.1, "error": "RuntimeError: no"},
    {"fact": "end"},
)


def test_complete_output():
    loaded = parse(FinishedProcess(0, WHOLE, ""))
    assert loaded.arch_list == ("sm_120",)
    (card,) = loaded.devices
    assert (card.name, card.capability, card.memory_total) == ("RTX 5090", (12, 0), 34_000_000_000)
    assert [(k.name, k.error) for k in loaded.kernels] == [("conv", None), ("step", "RuntimeError: no")]
    assert (loaded.unfinished, loaded.ended, loaded.error) == (None, None, None)


def test_foreign_lines_are_ignored():
    noise = 'Welcome to a library\n{"fact": broken\n{"other": 1}\n'
    assert parse(FinishedProcess(0, noise + WHOLE, "")) == parse(FinishedProcess(0, WHOLE, ""))


def test_crash_reports_what_was_running():
    until = WHOLE.index('{"fact": "kernel", "name": "step"')
    for cut in (until, until + 20):  # before the line, and within it
        loaded = parse(FinishedProcess(-11, WHOLE[:cut], "warning\nFatal Python error: Segmentation fault\n"))
        assert loaded.unfinished == "kernel step"
        assert loaded.ended == "killed by signal 11: Fatal Python error: Segmentation fault"
        assert len(loaded.kernels) == 1


def test_time_limit_is_reported():
    loaded = parse(FinishedProcess(None, lines({"fact": "begin", "what": "loading torch"}), ""))
    assert (loaded.unfinished, loaded.ended) == ("loading torch", "it exceeded the time limit")


def test_python_that_does_not_start():
    loaded = parse(FinishedProcess(1, "", "Fatal Python error: init_fs_encoding\n"))
    assert loaded.unfinished == "starting Python"
    assert "init_fs_encoding" in loaded.ended
