"""Shards, several datasets and several folders train as one folder does, for any number of processes."""

import json
import os
from shutil import copytree

import pytest

from tests.harness.faults import run_forked
from tests.harness.preparing import prepare
from tests.harness.sharded_runs import record_samples, samples_of_steps
from tests.harness.shards import pack, write_shards
from tests.harness.tars import write_webdataset
from tests.harness.training_runs import last_checkpoint, records
from vae.config.options import build
from vae.shards.dataset_json import read_dataset
from vae.shards.shard_images import ShardImages
from vae.system.errors import DataError, UserError
from vae.training.datasets import find_images
from vae.training.resolved_options import _saved_options
from vae.training.run import train


@pytest.fixture(scope="module")
def packed(image_folder, tmp_path_factory):
    """14 training and 2 validation images."""
    return pack(image_folder, tmp_path_factory.mktemp("packed") / "set", val_split=0.1)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """75 images in several shards."""
    return write_shards(tmp_path_factory.mktemp("many"), count=75, shard_bytes=30_000)


@pytest.fixture(scope="module")
def wider(tmp_path_factory):
    """20 wider images."""
    return write_shards(tmp_path_factory.mktemp("wider"), count=20, shard_bytes=30_000, width=128)


@pytest.fixture
def given(tiny, packed):
    values = {**tiny, "data_path": str(packed), "batch_size": 4, "num_epochs": 1, "log_freq": 1}
    del values["val_split"]
    return values


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="processes are forks")
def test_any_number_of_processes_continues_with_the_same_samples(many, wider, given, tmp_path):
    """2 processes, then 3, 4 and 1 share an epoch, beside one alone; 3 do not divide the 4 streams."""
    given |= {"data_path": [many, wider], "resume_from": "latest", "global_batch_size": 12}
    del given["batch_size"]
    folders = {name: tmp_path / name for name in ("whole", "parts")}
    with record_samples(tmp_path / "whole.jsonl"):
        assert train({**given, "output_dir": str(folders["whole"])}) == 0
    with record_samples(tmp_path / "parts.jsonl"):
        for processes, last_step in ((2, 1), (3, 3), (4, 5), (1, 7)):
            given |= {"max_steps": last_step, "output_dir": str(folders["parts"])}
            assert run_forked(given, processes=processes, log=tmp_path / "log") == processes * [0]
            given.pop("global_batch_size", None)  # the checkpoint has it
    whole, parts = (samples_of_steps(tmp_path / f"{name}.jsonl", None) for name in folders)
    assert parts == whole
    config = last_checkpoint(folders["parts"])["config"]
    assert [config[name] for name in ("batch_size", "global_batch_size", "data_streams")] == [12, 12, 4]
    assert (tmp_path / "log").read_text().count("note: 3 processes do not divide the 4 streams of") == 1
    numbers = {number for step in whole.values() for number in step}
    assert len(numbers) == 7 * 12  # of 95, but for fewer than one of a stream and a batch
    assert min(numbers) < 75 <= max(numbers)
    one, other = ([r["loss"] for r in records(folder, "train")] for folder in folders.values())
    assert other == pytest.approx(one, rel=1e-3)  # sums in another order, and Adam's first steps enlarge that


@pytest.mark.slow
def test_tars_of_others_train_and_validate(given, tmp_path):
    write_webdataset(tmp_path / "tars", tars=3, images=8)
    words = ("--input", tmp_path / "tars", "--output_dir", tmp_path / "set", "--val_split", "0.2")
    assert prepare("--mode", "index", *words).returncode == 0
    assert train({**given, "data_path": str(tmp_path / "set" / "dataset.json")}) == 0
    split = json.loads((tmp_path / "run" / "split.json").read_text())
    validation = read_dataset(tmp_path / "set" / "validation.json").samples
    assert split["train"]["samples"] + split["validation"]["samples"] == 3 * 8
    assert split["validation"]["samples"] == validation
    assert records(tmp_path / "run", "validation")[-1]["images"] == validation


def test_folders_are_one_set(image_folder, tmp_path):
    """With equal names in both, in any order; their common folder is what names are relative to."""
    for name in ("first set", "second"):
        copytree(image_folder, tmp_path / "all" / name)
    folders = [str(tmp_path / "all" / name) for name in ("first set", "second")]
    both, validation = find_images(build({"data_path": folders}))
    swapped, _ = find_images(build({"data_path": folders[::-1]}))
    one, of_one = find_images(build({"data_path": folders[0], "val_split": 0.1}))
    assert both.num_images + validation.count == 2 * (one.num_images + of_one.count)
    assert both.images == swapped.images
    assert {name.split("/")[0] for name in both.images.names} == {"first set", "second"}
    assert both.images.decode(0, max_pixels=10**6, background="white").shape[2] == 3


def test_mistakes_are_refused(given, many, packed, image_folder, tmp_path):
    folder = str(image_folder)
    for change, words in (
        ({"val_split": 0.5}, "--val_split 0.5"),
        ({"fold": 1}, "--fold 1"),
        ({"val_path": str(packed)}, "--val_path .*14 of its 14 images are training images"),
        ({"val_path": folder}, "--val_path .* of its 16 images are training images"),
        ({"data_path": str(packed.with_name("other.json"))}, "--mode shard"),
        ({"batch_size": 16}, "--batch_size 16"),
        ({"image_size": 24, "equivariance_weight": 0.5}, "needs 32 px, not 24: raise --image_size"),
        ({"data_path": [many, tmp_path / "none.json"]}, "none.json does not exist"),
        ({"data_path": [many, many.parent / "." / many.name]}, "twice"),
        ({"data_path": [folder, f"{folder}/inner"]}, "twice"),
        ({"data_path": [many, folder]}, "all are folders"),
        ({"data_path": [many, packed], "val_path": str(many)}, "75 of its 75 images are training images"),
        ({"data_path": [packed, packed.with_name("validation.json")]}, "2 of its 2 images are training"),
    ):
        with pytest.raises((UserError, DataError), match=words) as caught:
            train({**given, **change})
        assert "\n" not in str(caught.value)


def test_every_image_comes_once_in_an_epoch(many, wider):
    parts = [ShardImages([read_dataset(path)], 4) for path in (many, wider)]
    images = ShardImages([part.datasets[0] for part in parts], 4)
    order = images.order(0)
    samples = order.samples(0, 0, len(order))
    assert len(order) == len(set(samples)) == 95 // 4 * 4
    for number, part, own in ((0, 0, 0), (74, 0, 74), (75, 1, 0), (94, 1, 19)):
        assert images.key(number) == parts[part].key(own)
        assert images.read(number) == parts[part].read(own)
        assert images.name(number) == f"{(many, wider)[part]}: {parts[part].name(own)}"
    assert images.version not in [part.version for part in parts]
    fetched = [[], []]
    for files, names in zip(images._files, fetched, strict=True):
        files.expect = lambda shards, names=names: names.extend(shard.name for shard in shards)
    images.expect(order, 0, 0, 1)
    assert [sorted(names) for names in fetched] == [
        [shard.name for shard in part.datasets[0].shards] for part in parts
    ]


def test_a_resumed_run_keeps_the_streams_that_its_data_decided():
    """Whatever the default is later."""
    content = {"config": {"data_streams": None, "shuffle_shards": None}}
    content["provenance"] = {"topology": {"streams": 480, "shuffle_shards": 480}}
    assert _saved_options(content) == {"data_streams": 480, "shuffle_shards": 480}
