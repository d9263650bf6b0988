"""Quick validations between the others: their record, their warning, and what they leave unchanged."""

import math

import pytest

from tests.harness.training_runs import assert_same, last_checkpoint, records, reproducible_records
from vae.training.run import train
from vae.training.validation import History, ValidationSet


def measured(psnr: float, images: int = 8) -> dict[str, float]:
    return {"image_size": 32, "images": images, "psnr": psnr}


def warned(history: History, *values: float) -> list[bool]:
    return [history.regression_warning(measured(value), 1.0) is not None for value in values]


def test_one_warning_for_each_fall():
    history = History()
    assert warned(history, 20.0, 22.0, 21.1, 20.9, 20.0, 21.5, 20.5, math.nan) == [
        *(False, False, False, True),  # more than 1 dB below 22
        *(False, False, True, False),  # risen and fallen again; then it stays below
    ]
    assert history.quick_best == measured(22.0)
    warning = History(quick_best=measured(22.0)).regression_warning(measured(math.nan), 1.5)
    for token in ("--regression_psnr 1.5", "22.00 dB", "--learning_rate"):
        assert token in warning


def test_other_images_are_not_compared():
    history = History()
    assert warned(history, 20.0) == [False]
    assert history.regression_warning(measured(10.0, images=4), 1.0) is None
    assert history.regression_warning({**measured(5.0, images=4), "image_size": 64}, 1.0) is None
    assert history.regression_warning({"image_size": 64, "images": 4}, 1.0) is not None  # no usable image


def test_its_images_are_spread_over_the_validation_set():
    everything = ValidationSet(images=[], count=10)
    assert everything.spread(4).chosen == (0, 2, 5, 7)
    assert everything.spread(99).chosen == tuple(range(10))


@pytest.mark.slow
def test_it_measures_beside_the_validation_set_and_changes_nothing(tiny, tmp_path):
    """6 steps in 2 epochs."""
    changes = {"with": {"quick_val_images": 2, "quick_val_steps": 2, "regression_psnr": 0}, "without": {}}
    for name, change in changes.items():
        assert train({**tiny, **change, "output_dir": str(tmp_path / name)}) == 0
    found = records(tmp_path / "with", "quick_validation")
    assert [(record["step"], record["images"]) for record in found] == [(0, 2), (2, 2), (4, 2), (6, 2)]
    everything = records(tmp_path / "with", "validation")
    assert [(record["step"], record["images"]) for record in everything] == [(0, 4), (3, 4), (6, 4)]
    assert all(record["images_per_second"] > 0 for record in (*found, *everything))
    assert records(tmp_path / "without", "quick_validation") == []  # shorter than --quick_val_steps
    measured_too, plain = (last_checkpoint(tmp_path / name) for name in changes)
    assert measured_too["history"]["quick_best"]["psnr"] == max(record["psnr"] for record in found)
    for part in ("model", "ema", "optimizers", "position"):
        assert_same(measured_too[part], plain[part], part)
    assert measured_too["history"]["best"] == plain["history"]["best"]
    steps = [reproducible_records(tmp_path / name, "train") for name in changes]
    assert_same(*steps, "steps")


@pytest.mark.slow
def test_a_fall_validates_all_images_at_once(tiny, tmp_path, capsys):
    """3 steps per epoch; the steps are too large, so PSNR falls."""
    given = {
        **tiny,
        "init": "warm",
        "learning_rate": 0.03,
        "warmup_epochs": 0.0,
        "quick_val_steps": 1,
        "regression_psnr": 0.1,
    }
    assert train({**given, "val_freq": 1}) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "--regression_psnr 0.1" in line]
    assert len(lines) == 1
    steps = [record["step"] for record in records(tmp_path / "run", "validation")]
    assert steps == [0, 1, 3, 6]
    assert last_checkpoint(tmp_path / "run")["history"]["best"]["epoch"] == 0  # the start; not step 1
