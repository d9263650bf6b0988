"""--val_freq decides which epochs are validated; --checkpoint_freq only decides which are saved."""

from tests.harness.training_runs import last_checkpoint, records
from vae.training.run import train

QUICK = {"init": "default", "num_epochs": 5, "keep_checkpoints": 10}


def test_epochs_that_are_validated_and_saved(tiny, tmp_path):
    assert train({**tiny, **QUICK, "val_freq": 2, "checkpoint_freq": 3}) == 0
    assert [record["epoch"] for record in records(tmp_path / "run", "validation")] == [0, 2, 4, 5]
    names = {path.name for path in (tmp_path / "run").glob("*.pt")}
    assert names == {f"checkpoint_epoch_{epoch}.pt" for epoch in (3, 5)}


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
