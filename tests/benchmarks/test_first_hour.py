"""The first hour on a card: parts that fail, end late and continue, and what is read of their output."""

import json
import sys
from dataclasses import fields

import pytest

from benchmarks import first_hour, first_hour_parts
from benchmarks.first_hour_parts import NO_ARITHMETIC, PARTS, Case, Machine
from tests.harness.runs import ROOT, run_script
from vae.config.options import ActionConfig, all_options

CARD = Machine(has_card=True, computes=True, quick=False, data_path=ROOT)


def case(name: str, program: str, **options) -> Case:
    return Case(name, [sys.executable, "-c", program], lambda folder, printed: json.loads(printed), **options)


def run_main(monkeypatch, folder, *cases: Case, facts=(), minutes="8") -> tuple[int, dict]:
    """The program with one part of these cases, on a described machine."""

    def questions(machine, folder):
        """Does it work?"""
        return list(cases)

    machine = {"cpu": "a CPU", "card": "H100", "cuda": "13", "cudnn": 9, "versions": {"torch": "2.15"}}
    machine |= {"commit": "abc", "date": "today", "computes": True, **dict(facts)}
    program = f"print({json.dumps(json.dumps(machine))})"
    monkeypatch.setattr(first_hour, "DESCRIBE", program)
    monkeypatch.setattr(first_hour, "PARTS", {"part": questions})
    words = ["--out", str(folder), "--data_path", str(ROOT), "--minutes", minutes]
    monkeypatch.setattr(sys, "argv", ["first_hour.py", *words])
    code = first_hour.main()
    return code, json.loads((folder / "part.json").read_text())["cases"]


def test_a_case_that_fails_does_not_stop_the_others_and_runs_again(tmp_path, monkeypatch, capsys):
    good = case("good", 'print("{\\"figure\\": 3}")')
    bad = case("bad", "raise RuntimeError('CUDA error')")
    wrong = case("wrong", 'print("{\\"verdict\\": \\"WRONG\\"}"); raise SystemExit(1)', codes=(0, 1))
    garbled = case("garbled", "print('no JSON')")
    code, found = run_main(monkeypatch, tmp_path, bad, garbled, good, wrong)
    states = {name: entry["status"] for name, entry in found.items()}
    assert states == {"bad": "failed", "garbled": "failed", "good": "done", "wrong": "done"}
    assert found["bad"]["error"] == "exit code 1: RuntimeError: CUDA error"
    assert found["good"]["result"] == {"figure": 3}
    assert code == 1
    assert "run again: part, wrong: WRONG" in capsys.readouterr().out
    assert "| good | done | 3 |" in (tmp_path / "measurements.md").read_text()

    again = [case("good", "raise RuntimeError('kept, so it does not run')"), case("bad", "print({})")]
    code, found = run_main(monkeypatch, tmp_path, *again)
    assert (code, found["good"]["result"], found["bad"]["status"]) == (0, {"figure": 3}, "done")


def test_a_part_ends_at_its_limit(tmp_path, monkeypatch):
    endless = case("endless", "import time; time.sleep(600)")
    code, found = run_main(monkeypatch, tmp_path, endless, case("next", "print({})"), minutes="0.01")
    assert "--minutes" in found["endless"]["error"]
    assert found["endless"]["seconds"] < 60
    assert found["next"]["status"] == "not reached"
    assert code == 1


@pytest.mark.parametrize("changed", [{"card": "H200"}, {"versions": {"torch": "3"}}])
def test_results_of_different_machines_are_not_mixed(tmp_path, monkeypatch, changed):
    run_main(monkeypatch, tmp_path, case("good", "print({})"))
    with pytest.raises(SystemExit, match=f"{next(iter(changed))}.*use another folder"):
        run_main(monkeypatch, tmp_path, facts=changed)


def write_losses(run, losses) -> None:
    run.mkdir(parents=True)
    records = [{"kind": "train", "step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize(
    ("losses", "computes", "verdict"),
    [
        ([1.01, 2.0], True, "ok"),
        ([1.03, 2.0], True, "WRONG"),
        ([None, 2.0], True, "WRONG"),
        ([0.0, 0.0], False, NO_ARITHMETIC),
    ],
)
def test_losses_of_a_card_are_those_of_the_cpu(tmp_path, losses, computes, verdict):
    write_losses(tmp_path / "cpu" / "run", [1.0, 2.0])
    write_losses(tmp_path / "fp32" / "run", losses)
    machine = Machine(has_card=True, computes=computes, quick=False, data_path=ROOT)
    cases = {case.name: case for case in PARTS["correctness"](machine, tmp_path)}
    assert cases["fp32"].read(tmp_path / "fp32", "")["verdict"] == verdict


def test_losses_without_those_of_the_cpu_are_a_failure(tmp_path):
    write_losses(tmp_path / "fp32" / "run", [1.0])
    cases = {case.name: case for case in PARTS["correctness"](CARD, tmp_path)}
    with pytest.raises(ValueError, match="0 of the CPU"):
        cases["fp32"].read(tmp_path / "fp32", "")


@pytest.mark.parametrize(
    ("printed", "verdict"),
    [
        ("...\n3 passed, 4 deselected in 0.5s\n", "ok"),
        ("FAILED tests/test_x.py::test_y - assert\n1 failed, 3 passed in 0.5s\n", "WRONG"),
        ("ERROR tests/test_x.py - ImportError\n1 error in 0.5s\n", "WRONG"),
    ],
)
def test_verdict_of_the_tests(tmp_path, printed, verdict):
    (case,) = PARTS["tests"](CARD, tmp_path)
    assert case.read(tmp_path, printed)["verdict"] == verdict


def test_figures_of_a_run_leave_out_its_warmup(tmp_path):
    rows = [(3, 1.0), (6, 2.0), (9, 30.0), (12, 32.0), (15, 50.0)]
    records = [{"kind": "train", "step": step, "loss": 1.0, "images_per_second": rate} for step, rate in rows]
    records.append({"kind": "memory", "predicted_peak_gib": 2.0, "memory_reserved_gib": 1.9})
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(text)
    found = first_hour_parts._figures(tmp_path)
    assert (found["images_per_second"], found["reserved_over_predicted"], found["steps"]) == (32.0, 0.95, 15)


def test_flags_of_all_cases_exist(tmp_path):
    actions = [item.name for item in fields(ActionConfig)]
    known = {f"--{name}" for name in (*all_options(), *actions)}
    for build in PARTS.values():
        for found in build(CARD, tmp_path):
            if "train_vae.py" in found.words:
                flags = {word for word in found.words if word.startswith("--")}
                flags -= {"--tool", "--error-exitcode"}  # of compute-sanitizer
                assert {flag.replace("--no-", "--") for flag in flags} <= known, found.name


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        (["--parts", "nine"], ["--parts", "nine"]),
        (["--data_path", "no_such_folder"], ["--data_path no_such_folder", "not a folder"]),
        ([], ["no CUDA device", "--quick"]),
    ],
)
def test_user_mistakes_are_one_line(tmp_path, monkeypatch, capsys, words, tokens):
    monkeypatch.setattr(first_hour, "DESCRIBE", "print('{}')")
    monkeypatch.setattr(sys, "argv", ["first_hour.py", "--out", str(tmp_path / "out"), *words])
    with pytest.raises(SystemExit) as caught:
        first_hour.main()
    printed = f"{capsys.readouterr().err}{caught.value}"
    assert all(token in printed for token in tokens), printed


@pytest.mark.slow
def test_training_and_resume_on_a_cpu(tmp_path):
    words = ("--out", str(tmp_path), "--quick", "--parts", "training")
    done = run_script("benchmarks/first_hour.py", *words)
    found = json.loads((tmp_path / "training.json").read_text())["cases"]
    assert [entry["result"]["steps"] for entry in found.values()] == [4, 6], done.stdout
