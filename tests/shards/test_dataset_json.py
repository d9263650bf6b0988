"""A dataset is read into little memory; everything that is wrong with it is one line."""

import json
import tracemalloc

import pytest

from vae.shards.dataset_json import FORMAT, Shard, read_dataset, write_dataset
from vae.system.errors import DataError, UserError

SHARD = Shard("images-000000.tar", 12, 20_000, 64 * "0", 64 * "1")


def test_many_shards_need_little_memory(tmp_path):
    """10,000 shards: as objects they would need 5.3 MiB."""
    names = [f"images-{n:06}.tar" for n in range(9_998)] + ["with spaces/é.tar", "not utf-8 \udcff.tar"]
    shards = [Shard(name, 6000 + n, 10**9 + n, f"{n:064x}", f"{2 * n:064x}") for n, name in enumerate(names)]
    path = tmp_path / "dataset.json"
    write_dataset(path, shards, {"min_size": 1}, "validation.json")
    tracemalloc.start()
    found = read_dataset(path)
    held, _peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1.5 * 2**20
    assert list(found.shards) == shards
    assert found.shards[-1] == shards[-1]
    assert found.samples == sum(shard.samples for shard in shards)
    assert (found.policy, found.validation) == ({"min_size": 1}, "validation.json")


def test_version_is_that_of_the_shards(tmp_path):
    """On every machine: the rules that chose them and the place of their tar files do not matter."""
    versions = []
    for number, (shard, more) in enumerate(
        [(SHARD, {}), (SHARD, {"tars": "/a", "indexes": "b"}), (SHARD._replace(index_sha256=64 * "2"), {})]
    ):
        path = tmp_path / f"{number}.json"
        write_dataset(path, [shard], {"min_size": number}, None, more=more)
        versions.append(read_dataset(path).version)
    assert versions[0] == versions[1] != versions[2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ({"format": FORMAT - 1}, f"has format {FORMAT - 1}, .* reads {FORMAT}: write it again"),
        ({"version": 64 * "0"}, "dataset.npy is another table than it lists: copy both again"),
        ({"policy": None}, "is damaged"),
        ({"tars": 5}, "is damaged"),
        ("[]", "is not a dataset of shards"),
        ("\0", "is not a dataset of shards"),
    ],
)
def test_dataset_that_is_not_valid_is_one_line(tmp_path, text, words):
    path = tmp_path / "dataset.json"
    write_dataset(path, [SHARD], {}, None)
    path.write_text(text if isinstance(text, str) else json.dumps(json.loads(path.read_text()) | text))
    with pytest.raises(DataError, match=words) as caught:
        read_dataset(path)
    assert str(caught.value).startswith(f"--data_path {path}")
    assert "\n" not in str(caught.value)


def test_missing_file_of_a_dataset_is_named(tmp_path):
    path = tmp_path / "dataset.json"
    with pytest.raises(DataError, match=r"does not exist.*--mode shard"):
        read_dataset(path)
    write_dataset(path, [SHARD], {}, None)
    (tmp_path / "dataset.npy").unlink()
    with pytest.raises(DataError, match=r"dataset\.npy is missing: copy all of the dataset"):
        read_dataset(path)


def test_tars_are_where_dataset_json_says(tmp_path):
    """Also relative to it; an address that cannot be one is an error."""
    path = tmp_path / "dataset.json"
    for tars, expected in (("../tars", tmp_path / "../tars"), (str(tmp_path / "a"), tmp_path / "a")):
        write_dataset(path, [SHARD], {"tars": tars}, None, more={"tars": tars, "indexes": "training"})
        found = read_dataset(path)
        assert found.shard_file(SHARD) == expected / SHARD.name
        assert found.index_file(SHARD) == tmp_path / "training" / "images-000000.npy"
    write_dataset(path, [SHARD], {}, None, more={"tars": "file:///tars", "indexes": "training"})
    with pytest.raises(UserError, match="another kind"):
        read_dataset(path)
