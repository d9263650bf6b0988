"""A whole search: its trials, its files, pruning, failures, and mistakes in its command."""

import json

import optuna
import pytest

import tune_vae
from tests.harness.small_vae import SMALL, write_vae
from tests.harness.stub_trainer import STEPS, rows_of
from vae.config.flags import parse_flags
from vae.config.tune_flags import TuneConfig
from vae.system.errors import UserError
from vae.tuning import search

RATE = {"learning_rate": {"low": 1e-6, "high": 1e-1, "log": True}}


@pytest.mark.slow
def test_search_finds_the_better_rate_and_reports_it(tune, capsys):
    folder = tune(RATE, "--trials", "12", "--pruner", "none")
    rows = rows_of(folder)
    assert [row["trial"] for row in rows] == list(range(12))
    assert rows[0]["defaults"]
    assert rows[0]["params"] == {"learning_rate": 1e-4}
    assert len({row["params"]["learning_rate"] for row in rows}) == 12
    best = min(rows, key=lambda row: row["values"][0])
    assert best["values"][0] == pytest.approx(20, abs=0.5)  # the optimum of the stub is at 1e-3
    assert best["values"][0] < rows[0]["values"][0] - 2  # 25 - 5 / e
    assert f"best    trial {best['trial']}: loss={best['values'][0]:.5g}" in capsys.readouterr().out
    given = parse_flags(["--config", str(folder / "best.json")])
    assert given["learning_rate"] == best["params"]["learning_rate"]
    assert "output_dir" not in given
    assert {path.name for path in folder.glob("*.png")} == {
        "history_loss.png",
        "importances_loss.png",
        "slices_loss.png",
        "validations.png",
    }


def test_same_command_extends_a_search_and_finished_trials_stay(tune):
    before = rows_of(tune(RATE, "--trials", "2"))
    assert rows_of(tune(RATE, "--trials", "2")) == before
    rows = rows_of(tune(RATE, "--trials", "4"))
    assert len(rows) == 4
    assert rows[:2] == before


@pytest.mark.slow
def test_pruned_trials_stop_early_and_the_defaults_never(tune, monkeypatch):
    monkeypatch.setenv("STUB_SECONDS", "0.04")
    rows = rows_of(tune(RATE, "--trials", "8", "--pruner", "asha", "--min_steps", "2"))
    pruned = [row for row in rows if row["state"] == "pruned"]
    assert pruned
    assert {row["reason"] for row in pruned} == {"stopped early"}
    assert rows[0]["state"] == "complete"


def test_pruners_count_optimizer_steps(tune):
    """A third of the trials goes on at a ninth and a third of the steps of the first complete trial."""
    folder = tune(RATE, "--trials", "1")
    files = {"config": str(folder.parent / "base.json"), "space": str(folder.parent / "space.json")}
    config = TuneConfig(output_dir=str(folder), pruner="asha", **files)
    pruner = search.Search(config, search.check_command(config))._pruner()
    assert isinstance(pruner, optuna.pruners.SuccessiveHalvingPruner)
    assert (pruner._min_resource, pruner._reduction_factor) == (STEPS // 9, 3)


def test_trials_have_the_shape_of_init_from(base, tmp_path):
    options = {**json.loads(base.read_text()), "init_from": str(write_vae(tmp_path / "vae"))}
    options |= {"z_channels": SMALL.z_channels, "image_size": 36}  # a multiple of its 4, not of 8
    base.write_text(json.dumps(options))
    found = search.check_command(TuneConfig(output_dir=str(tmp_path / "search"), config=str(base)))
    assert found.config.model.channels == SMALL.channels


@pytest.mark.slow
def test_out_of_memory_divergence_and_rejection_are_pruned_not_failed(tune):
    folder = tune({"z_channels": [4, 5, 6, 7], **RATE}, "--trials", "16", "--seed", "1")
    reasons = {row["params"]["z_channels"]: (row["state"], row.get("reason")) for row in rows_of(folder)}
    assert reasons == {
        4: ("complete", None),
        5: ("pruned", "out of memory in a validation (exit code 1)"),
        6: ("pruned", "loss is not finite (exit code 76)"),
        7: ("pruned", "--image_size 64 needs 99 GiB (exit code 78)"),
    }


def test_a_failed_trial_is_one_line_and_the_search_goes_on(tune, capsys):
    rows = rows_of(tune({"z_channels": [4, 64, 65, 66, 67]}, "--trials", "6"))
    assert {row["state"] for row in rows} == {"complete", "fail"}
    assert len(rows) == 6
    printed = capsys.readouterr()
    assert "[the disk is full (exit code 1)]" in printed.out
    assert "Traceback" not in printed.out + printed.err


def test_defaults_that_cannot_be_trained_end_the_search(tune, base):
    base.write_text(json.dumps({**json.loads(base.read_text()), "z_channels": 64}))
    with pytest.raises(UserError, match=r"the defaults cannot be trained: the disk is full.*0000\.log"):
        tune(RATE)


def test_several_objectives_give_a_front_without_pruning(tune, capsys):
    folder = tune(RATE, "--trials", "5", "--objective", "psnr", "ssim")
    rows = rows_of(folder)
    assert {row["state"] for row in rows} == {"complete"}
    assert all(len(row["values"]) == 2 for row in rows)
    assert "front   trials" in capsys.readouterr().out  # the stub's SSIM is the inverse of its PSNR
    assert (folder / "pareto_front.png").exists()


def test_the_loss_of_every_trial_has_the_weights_of_the_defaults(tune):
    """A trial with a smaller weight would have a smaller loss, whatever its images are like."""
    rows = rows_of(tune({"reconstruction_weight": {"low": 0.1, "high": 1.0}}, "--trials", "4"))
    assert len({row["params"]["reconstruction_weight"] for row in rows}) == 4
    assert len({tuple(row["values"]) for row in rows}) == 1


@pytest.mark.parametrize(
    ("space", "word"),
    [
        ({"reconstruction_loss": ["l1", "mse"]}, "reconstruction_loss"),
        ({"reconstruction_weight": [0.0, 1.0]}, "leave 0"),
    ],
)
def test_a_space_that_changes_what_the_loss_measures_needs_another_objective(tune, space, word):
    with pytest.raises(UserError, match=word):
        tune(space, "--trials", "1")
    assert rows_of(tune(space, "--trials", "1", "--objective", "psnr"))[0]["state"] == "complete"


def test_options_of_a_trial_are_those_of_its_run(tune):
    folder = tune({"channels": [[128, 256, 512, 512], [64, 64]], **RATE}, "--trials", "4", "--pruner", "none")
    for row in rows_of(folder):
        options = json.loads((folder / "trials" / f"{row['trial']:04d}" / "options.json").read_text())
        assert [int(width) for width in options["channels"]] == row["params"]["channels"]
        assert options["split_seed"] == ["0"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("objective", "pnsr"), ("objective", "lpips")),  # LPIPS needs a --perceptual_weight
        *(("progressive", "32:1:2"), ("val_split", "0"), ("data_path", "nowhere")),
    ],
)
def test_mistakes_name_their_flag(base, tmp_path, name, value):
    words = ["--config", str(base), "--output_dir", str(tmp_path / "search"), f"--{name}", value]
    with pytest.raises(UserError, match=name):
        tune_vae.main(words)
    assert not (tmp_path / "search").exists()
