"""--val_freq decides which epochs are validated; --checkpoint_freq only decides which are saved."""

import pytest

from tests.harness.training_runs import last_checkpoint, records
from vae.training.run import train

QUICK = {"init": "default", "num_epochs": 5, "keep_checkpoints": 10}


def validated_epochs(folder) -> list[int]:
    return [record["epoch"] for record in records(folder, "validation")]


@pytest.mark.parametrize(
    ("val_freq", "checkpoint_freq", "validated", "saved"),
    [
        (2, 1, [0, 2, 4, 5], [1, 2, 3, 4, 5]),
        pytest.param(1, 3, [0, 1, 2, 3, 4, 5], [3, 5], marks=pytest.mark.slow),
        pytest.param(9, 2, [0, 5], [2, 4, 5], marks=pytest.mark.slow),
    ],
)
def test_epochs_that_are_validated_and_saved(tiny, tmp_path, val_freq, checkpoint_freq, validated, saved):
    given = {**tiny, **QUICK, "val_freq": val_freq, "checkpoint_freq": checkpoint_freq}
    assert train(given) == 0
    assert validated_epochs(tmp_path / "run") == validated
    names = {path.name for path in (tmp_path / "run").glob("*.pt")}
    assert names == {f"checkpoint_epoch_{epoch}.pt" for epoch in saved}


def test_best_checkpoint_is_among_the_validated(tiny, tmp_path):
    assert train({**tiny, **QUICK, "val_freq": 2, "num_epochs": 3}) == 0
    history = last_checkpoint(tmp_path / "run")["history"]
    by_epoch = {record["epoch"]: record["psnr"] for record in records(tmp_path / "run", "validation")}
    best = max((2, 3), key=by_epoch.__getitem__)
    assert history["best_checkpoint"] == f"checkpoint_epoch_{best}.pt"
    assert history["best_checkpoint_psnr"] == by_epoch[best]


def test_last_epoch_of_every_stage_is_validated(tiny, tmp_path):
    given = {**tiny, "init": "default", "progressive": "32:1:4,16:2:4", "val_freq": 10}
    assert train(given) == 0
    found = [(record["epoch"], record["image_size"]) for record in records(tmp_path / "run", "validation")]
    assert found == [(0, 32), (1, 32), (1, 16), (3, 16)]
