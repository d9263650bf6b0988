"""The program for a card: verdicts that fail on wrong records, cases that fail or hang, and its summary."""

import json
import sys
import time
from dataclasses import replace

import pytest
import torch

from benchmarks import card
from benchmarks.card import Case
from benchmarks.on_card import result, steps
from tests.harness.runs import ROOT
from tests.null_gpu.child import NEEDS_NULL_GPU, run_on_null_gpu
from vae.config.options import ActionConfig, all_options
from vae.system.files import MARKER_NAME

OK = {"line": "figures", "verdict": "ok"}
PLAN = "plan    1024 px, batch 16 as 8 x 2: predicted peak 25.80 GiB of 30.10\n"


@pytest.mark.parametrize(
    ("change", "printed", "verdict"),
    [
        ({}, "", "ok"),
        ({"memory_reserved_gib": 27.2}, "", "WRONG"),
        ({"memory_reserved_gib": 24.4}, "", "ok"),  # the peak is in another record
        ({"memory_retries": 2}, "", "WRONG"),
        ({"loss": None}, "", "WRONG"),
        ({}, "the Triton kernels of norm fail. PyTorch operations replace it: slower\n", "WRONG"),
        ({}, "out of memory: this step is repeated with 1 image\n", "WRONG"),
    ],
)
def test_verdict_on_a_profile(tmp_path, change, printed, verdict):
    base = {"kind": "train", "images_per_second": 5.0, "memory_reserved_gib": 25.9, "memory_retries": 1}
    records = [{**base, "step": step, "loss": 1.0, **(change if step == 5 else {})} for step in range(6)]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    found = result.read_profile(tmp_path, PLAN + printed)
    assert (found["verdict"], found["predicted_gib"]) == (verdict, 25.8)


def test_a_wrong_gradient_is_found_in_real_steps(monkeypatch):
    """2 % more in the gradients of biases; the same steps are right without it."""
    cpu = torch.device("cpu")
    work = steps.Work(16, 1, perceptual=False, model=steps.ModelConfig(init="default", channels=(8, 16),
                      layers_per_block=1, norm_groups=4))  # fmt: skip
    expected = steps.run_steps(steps.Ours(work, cpu, torch.float64), 2)
    assert steps.measure("fp32", work, cpu, expected, {})["verdict"] == "ok"
    compute = steps.compute_gradients

    def wrong(networks, *arguments):
        sums = compute(networks, *arguments)
        for name, parameter in networks.autoencoder.named_parameters():
            parameter.grad.mul_(1.02 if name.endswith("bias") else 1.0)
        return sums

    monkeypatch.setattr(steps, "compute_gradients", wrong)
    row = steps.measure("fp32", work, cpu, expected, {})
    assert row["verdict"] == "WRONG"
    assert "bias" in row["shown"]
    assert steps.summarize([row])[1] == "WRONG"


def python_case(name: str, program: str, read=lambda folder, printed: dict(OK), **options) -> Case:
    return Case(name, "Does it work?", [sys.executable, "-c", program], 1.5, 0.1, read, **options)


IGNORES_SIGTERM = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
program = "import pathlib, time\\nwhile True: pathlib.Path(%r).touch(); time.sleep(0.1)" % sys.argv[1]
subprocess.Popen([sys.executable, "-c", program])
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_case_is_ended_at_its_limit_with_its_children(tmp_path):
    alive = tmp_path / "alive"
    case = python_case("endless", IGNORES_SIGTERM)
    case.words.append(str(alive))
    found = card.run(case, tmp_path / "endless", 2.0)
    assert found["verdict"] == "ok, ended at its limit"  # it has left figures
    assert 2.0 <= found["seconds"] < 2.0 + 2 * card.KILL_SECONDS
    assert alive.exists()
    alive.unlink()
    time.sleep(0.5)
    assert not alive.exists()  # the child has ended too


MACHINE = {"card": "H100", "free_gib": 79.0, "computes": True}


def test_cases_run_until_the_budget_is_used(tmp_path, monkeypatch):
    cases = [
        python_case("wrong", "print(3)", lambda folder, printed: {"line": printed, "verdict": "WRONG"}),
        python_case("bad", "raise SystemExit('no card')"),
        replace(python_case("slow", "pass"), least=600.0),
    ]
    monkeypatch.setattr(card, "PROBE", f"print({json.dumps(json.dumps(MACHINE))})")
    monkeypatch.setattr(card, "build_cases", lambda *given: cases)
    monkeypatch.setattr(card, "prepare_images", lambda *given: None)
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")  # main() sets it
    assert card.main(["--seconds", "60", "--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "results.json").read_text())
    states = [case["verdict"] for case in found["cases"].values()]
    assert states == ["WRONG", "FAILED", "not reached"]
    assert found["cases"]["bad"]["line"] == "exit code 1: no card | figures"


def test_flags_of_all_cases_exist():
    actions = {f"--{name}" for name in (*all_options(), *ActionConfig.__dataclass_fields__)}
    cases = card.build_cases(MACHINE, ROOT, small=True)
    trained = [case for case in cases if "train_vae.py" in case.words]
    assert len(trained) == 5
    for case in trained:
        flags = {word.replace("--no-", "--") for word in case.words if word.startswith("--")}
        assert flags <= actions, case.name
    assert "0.3810" in trained[0].words  # of an H100's memory: as much as an RTX 5090 has
    names = [case.name for case in card.build_cases({**MACHINE, "free_gib": 31.0}, ROOT, small=False)]
    assert "whole-card" not in names
    assert [case.name for case in card.choose(cases, ["tests", "facts"])] == ["tests", "facts"]
    with pytest.raises(SystemExit, match="--only nine: the cases here are facts, kernels"):
        card.choose(cases, ["nine"])


@pytest.mark.slow
@NEEDS_NULL_GPU[1]
def test_cases_run_on_the_null_gpu(tmp_path):
    """A program of benchmarks/on_card, the trainer, and a trace."""
    words = ("--small", "--seconds", "560", "--only", "facts", "learns", "where")
    done = run_on_null_gpu("benchmarks/card.py", "--out", str(tmp_path), *words, gib=80)
    found = json.loads((tmp_path / "results.json").read_text())["cases"]
    states = {name: case["verdict"] for name, case in found.items()}
    expected = {"facts": "-", "learns": "no arithmetic", "where": "no arithmetic"}
    assert states == expected, done.stdout
    assert found["learns"]["line"].startswith("32 steps, ")
    assert {path.name for path in tmp_path.iterdir()} == {*card.FILES, MARKER_NAME}
    assert done.stdout.endswith((tmp_path / "summary.txt").read_text())
    assert "THIS DEVICE COMPUTES NOTHING" in done.stdout
