"""A dataset of shards trains as a folder does: validation, resume bit for bit, and mistakes in one line."""

import json
import os

import pytest

from tests.harness.faults import run_forked
from tests.harness.preparing import prepare
from tests.harness.sharded_runs import record_samples, samples_in_order, samples_of_steps
from tests.harness.shards import pack, write_shards
from tests.harness.tars import write_webdataset
from tests.harness.training_runs import assert_same, last_checkpoint, records
from vae.shards.dataset_json import read_dataset
from vae.system.errors import DataError, UserError
from vae.training.resolved_options import _saved_options
from vae.training.run import train


@pytest.fixture(scope="module")
def dataset(image_folder, tmp_path_factory):
    """14 training and 2 validation images."""
    return pack(image_folder, tmp_path_factory.mktemp("sharded") / "set", val_split=0.1)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """75 images in several shards, in four streams."""
    return write_shards(tmp_path_factory.mktemp("many"), count=75, shard_bytes=30_000)


@pytest.fixture
def given(tiny, dataset):
    values = {**tiny, "data_path": str(dataset), "batch_size": 4, "num_epochs": 2}
    del values["val_split"]
    return values


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="processes are forks")
def test_any_number_of_processes_continues_with_the_same_samples(many, tiny, tmp_path):
    """2 processes, then 3, 4 and 1 share an epoch, beside one alone; 3 do not divide the 4 streams."""
    assert len(read_dataset(many).shards) > 4
    given = {**tiny, "data_path": str(many), "log_freq": 1, "resume_from": "latest"}
    given |= {"global_batch_size": 12, "num_epochs": 1}
    del given["val_split"], given["batch_size"]
    folders = {name: tmp_path / name for name in ("whole", "parts")}
    with record_samples(tmp_path / "whole.jsonl"):
        assert train({**given, "output_dir": str(folders["whole"])}) == 0
    with record_samples(tmp_path / "parts.jsonl"):
        for processes, last_step in ((2, 1), (3, 3), (4, 5), (1, 6)):
            given |= {"max_steps": last_step, "output_dir": str(folders["parts"])}
            assert run_forked(given, processes=processes, log=tmp_path / "log") == processes * [0]
            given.pop("global_batch_size", None)  # the checkpoint has it
    whole, parts = (samples_of_steps(tmp_path / f"{name}.jsonl", many) for name in folders)
    assert parts == whole == samples_in_order(many, steps=6, batch=12)
    config = last_checkpoint(folders["parts"])["config"]
    assert [config[name] for name in ("batch_size", "global_batch_size", "data_streams")] == [12, 12, 4]
    assert (tmp_path / "log").read_text().count("note: 3 processes do not divide the 4 streams of") == 1
    assert len({key for keys in whole.values() for key in keys}) == 72  # but for fewer than one of a stream
    one, other = ([r["loss"] for r in records(folder, "train")] for folder in folders.values())
    assert other == pytest.approx(one, rel=1e-3)  # sums in another order, and Adam's first steps enlarge that


@pytest.mark.slow
def test_tars_of_others_train_resume_and_validate(given, tmp_path):
    write_webdataset(tmp_path / "tars", tars=3, images=8)
    words = ("--input", tmp_path / "tars", "--output_dir", tmp_path / "set", "--val_split", "0.2")
    assert prepare("--mode", "index", *words).returncode == 0
    given |= {"data_path": str(tmp_path / "set" / "dataset.json")}
    whole, parts = (str(tmp_path / name) for name in ("whole", "parts"))
    assert train({**given, "output_dir": whole}) == 0
    assert train({**given, "output_dir": parts, "max_steps": 2}) == 0
    assert train({**given, "output_dir": parts, "resume_from": "latest", "max_steps": None}) == 0
    one, other = (last_checkpoint(tmp_path / name) for name in ("whole", "parts"))
    assert one["position"]["step"] > 4
    for key in ("model", "ema", "position"):
        assert_same(one[key], other[key], key)
    split = json.loads((tmp_path / "whole" / "split.json").read_text())
    validation = read_dataset(tmp_path / "set" / "validation.json").samples
    assert split["train"]["samples"] + split["validation"]["samples"] == 3 * 8
    assert split["validation"]["samples"] == validation
    assert records(tmp_path / "whole", "validation")[-1]["images"] == validation


def test_mistakes_are_refused(given, dataset, image_folder):
    for change, words in (
        ({"val_split": 0.5}, "--val_split 0.5"),
        ({"fold": 1}, "--fold 1"),
        ({"val_path": str(dataset)}, "--val_path .*14 of its 14 images are training images"),
        ({"val_path": str(image_folder)}, "--val_path .* of its 16 images are training images"),
        ({"data_path": str(dataset.with_name("other.json"))}, "--mode shard"),
        ({"batch_size": 16}, "--batch_size 16"),
    ):
        with pytest.raises((UserError, DataError), match=words):
            train({**given, **change})


def test_a_resumed_run_keeps_the_streams_that_its_data_decided():
    """Whatever the default is later."""
    content = {"config": {"data_streams": None, "shuffle_shards": None}}
    content["provenance"] = {"topology": {"streams": 480, "shuffle_shards": 480}}
    assert _saved_options(content) == {"data_streams": 480, "shuffle_shards": 480}
