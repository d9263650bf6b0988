"""--data_path a.json:0.7 b.json:0.3: weights, resuming, any number of processes, and mistakes in one line."""

import os

import pytest

from tests.harness.faults import run_forked
from tests.harness.sharded_runs import record_samples, samples_of_steps
from tests.harness.shards import pack, write_shards
from vae.config.flags import parse_flags
from vae.shards.dataset_json import read_dataset
from vae.shards.mixture import MixtureImages, parse_mixture
from vae.shards.shard_images import ShardImages
from vae.system.errors import DataError, UserError
from vae.training.run import train


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """75 images in several shards."""
    return write_shards(tmp_path_factory.mktemp("one"), count=75, shard_bytes=30_000)


@pytest.fixture(scope="module")
def other(image_folder, tmp_path_factory):
    """14 training and 2 validation images."""
    return pack(image_folder, tmp_path_factory.mktemp("other") / "set", val_split=0.1)


@pytest.fixture
def given(tiny, one, other):
    values = {**tiny, "data_path": f"{one}:0.7 {other}:0.3", "batch_size": 8, "num_epochs": 1, "log_freq": 1}
    del values["val_split"]
    return values


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a.json:0.7 b.json:0.3", [("a.json", 0.7), ("b.json", 0.3)]),
        (r"C:\my data\a.json:2 D:\b.json:1e0", [(r"C:\my data\a.json", 2), (r"D:\b.json", 1)]),
        ("s3://x/a.json:1 https://h:80/b.json:3", [("s3://x/a.json", 1), ("https://h:80/b.json", 3)]),
        (r"C:\x\a.json", []),
        ("https://host:8080/a.json", []),
        ("old/a.json new/a.json", [("old/a.json", None), ("new/a.json", None)]),
        (r"C:\my data\a.json D:\b.json", [(r"C:\my data\a.json", None), (r"D:\b.json", None)]),
        ("https://h/a.json?s=1%3A2 b.json", [("https://h/a.json?s=1%3A2", None), ("b.json", None)]),
        ("photos.json of mine", []),
        ("photos", []),
    ],
)
def test_weights_are_told_from_drives_and_ports(text, parts):
    assert parse_mixture(text) == parts


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a.json:0.7 b.json", "b.json has no weight"),
        ("a.json b.json:0.7", "a.json has no weight"),
        ("a.json:0.7 photos", "photos has no weight"),
        ("a.json ./a.json", "twice"),
        ("a.json:-1 b.json:1", "above 0"),
        ("a.json:1 b.json:0", "above 0"),
        ("a.json:1 b.json:1e-9", "1/1000"),
        ("a.json:1 ./a.json:2", "twice"),
    ],
)
def test_wrong_weight_is_one_line(text, word):
    with pytest.raises(UserError, match=word) as caught:
        parse_mixture(text)
    assert "\n" not in str(caught.value)


def test_flag_takes_several_words_and_one_with_spaces():
    assert parse_flags(["--data_path", "a.json:0.7", "b.json:0.3"])["data_path"] == "a.json:0.7 b.json:0.3"
    assert parse_flags(["--data_path", "my data"])["data_path"] == "my data"


def test_mistakes_are_refused(given, one, other, tmp_path):
    for change, words in (
        ({"data_path": f"{one}:1 {tmp_path / 'none.json'}:1"}, "none.json does not exist"),
        (
            {"data_path": f"{one}:1 {other.with_name('validation.json')}:1", "val_path": str(one)},
            "training im",
        ),
        ({"data_path": f"{other}:1 {other.with_name('validation.json')}:1"}, "2 of its images are training"),
    ):
        with pytest.raises((UserError, DataError), match=words) as caught:
            train({**given, **change})
        assert "\n" not in str(caught.value)


def test_without_weights_every_image_comes_once_in_an_epoch(one, tmp_path):
    second = write_shards(tmp_path / "second", count=20, shard_bytes=30_000, width=128)
    parts = [ShardImages(read_dataset(path), 4) for path in (one, second)]
    images = MixtureImages(parts, None, "both")
    order = images.order(0)
    samples = order.samples(0, 0, len(order))
    assert len(order) == len(set(samples)) == 95 // 4 * 4
    assert [part.key(own) for part, own in map(images.locate, (0, 75, 94))] == [
        parts[0].key(0),
        parts[1].key(0),
        parts[1].key(19),
    ]
    fetched = [[], []]
    for part, numbers in zip(parts, fetched, strict=True):
        part.fetch = numbers.extend
    images.expect(order, 0, 0, 1)
    assert [sorted(set(numbers)) for numbers in fetched] == [
        list(range(len(p.dataset.shards))) for p in parts
    ]


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="processes are forks")
def test_any_number_of_processes_continues_with_the_same_samples(given, one, tmp_path, capsys):
    """4 processes, then 2, then 1 share an epoch, beside an undisturbed process."""
    second = write_shards(tmp_path / "second", count=66, shard_bytes=60_000, width=128)  # four streams too
    given |= {"data_path": f"{one}:0.7 {second}:0.3", "buckets": 3}
    with record_samples(tmp_path / "whole.jsonl"):
        assert train({**given, "output_dir": str(tmp_path / "whole")}) == 0
    given |= {"resume_from": "latest", "output_dir": str(tmp_path / "parts")}
    with record_samples(tmp_path / "parts.jsonl"):
        for processes, last_step in ((4, 3), (2, 6), (1, None)):
            given |= {"batch_size": 8 // processes, "max_steps": last_step}
            assert run_forked(given, processes=processes, log=tmp_path / "log") == processes * [0]
    whole, parts = (samples_of_steps(tmp_path / f"{name}.jsonl", None) for name in ("whole", "parts"))
    assert parts == whole
    assert "crops of 2 shapes (32x32 70%, 40x24 30%)" in capsys.readouterr().out
    assert len(whole) == (72 + 64) // 8  # streams of 18 and 16 samples, or of 17
    first = [number for numbers in whole.values() for number in numbers if number < 75]
    assert 0.5 < len(first) / sum(map(len, whole.values())) < 0.9
