"""--data_path with several datasets or folders: they are one, for any number of processes."""

import os
from shutil import copytree

import pytest

from tests.harness.faults import run_forked
from tests.harness.sharded_runs import record_samples, samples_of_steps
from tests.harness.shards import pack, write_shards
from vae.config.options import build
from vae.shards.dataset_json import read_dataset
from vae.shards.shard_images import ShardImages
from vae.system.errors import DataError, UserError
from vae.training.datasets import find_images
from vae.training.run import train


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """75 images in several shards."""
    return write_shards(tmp_path_factory.mktemp("one"), count=75, shard_bytes=30_000)


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    """20 wider images."""
    return write_shards(tmp_path_factory.mktemp("second"), count=20, shard_bytes=30_000, width=128)


@pytest.fixture(scope="module")
def other(image_folder, tmp_path_factory):
    """14 training and 2 validation images."""
    return pack(image_folder, tmp_path_factory.mktemp("other") / "set", val_split=0.1)


@pytest.fixture
def given(tiny, one, second):
    values = {**tiny, "data_path": [one, second], "batch_size": 8, "num_epochs": 1, "log_freq": 1}
    del values["val_split"]
    return values


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


def test_mistakes_are_refused(given, one, other, image_folder, tmp_path):
    folder = str(image_folder)
    for change, words in (
        ({"data_path": [one, tmp_path / "none.json"]}, "none.json does not exist"),
        ({"data_path": [one, one.parent / "." / one.name]}, "twice"),
        ({"data_path": [folder, f"{folder}/inner"]}, "twice"),
        ({"data_path": [one, folder]}, "all are folders"),
        ({"data_path": [one, other], "val_path": str(one)}, "75 of its 75 images are training images"),
        ({"data_path": [other, other.with_name("validation.json")]}, "2 of its 2 images are training"),
    ):
        with pytest.raises((UserError, DataError), match=words) as caught:
            train({**given, **change})
        assert "\n" not in str(caught.value)


def test_every_image_comes_once_in_an_epoch(one, second):
    parts = [ShardImages([read_dataset(path)], 4) for path in (one, second)]
    images = ShardImages([part.datasets[0] for part in parts], 4)
    order = images.order(0)
    samples = order.samples(0, 0, len(order))
    assert len(order) == len(set(samples)) == 95 // 4 * 4
    for number, part, own in ((0, 0, 0), (74, 0, 74), (75, 1, 0), (94, 1, 19)):
        assert images.key(number) == parts[part].key(own)
        assert images.read(number) == parts[part].read(own)
        assert images.name(number) == f"{(one, second)[part]}: {parts[part].name(own)}"
    assert images.version not in [part.version for part in parts]
    fetched = [[], []]
    for files, names in zip(images._files, fetched, strict=True):
        files.expect = lambda shards, names=names: names.extend(shard.name for shard in shards)
    images.expect(order, 0, 0, 1)
    assert [sorted(names) for names in fetched] == [
        [shard.name for shard in part.datasets[0].shards] for part in parts
    ]


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="processes are forks")
def test_any_number_of_processes_continues_with_the_same_samples(given, tmp_path):
    """4 processes, then 2, then 1 share an epoch, beside an undisturbed process."""
    with record_samples(tmp_path / "whole.jsonl"):
        assert train({**given, "output_dir": str(tmp_path / "whole")}) == 0
    given |= {"resume_from": "latest", "output_dir": str(tmp_path / "parts")}
    with record_samples(tmp_path / "parts.jsonl"):
        for processes, last_step in ((4, 3), (2, 6), (1, None)):
            given |= {"batch_size": 8 // processes, "max_steps": last_step}
            assert run_forked(given, processes=processes, log=tmp_path / "log") == processes * [0]
    whole, parts = (samples_of_steps(tmp_path / f"{name}.jsonl", None) for name in ("whole", "parts"))
    assert parts == whole
    assert len(whole) == 95 // 8
    assert any(number < 75 for numbers in whole.values() for number in numbers)
    assert any(number >= 75 for numbers in whole.values() for number in numbers)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="processes are forks")
def test_buckets_are_exact_with_as_many_processes(given, tmp_path, capsys):
    given |= {"buckets": 3, "batch_size": 4}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with record_samples(tmp_path / "whole.jsonl"):
        assert run_forked({**given, "output_dir": str(whole)}, processes=2, log=tmp_path / "log") == [0, 0]
    with record_samples(tmp_path / "parts.jsonl"):
        for last_step in (3, None):
            again = {**given, "output_dir": str(parts), "resume_from": "latest", "max_steps": last_step}
            assert run_forked(again, processes=2, log=tmp_path / "log") == [0, 0]
    whole, parts = (samples_of_steps(tmp_path / f"{name}.jsonl", None) for name in ("whole", "parts"))
    assert parts == whole
    assert len(whole) == 95 // 8
    assert "crops of 3 shapes (24x40, 32x32, 40x24)" in (tmp_path / "log").read_text()
