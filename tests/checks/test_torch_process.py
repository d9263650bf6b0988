"""What the process with PyTorch writes, and what is made of it when it ends early."""

import json

from vae.checks.children import Outcome
from vae.checks.torch_process import read


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


def test_whole():
    loaded = read(Outcome(0, WHOLE, ""))
    assert loaded.arch_list == ("sm_120",)
    (card,) = loaded.devices
    assert (card.name, card.capability, card.memory_total) == ("RTX 5090", (12, 0), 34_000_000_000)
    assert [(k.name, k.error) for k in loaded.kernels] == [("conv", None), ("step", "RuntimeError: no")]
    assert (loaded.unfinished, loaded.ended, loaded.error) == (None, None, None)


def test_lines_of_others_are_not_ours():
    noise = 'Welcome to a library\n{"fact": broken\n{"other": 1}\n'
    assert read(Outcome(0, noise + WHOLE, "")) == read(Outcome(0, WHOLE, ""))


def test_a_crash_names_what_was_running():
    until = WHOLE.index('{"fact": "kernel", "name": "step"')
    for cut in (until, until + 20):  # before the line, and in the middle of it
        loaded = read(Outcome(-11, WHOLE[:cut], "warning\nFatal Python error: Segmentation fault\n"))
        assert loaded.unfinished == "kernel step"
        assert loaded.ended == "killed by signal 11: Fatal Python error: Segmentation fault"
        assert len(loaded.kernels) == 1


def test_no_answer_in_time():
    loaded = read(Outcome(None, lines({"fact": "begin", "what": "loading torch"}), ""))
    assert (loaded.unfinished, loaded.ended) == ("loading torch", "it did not end in time")


def test_python_that_does_not_even_start():
    loaded = read(Outcome(1, "", "Fatal Python error: init_fs_encoding\n"))
    assert loaded.unfinished == "starting Python"
    assert "init_fs_encoding" in loaded.ended
