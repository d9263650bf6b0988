"""A whole search: its order, its files, pruning, failures, and what it reports."""

import json
import math

import optuna
import pytest

from tests.harness.stub_trainer import STEPS, rows_of, starts_of
from vae.config.flags import parse_flags
from vae.config.tune_flags import DIRECTIONS, TuneConfig
from vae.system.errors import UserError
from vae.tuning import page, search, study
from vae.tuning.study import DEFAULTS

RATE = {"learning_rate": {"low": 1e-6, "high": 1e-1, "log": True}}


@pytest.mark.slow
def test_search_finds_the_better_rate_and_reports_it(tune, capsys):
    folder = tune(RATE, "--trials", "12", "--pruner", "none")
    rows = rows_of(folder)
    assert [row["trial"] for row in rows] == list(range(12))
    assert rows[0]["name"] == DEFAULTS
    assert rows[0]["params"] == {"learning_rate": 1e-4}
    assert rows[0]["difference"] == {"psnr": 0}
    assert (rows[1]["name"], rows[1]["params"]) == ("demo", {"learning_rate": 1e-3})  # the known recipe
    best = max(rows, key=lambda row: row["values"]["psnr"])
    assert best["values"]["psnr"] == pytest.approx(25, abs=0.05)  # the optimum of the stub is at 1e-3
    for row in rows:  # noise beside every difference: 0.1 dB / 5 times 7, 14, 21 modulo 5
        assert row["noise"]["psnr"] == pytest.approx(0.1 * 1.527525 / 5)
    output = capsys.readouterr().out
    assert "better by 3.1" in output  # 5 - 5 / e
    assert "NO GAIN" not in output
    assert "(noise 0.03)" in output
    given = parse_flags(["--config", str(folder / "best.json")])
    assert given["learning_rate"] == best["params"]["learning_rate"]
    assert "output_dir" not in given
    assert "better by 3.1" in (folder / "report.html").read_text()


def test_same_command_continues_and_finished_trials_stay(tune, capsys):
    folder = tune(RATE, "--trials", "3")
    before = rows_of(folder)
    capsys.readouterr()
    tune(RATE, "--trials", "5")
    table = capsys.readouterr().out.partition("against the defaults")[2]
    assert all(f"\n    {number} " in table for number in range(5))  # the earlier ones, too
    assert rows_of(folder)[:3] == before
    assert len(rows_of(folder)) == 5
    assert all(len(starts_of(path)) == 1 for path in folder.glob("repeats/defaults_*"))


@pytest.mark.slow
def test_pruned_trials_stop_early_and_the_defaults_never(tune, monkeypatch):
    monkeypatch.setenv("STUB_SECONDS", "0.04")
    folder = tune(RATE, "--trials", "8", "--pruner", "asha", "--min_steps", "2")
    rows = rows_of(folder)
    pruned = [row for row in rows if row["state"] == "pruned"]
    assert pruned
    assert all(row["reason"] == "stopped early" and 2 <= row["steps"] < STEPS for row in pruned)
    for row in pruned:  # against the same step of the defaults, in the stub's formula
        defaults = 20 + 5 / math.e * row["steps"] / STEPS
        assert row["difference"]["psnr"] == pytest.approx(row["values"]["psnr"] - defaults)
    assert (rows[0]["name"], rows[0]["steps"]) == (DEFAULTS, STEPS)


@pytest.mark.parametrize(
    ("trials", "objectives", "pruner", "sampler"),
    [
        (24, ("psnr",), "none", "RandomSampler"),
        (25, ("psnr",), "asha", "TPESampler"),
        (25, ("psnr", "ssim"), "none", "TPESampler"),
    ],
)
def test_short_search_is_random_and_stops_no_trial(trials, objectives, pruner, sampler):
    config = TuneConfig(output_dir="unused", trials=trials, objective=objectives)
    assert search.Search(config, None, None).pruner == pruner
    assert type(study._sampler(trials, seed=0)).__name__ == sampler


def test_hyperband_counts_optimizer_steps(tune):
    rows = rows_of(tune(RATE, "--trials", "4", "--pruner", "hyperband", "--min_steps", "3"))
    assert all(row["steps"] >= 3 for row in rows)
    assert rows[0]["state"] == "complete"


@pytest.mark.slow
def test_out_of_memory_divergence_and_rejection_are_pruned_not_failed(tune):
    folder = tune({"z_channels": [4, 5, 6, 7], **RATE}, "--trials", "16", "--seed", "1")
    reasons = {row["params"]["z_channels"]: (row["state"], row["reason"]) for row in rows_of(folder)}
    assert reasons[5] == ("pruned", "out of memory: out of memory in a validation")
    assert reasons[6] == ("pruned", "diverged: loss is not finite")
    assert reasons[7] == ("pruned", "rejected before training: --image_size 64 needs 99 GiB")


def test_several_objectives_give_a_front_without_pruning(tune, capsys):
    folder = tune(RATE, "--trials", "5", "--objective", "psnr", "ssim")
    rows = rows_of(folder)
    assert {row["state"] for row in rows} == {"complete"}
    assert all(set(row["values"]) == {"psnr", "ssim"} for row in rows)
    assert "front   trials" in capsys.readouterr().out  # the stub's SSIM is the inverse of its PSNR


def test_three_failures_in_a_row_end_the_search(tune):
    with pytest.raises(UserError, match=r"3 trials in a row.*disk is full"):
        tune({"z_channels": [4, 64, 65, 66, 67, 68, 69]}, "--trials", "30")


@pytest.mark.parametrize(("objectives", "trials"), [(["psnr"], 10), (["psnr", "lpips"], 10), (["psnr"], 9)])
def test_page_has_optunas_plots(objectives, trials):
    a_study = optuna.create_study(directions=[DIRECTIONS[name] for name in objectives])
    for number in range(trials):
        a_study.enqueue_trial({"learning_rate": 1e-4 * (number + 1)})
        trial = a_study.ask()
        value = trial.suggest_float("learning_rate", 1e-5, 1e-1, log=True)
        a_study.tell(trial, [value, *(-value for _ in objectives[1:])])
    plots = page._plots(a_study, objectives)
    names = " ".join(plot.title for plot in plots)
    for wanted in ["History", "Importance", "Slices", "Pareto" if len(objectives) > 1 else "Validations"]:
        assert wanted in names
    without = [f"{plot.title}: {plot.note}" for plot in plots if plot.uri is None]
    late = [text for text in without if not text.startswith("Validations")]  # no trial has reported any here
    reason = "not yet: 9 of 10 complete trials"
    expected = [f"Importance for psnr: {reason}", f"Slices of psnr: {reason}"] if trials < 10 else []
    assert late == expected


def test_options_of_a_trial_are_those_of_its_run(tune):
    folder = tune({"channels": [[128, 256, 512, 512], [64, 64]], **RATE}, "--trials", "4", "--pruner", "none")
    for row in rows_of(folder):
        options = json.loads((folder / row["folder"] / "options.json").read_text())
        assert options["channels"] == row["params"]["channels"]
        assert options["split_seed"] == 0
    seeds = {json.loads(path.read_text())["seed"] for path in folder.glob("repeats/defaults_*/options.json")}
    assert seeds == {1, 2, 3}  # none of them is that of the trials
