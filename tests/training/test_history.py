"""History compares validations of one image size, names the best checkpoint and warns once per stage."""

import math

import pytest

from tests.harness.training_runs import records
from vae.training.run import train
from vae.training.validation import History


def metrics(psnr: float, image_size: int = 32) -> dict[str, float]:
    return {"epoch": 1, "image_size": image_size, "psnr": psnr}


@pytest.mark.parametrize(
    ("values", "best", "without_gain"),
    [((20.0, 22.0, 21.0, 22.0), 22.0, 2), ((20.0, 19.0, 18.0, 20.5), 20.5, 0)],
    ids=["equal is no gain", "gain"],
)
def test_best_validation_has_the_highest_psnr(values, best, without_gain):
    history = History()
    for number, psnr in enumerate(values, start=1):
        history.add_epoch(metrics(psnr))
        history.add_checkpoint(f"checkpoint_epoch_{number}.pt", metrics(psnr))
    assert (history.best, history.without_gain) == (metrics(best), without_gain)
    name = f"checkpoint_epoch_{values.index(best) + 1}.pt"
    assert (history.best_checkpoint, history.best_checkpoint_psnr) == (name, best)


def test_another_image_size_replaces_the_best_validation_and_checkpoint():
    history = History()
    history.add_epoch(metrics(30.0, image_size=16))
    history.add_checkpoint("checkpoint_epoch_1.pt", metrics(30.0, image_size=16))
    history.add_epoch(metrics(20.0, image_size=32))
    history.add_checkpoint("checkpoint_epoch_2.pt", metrics(20.0, image_size=32))
    assert history.best == metrics(20.0, image_size=32)
    assert (history.best_checkpoint, history.best_checkpoint_psnr) == ("checkpoint_epoch_2.pt", 20.0)


@pytest.mark.parametrize("psnr", [0.0, -3.0])
def test_psnr_up_to_zero_is_a_value(psnr):
    history = History()
    history.add_checkpoint("checkpoint_epoch_1.pt", metrics(psnr))
    history.add_checkpoint("checkpoint_epoch_2.pt", metrics(psnr - 1))
    assert history.best_checkpoint == "checkpoint_epoch_1.pt"


@pytest.mark.parametrize("unmeasured", [{"epoch": 1, "image_size": 32}, metrics(math.nan)])
def test_validation_without_psnr_is_never_the_best(unmeasured):
    """All validation images were unusable, or the reconstructions were not finite."""
    history = History()
    for validation in (metrics(20.0), unmeasured, metrics(19.0)):
        history.add_epoch(validation)
        history.add_checkpoint("checkpoint_epoch_1.pt", validation)
    assert history.best == metrics(20.0)
    assert history.without_gain == 2
    assert history.best_checkpoint_psnr == 20.0
    history = History()
    history.add_epoch(unmeasured)
    history.add_checkpoint("checkpoint_epoch_1.pt", unmeasured)
    assert history.best_checkpoint is None
    history.add_epoch(metrics(20.0))
    assert history.best == metrics(20.0)


def test_stage_starts_without_count_and_without_start_psnr():
    history = History(best=metrics(20.0), without_gain=3, start_psnr=19.0)
    history.begin_stage()
    assert (history.without_gain, history.start_psnr) == (0, None)
    assert history.best == metrics(20.0)


def test_start_of_a_stage_is_a_candidate_for_best_and_counts_for_early_stopping():
    history = History()
    history.add_epoch(metrics(30.0, image_size=16))
    history.add_checkpoint("checkpoint_epoch_1.pt", metrics(30.0, image_size=16))
    history.add_start(metrics(25.0), "checkpoint_epoch_1.pt")
    for number, psnr in enumerate((20.0, 24.0, 25.0), start=2):
        history.add_epoch(metrics(psnr))
        history.add_checkpoint(f"checkpoint_epoch_{number}.pt", metrics(psnr))
        assert (history.best, history.best_is_start) == (metrics(25.0), True)
        assert (history.best_checkpoint, history.best_checkpoint_psnr) == ("checkpoint_epoch_1.pt", 25.0)
    assert history.without_gain == 3
    history.add_epoch(metrics(26.0))
    assert (history.best_is_start, history.without_gain) == (False, 0)


def test_start_without_a_checkpoint_in_the_folder_is_no_best_checkpoint():
    history = History()
    history.add_start(metrics(25.0), None)
    history.add_checkpoint("checkpoint_epoch_1.pt", metrics(20.0))
    assert (history.best_checkpoint, history.best_checkpoint_psnr) == ("checkpoint_epoch_1.pt", 20.0)


def test_start_at_the_same_size_does_not_replace_a_better_epoch():
    history = History()
    for psnr in (30.0, 29.0):
        history.add_epoch(metrics(psnr))
    history.begin_stage()
    history.add_start(metrics(29.0), "checkpoint_epoch_2.pt")
    assert (history.best, history.best_is_start, history.without_gain) == (metrics(30.0), False, 0)


def test_decrease_is_reported_once_with_its_remedy():
    history = History(start_psnr=25.0)
    assert history.decrease_warning(25.0, "train longer") is None
    assert history.decrease_warning(24.92, "train longer") is None  # too little to act on
    warning = history.decrease_warning(24.0, "train longer")
    for words in ("24.00 dB", "25.00 dB", "train longer"):
        assert words in warning
    assert history.decrease_warning(23.0, "train longer") is None
    assert History().decrease_warning(1.0, "train longer") is None  # no start was measured


# ---- real runs ----------------------------------------------------------------------------------------


def psnr_warnings(given: dict, capsys) -> list[str]:
    """The warnings about PSNR that a run prints."""
    capsys.readouterr()
    assert train(given) == 0
    return [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("WARNING: PSNR ") and "is below" in line
    ]


@pytest.mark.slow
def test_run_with_falling_psnr_warns_once(tiny, tmp_path, capsys):
    given = {
        **tiny,
        "init": "warm",
        "learning_rate": 0.01,
        "warmup_epochs": 0.0,
        "num_epochs": 3,
        "max_steps": 8,
    }
    (warning,) = psnr_warnings(given, capsys)
    found = records(tmp_path / "run", "validation")
    worse = next(record for record in found if record["psnr"] < found[0]["psnr"])
    assert len(found) == 4  # all but the first are worse
    assert f"PSNR {worse['psnr']:.2f} dB is below the {found[0]['psnr']:.2f} dB" in warning
    assert "--learning_rate (now 0.01)" in warning
    # The stage has warned already.
    assert psnr_warnings({**given, "resume_from": "latest", "max_steps": None}, capsys) == []
