"""Corrupt training images are reported once and skipped; they are never replaced by black ones."""

import itertools
from pathlib import Path
from shutil import copytree

import pytest
import torch

from tests.harness.steps import before_steps
from tests.harness.training_runs import last_checkpoint
from vae.system.errors import EXIT_DATA, DataError
from vae.training.run import train


@pytest.fixture
def options(tiny, tmp_path) -> dict:
    """A run on a copy of the images without validation; `damage` makes some of them undecodable."""
    copytree(tiny["data_path"], tmp_path / "images")
    return {**tiny, "data_path": str(tmp_path / "images"), "init": "default", "val_split": 0.0}


def damage(options: dict, count: int) -> list[str]:
    """Truncate the first `count` image files; returns their names."""
    folder = Path(options["data_path"])
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.png"))[:count]
    for name in names:
        path = folder / name
        path.write_bytes(path.read_bytes()[:200])
    return names


def test_corrupt_image_is_skipped_and_reported_once(options, tmp_path, capsys):
    (bad,) = damage(options, 1)
    batches = []

    def see(loop, batch):
        inputs = loop.stepper.inputs(batch, len(batch.images))
        batches.append((inputs.images.clone(), inputs.image_share))

    with before_steps(see):
        assert train({**options, "num_epochs": 3, "max_bad_fraction": 0.1}) == 0
    sizes = [len(images) for images, _ in batches]
    assert sorted(sizes) == [3] * 3 + [4] * 9  # once in each of 3 epochs of 4 steps
    assert all(share == 1 / len(images) for images, share in batches)  # the mean is over the valid images
    assert all(images.flatten(1).max(1).values.min() > 0 for images, _ in batches)  # none is black
    lines = (tmp_path / "run" / "rejected_images.txt").read_text().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(bad)
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count(f"skipped {bad}") == 1


def test_validation_images_of_which_none_can_be_used_are_refused(options, tmp_path, capsys):
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "a.png").write_bytes(b"no")
    with pytest.raises(DataError, match=r"--val_path .*val: none of its images can be used"):
        train({**options, "val_path": str(tmp_path / "val")})
    assert "validation image skipped: a.png: not_an_image" in capsys.readouterr().out


def test_step_without_any_valid_image_changes_nothing(options, tmp_path):
    damage(options, 6)
    empty, weights = [], []

    def see(loop, batch):
        empty.append(len(batch.images) == 0)
        parameters = loop.state.autoencoder.parameters()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in parameters]))

    with before_steps(see):
        assert train({**options, "batch_size": 1, "max_bad_fraction": 1.0, "num_epochs": 1}) == 0
    assert (len(empty), sum(empty)) == (16, 6)
    assert [torch.equal(*pair) for pair in itertools.pairwise(weights)] == empty[:-1]
    content = last_checkpoint(tmp_path / "run")
    assert content["optimizers"][0]["state"][0]["step"].item() == 10
    assert content["update"]["nonfinite_total"] == 0


def test_training_on_a_large_set_stops_above_max_bad_fraction(options, tmp_path, monkeypatch):
    monkeypatch.setattr("vae.data.image_sets.COMPLETE", 8)  # the 16 images count as a large set
    monkeypatch.setattr("vae.data.image_sets.SAMPLE", 4)
    damage(options, 4)
    options["num_epochs"] = 1
    with pytest.raises(DataError, match=r" of 16 training images .* --max_bad_fraction 0\.05") as caught:
        train(options)
    assert caught.value.exit_code == EXIT_DATA == 77
    assert "\n" not in str(caught.value)
    for words in (str(tmp_path / "run" / "rejected_images.txt"), "remove them", "raise --max_bad_fraction"):
        assert words in str(caught.value)
    assert (tmp_path / "run" / "rejected_images.txt").exists()
    assert last_checkpoint(tmp_path / "run")["position"]["step"] < 4  # saved before the error
    assert train({**options, "output_dir": str(tmp_path / "other"), "max_bad_fraction": 0.25}) == 0
