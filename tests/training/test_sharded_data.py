"""A dataset of shards trains as a folder does: validation, resume bit for bit, and mistakes in one line."""

import json

import pytest

from tests.harness.runs import run_script
from tests.harness.training_runs import assert_same, last_checkpoint
from vae.config.errors import DataError, UserError
from vae.training.run import train


@pytest.fixture(scope="module")
def dataset(image_folder, tmp_path_factory):
    """14 training and 2 validation images."""
    folder = tmp_path_factory.mktemp("sharded") / "set"
    done = run_script(
        *(
            "prepare_data.py",
            "--mode",
            "shard",
            "--input_dir",
            str(image_folder),
            "--output_dir",
            str(folder),
        ),
        *("--val_split", "0.1", "--num_workers", "1"),
    )
    assert done.returncode == 0, done.stderr
    return folder / "dataset.json"


@pytest.fixture
def given(tiny, dataset):
    values = {**tiny, "data_path": str(dataset), "batch_size": 4, "num_epochs": 2}
    del values["val_split"]
    return values


def test_resumed_run_is_the_undisturbed_one(given, tmp_path):
    whole, parts = (str(tmp_path / name) for name in ("whole", "parts"))
    assert train({**given, "output_dir": whole}) == 0
    assert train({**given, "output_dir": parts, "max_steps": 2}) == 0  # within the first epoch
    assert train({**given, "output_dir": parts, "resume_from": "latest", "max_steps": None}) == 0
    one, other = (last_checkpoint(tmp_path / name) for name in ("whole", "parts"))
    assert one["position"]["step"] == 6
    for key in ("model", "ema", "position"):
        assert_same(one[key], other[key], key)
    split = json.loads((tmp_path / "whole" / "split.json").read_text())
    assert (split["train"]["samples"], split["validation"]["samples"]) == (14, 2)


def test_mistakes_are_refused(given, dataset):
    for change, words in (
        ({"val_split": 0.5}, "--val_split 0.5"),
        ({"fold": 1}, "--fold 1"),
        ({"val_path": str(dataset)}, "--val_path .*14 of its images are training images"),
        ({"data_path": str(dataset.with_name("other.json"))}, "--mode shard"),
        ({"batch_size": 16}, "--batch_size 16"),
    ):
        with pytest.raises((UserError, DataError), match=words):
            train({**given, **change})
