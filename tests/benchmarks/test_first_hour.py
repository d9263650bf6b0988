"""The first hour on a card: records that continue, chosen values, and a run on the null GPU."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from benchmarks.first_hour import case as first_hour_case
from benchmarks.first_hour.case import Settings, computes
from benchmarks.first_hour.choose import attention_queries, choose, norm_constants, reserve_mib
from benchmarks.first_hour.parts import PARTS
from benchmarks.first_hour.record import DONE, FAILED, NOT_REACHED, OtherMachineError, Record
from benchmarks.first_hour.run_part import run_part
from benchmarks.first_hour.summary import BEGIN, DOCS, END, between_markers
from tests.harness.runs import ROOT, run_script
from tests.harness.waiting import wait_until
from tests.null_gpu.build import environment
from tests.null_gpu.child import needs_null_gpu, run_on_null_gpu
from vae.ops import attention

MACHINE = {"card": "H100", "versions": {"torch": "2.15"}, "quick": False, "commit": "abc", "date": "today"}
QUICK = Settings(ROOT, quick=True, data_path=None)


def open_record(folder, **changes) -> Record:
    return Record.open(folder, 3, "title", {**MACHINE, **changes})


def test_record_continues_and_forgets_what_is_not_done(tmp_path):
    record = open_record(tmp_path)
    record.begin("a")
    assert Record.read(tmp_path, 3).running == "a"
    record.end("a", DONE, 1.0, result={"figure": float("nan"), "verdict": "ok"})
    record.end("b", FAILED, error="RuntimeError: no")
    record.end("c", NOT_REACHED, needs_seconds=9)
    record.begin("d")  # the process is killed here
    again = open_record(tmp_path, commit="def", date="tomorrow")
    assert again.problems() == ["b: failed", "c: not reached"]
    again.forget_unfinished()
    assert list(open_record(tmp_path).cases) == ["a"]
    assert open_record(tmp_path).results() == {"a": {"figure": None, "verdict": "ok"}}
    assert Record.read(tmp_path, 3).running is None
    json.loads((tmp_path / "part_3.json").read_text(), parse_constant=pytest.fail)  # no NaN


@pytest.mark.parametrize("changed", [{"card": "H200"}, {"versions": {"torch": "3"}}, {"quick": True}])
def test_results_of_different_machines_are_not_mixed(tmp_path, changed):
    open_record(tmp_path).write()
    with pytest.raises(OtherMachineError, match=f"{next(iter(changed))}.*use another folder"):
        open_record(tmp_path, **changed)


def fake_part(*cases) -> SimpleNamespace:
    return SimpleNamespace(TITLE="title", cases=lambda settings: list(cases), table=lambda results: [])


def run_fake(monkeypatch, folder, *cases, seconds=100.0) -> Record:
    """Run a part with these cases on the CPU; the parts that exist need a card."""
    monkeypatch.setitem(PARTS, 3, fake_part(*cases))
    monkeypatch.setattr("benchmarks.first_hour.run_part.machine", lambda quick: MACHINE)
    monkeypatch.setattr("benchmarks.first_hour.run_part._card_is_usable", lambda: True)
    monkeypatch.setattr("benchmarks.first_hour.run_part.use_the_kernels_of_the_trainer", lambda: None)
    settings = Settings(folder, quick=False, data_path=None, deadline=time.monotonic() + seconds)
    assert run_part(3, settings) == 0
    return Record.read(folder, 3)


def test_a_case_that_fails_or_does_not_fit_does_not_stop_the_others(tmp_path, monkeypatch):
    def failing(settings):
        raise RuntimeError("CUDA error")

    runs = []
    good = first_hour_case.Case("good", 1, lambda s: runs.append(1) or {"verdict": "ok"})
    long = first_hour_case.Case("long", 1000, lambda s: {"verdict": "ok"})
    record = run_fake(monkeypatch, tmp_path, first_hour_case.Case("bad", 1, failing), long, good)
    states = {name: case["status"] for name, case in record.cases.items()}
    assert states == {"bad": FAILED, "long": NOT_REACHED, "good": DONE}
    assert "RuntimeError: CUDA error" in record.cases["bad"]["error"]
    record.forget_unfinished()
    record = run_fake(monkeypatch, tmp_path, long, good, seconds=2000.0)
    assert {name: case["status"] for name, case in record.cases.items()} == {"good": DONE, "long": DONE}
    assert len(runs) == 1


def test_device_that_computes_nothing_is_recognized(monkeypatch):
    computes.cache_clear()
    monkeypatch.setattr(first_hour_case, "DEVICE", "cpu")
    assert computes()
    computes.cache_clear()
    monkeypatch.setattr(first_hour_case, "DEVICE", "meta")
    monkeypatch.setattr("torch.Tensor.item", lambda tensor: 0.0)
    assert not computes()
    assert first_hour_case.verdict(False) == "no arithmetic"
    computes.cache_clear()


def test_launch_shapes_are_chosen_only_if_they_are_faster():
    start = {"TILE_ELEMENTS": 4096, "COLUMNS": 128}

    def found(ms: float) -> dict:
        best = {**start, "TILE_ELEMENTS": 8192}
        tried = [
            {"constants": start, "ms": 10.0},
            {"constants": best, "ms": ms},
            {"constants": {}, "error": "-"},
        ]
        return {"norm, launch shapes": {"tried": tried, "start": start, "best": best}}

    assert norm_constants(found(9.0)) == {"TILE_ELEMENTS": 8192}
    assert norm_constants(found(9.9)) == {}  # within the noise
    assert norm_constants({}) == {}


def test_queries_of_attention_are_the_fastest_over_large_images():
    current, other = f"{attention.QUERIES_PER_CHANNEL} queries per channel", "3 queries per channel"
    results = {
        "attention, 1024 tokens": {"1 queries per channel": {"both_ms": 1.0}},
        "attention, 16384 tokens": {current: {"both_ms": 5.0}, other: {"both_ms": 5.1}},
        "attention, 65536 tokens": {current: {"both_ms": 90.0}, other: {"both_ms": 60.0}},
    }
    assert attention_queries(results) == {"QUERIES_PER_CHANNEL": 3}
    results["attention, 65536 tokens"][other]["both_ms"] = 89.0
    assert attention_queries(results) == {}


def test_reserve_covers_gaps_and_late_libraries():
    memory = {
        "1024 px, expandable": {"reserved_gib": 13.75, "predicted_gib": 13.5},
        "1024 px, default": {"reserved_gib": 20.0, "predicted_gib": 13.5},
        "4096 px, expandable": {"predicted_gib": 40.0},  # out of memory
    }
    assert reserve_mib({"lazy": {"growth_after_planning_mib": 100}}, memory) == 384  # 256 + 100, rounded up
    assert reserve_mib({}, memory) is None
    assert choose({}) == {"constants": {}}


def test_page_and_readme_have_the_places_that_the_first_hour_needs():
    page = DOCS.read_text(encoding="utf-8")
    changed = between_markers(page, "new\n")
    assert f"{BEGIN}\nnew\n{END}" in changed
    assert between_markers(changed, "new\n") == changed
    readme = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## The first hour on a card")[2].partition("\n## ")[0]
    assert re.findall(r"^\| (\d) \|", section, re.M) == [str(number) for number in PARTS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        (["--parts", "9"], ["--parts", "9"]),
        (["--data_path", "no_such_folder"], ["--data_path no_such_folder", "not a folder"]),
        (["--parts", "1"], ["no CUDA device"]),
    ],
)
def test_user_mistakes_are_one_line(tmp_path, words, tokens):
    done = run_script("benchmarks/first_hour.py", "--out", str(tmp_path / "out"), *words)
    assert done.returncode != 0
    assert all(token in done.stderr.splitlines()[-1] for token in tokens), done.stderr
    assert "Traceback" not in done.stderr


@needs_null_gpu
def test_interrupted_part_continues_on_the_null_gpu(tmp_path):
    """Killed after its first case; the same command keeps this case and finishes. No figure is believed."""
    words = ["benchmarks/first_hour.py", "--out", str(tmp_path), "--quick", "--parts", "6"]
    child = {**environment(sm=90), "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=child, stdout=subprocess.DEVNULL, start_new_session=True
    )
    wait_until(lambda: (record := Record.read(tmp_path, 6)) and record.cases and record.running, first)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    before = Record.read(tmp_path, 6)
    run_on_null_gpu(*words, sm=90)
    after = Record.read(tmp_path, 6)
    assert 0 < len(before.cases) < len(after.cases) == len(PARTS[6].cases(QUICK))
    assert all(after.cases[name] == case for name, case in before.cases.items())
    assert after.content["machine"]["card"] == "NVIDIA H100 80GB HBM3"
    assert {"driver", "cuda", "cudnn", "versions", "date", "commit"} <= set(after.content["machine"])
    assert "computes nothing" in (tmp_path / "measurements.md").read_text()
    assert json.loads((tmp_path / "measured.json").read_text())["constants"] == {}


@needs_null_gpu
def test_parts_make_the_step_of_the_trainer_with_and_without_a_cuda_graph():
    program = """
from benchmarks.first_hour.synchronization import sync_is_an_error
from benchmarks.first_hour.trainer_step import WARMUP, TrainerStep

for graph in (True, False):
    step = TrainerStep.prepare(True, image_size=32, cuda_graph=graph)
    for _ in range(WARMUP):
        step()
    with sync_is_an_error():
        step()
    captured = step.stepper.retry.settings.graph
    print("graph", captured is not None and captured._captured is not None, step.stepper.state.position.step)
"""
    printed = run_on_null_gpu("-c", program).stdout
    found = [line for line in printed.splitlines() if line.startswith("graph ")]
    assert found == ["graph True 6", "graph False 6"]


@needs_null_gpu
def test_a_broken_kernel_makes_its_parts_say_failed(tmp_path):
    """On the null GPU, which computes nothing: an exception is an exception all the same."""
    program = """
import sys
from pathlib import Path
from benchmarks.first_hour.case import Settings
from benchmarks.first_hour.parts import PARTS
from benchmarks.first_hour.run_part import run_part
from vae.ops import norm_triton

def normalize(*_):
    raise RuntimeError("does not compile")

norm_triton.normalize = normalize
for number, first in ((2, 1), (3, 1), (6, 2)):  # some cases of each
    PARTS[number].cases = lambda settings, cases=PARTS[number].cases, first=first: cases(settings)[:first]
    assert run_part(number, Settings(Path(sys.argv[1]), quick=True, data_path=None)) == 0
"""
    run_on_null_gpu("-c", program, str(tmp_path))
    for number in (2, 3, 6):
        for case in Record.read(tmp_path, number).cases.values():
            assert (case["status"], "norm" in case["error"]) == (FAILED, True)
