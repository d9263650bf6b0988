"""Shards on a web server: cached, verified, shared, removed in order; every fault of a store has an end."""

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.harness.damaged_files import flip_bit
from tests.harness.http_store import CUT, HANG, http_store, hurry
from tests.harness.image_kinds import write_noise
from tests.harness.open_files import open_elsewhere
from tests.harness.runs import ROOT
from tests.harness.shards import pack
from tests.harness.waiting import wait_until
from vae.data.dataset import CropDataset
from vae.data.loading import TrainLoader
from vae.images.formats import BadImageError
from vae.shards import shard_cache, store
from vae.shards.dataset_json import read_dataset
from vae.shards.shard_cache import FOLDER_NAME, ShardCache, open_cache
from vae.shards.shard_images import ShardImages
from vae.shards.store import StoreError, StoreFile
from vae.system.errors import DataError, UserError
from vae.system.host import GIB

pytest.importorskip("aiohttp", reason="requirements-remote.txt is not installed")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A dataset of 40 images in shards of about 9 images and 70 kB."""
    folder = tmp_path_factory.mktemp("store")
    write_noise(folder / "raw", 40, 48, 48)
    dataset = pack(folder / "raw", folder / "set", shard_bytes=80_000)
    assert len(read_dataset(dataset).shards) == 5
    return folder / "set"


@pytest.fixture(scope="module")
def files(root):
    """The bytes of all images."""
    images = ShardImages([read_dataset(root / "dataset.json")], num_streams=1)
    return [images.read(n) for n in range(40)]


@pytest.fixture
def web(root, monkeypatch):
    hurry(monkeypatch)
    with http_store(root) as server:
        yield server


@pytest.fixture
def cache(tmp_path):
    return ShardCache(tmp_path / "cache", 1)


def remote(web, cache, num_streams=1) -> ShardImages:
    return ShardImages([read_dataset(web.url())], num_streams, cache)


def read_all(images: ShardImages) -> list[bytes]:
    return [images.read(n) for n in range(40)]


def path_of(images: ShardImages, number: int) -> Path:
    shard = images.datasets[0].shards[number]
    return images.cache.path(shard.name, shard.sha256)


def test_local_shards_go_through_a_cache_that_was_asked_for(root, tmp_path, files):
    shared = tmp_path / ("shared disk #1 100%" if os.name == "nt" else "shared?disk #1 100%")
    shutil.copytree(root, shared)  # the folder of a mounted disk
    dataset, folder = read_dataset(shared / "dataset.json"), str(tmp_path / "cache")
    assert open_cache([dataset], None, 1) is None
    assert open_cache([], folder, 1) is None  # a folder of images
    assert open_cache([dataset], str(tmp_path), 1) is None  # it is in this folder already
    in_place = ShardImages([dataset], 4, ShardCache(tmp_path / "of_another", 1))  # of a remote dataset beside
    assert in_place.read(0) == files[0]
    assert "hits" not in in_place.counts()
    cached = ShardImages([dataset], 4, open_cache([dataset], folder, 1))
    assert read_all(cached) == files
    assert len(list(Path(folder, FOLDER_NAME).glob("*.tar"))) == 5
    cached.counts()
    assert cached.read(7) == files[7]
    assert cached.counts()["hits"] == 1
    (tmp_path / "set").mkdir()
    for file in (root / "dataset.json", *root.glob("*.npy")):
        (tmp_path / "set" / file.name).write_bytes(file.read_bytes())
    without = read_dataset(tmp_path / "set" / "dataset.json")
    with pytest.raises(DataError, match=r"images-000000\.tar cannot be copied: No such file"):
        ShardImages([without], 4, open_cache([without], str(tmp_path / "new"), 1)).read(0)


def test_each_shard_is_downloaded_once_and_its_bytes_are_those_of_the_folder(web, cache, root, files):
    images = remote(web, cache)
    assert read_all(images) == files
    again = remote(web, cache)  # as another process does
    assert read_all(again) == files
    assert len(web.wholes()) == len(set(web.wholes())) == 5
    assert len(web.wholes(".npy")) == 5 + 2  # with the table
    local = ShardImages([read_dataset(root / "dataset.json")], 1)
    assert [images.metadata(n) for n in range(40)] == [local.metadata(n) for n in range(40)]
    counts = images.counts()
    assert (counts["misses"], counts["hits"]) == (5, 75)
    described = 2 * sum(path.stat().st_size for path in root.glob("dataset*"))
    assert counts["remote_bytes"] == web.sent.total() - described
    assert again.counts()["remote_bytes"] == 0


def test_shards_of_the_next_windows_are_there_before_they_are_read(web, cache):
    """Training waits for no shard after the first ones."""
    crops = CropDataset(remote(web, cache, num_streams=2), image_size=32)
    with TrainLoader(crops, local_batch=2) as loader:
        batches = loader.batches(0)
        counts = [next(batches).counts]
        wait_until(lambda: "read ahead" not in [thread.name for thread in threading.enumerate()])
        counts += [batch.counts for batch in batches]
    assert sum(one.get("misses", 0) for one in counts[1:]) == 0
    assert sum(one["hits"] for one in counts[1:]) == 2 * (len(counts) - 1)
    assert len(web.wholes()) == 5


# ---- the cache ---------------------------------------------------------------------------------------------


def room_for(cache: ShardCache, images: ShardImages, shards: float) -> ShardCache:
    """The same folder with room for so many shards, and for their indexes."""
    most = max(shard.bytes for shard in images.datasets[0].shards)
    return ShardCache(cache.folder.parent, (shards * most + 20_000) / GIB)


def test_shards_that_were_used_longest_ago_are_removed(web, cache):
    images = remote(web, room_for(cache, remote(web, cache), 2))
    for number, when in ((0, 3e9), (1, 1e9)):  # the clock of another machine may be ahead
        images.read(9 * number)
        os.utime(path_of(images, number), (when, when))
    images.read(39)
    assert [path_of(images, number).exists() for number in range(5)] == [True, False, False, False, True]


def test_cache_keeps_to_its_size_and_leaves_files_of_others_alone(web, tmp_path, files):
    """In --cache_dir every name; in the folder of the cache every name that the cache does not make."""
    sha256 = "0123456789abcdef" * 4
    parent = tmp_path / "mine"
    cache = ShardCache(parent, 1)
    names = ("backup.tar", "labels.npy", "film.part", "film.5.part", f"{sha256}.tar.gz", f"{sha256}.5.part")
    users = [folder / name for folder in (parent, cache.folder) for name in names]
    users += [parent / f"{sha256}.tar", cache.folder / f"x{sha256}.tar"]
    for path in users:
        path.write_bytes(b"a" * 1000)
        os.utime(path, (1, 1))
    few = room_for(cache, remote(web, cache), 1.2)
    images = remote(web, few)
    found = []
    for number in range(40):
        found.append(images.read(number))
        own = {path for path in few.folder.iterdir() if path not in users}
        assert sum(path.stat().st_size for path in own) <= few.max_bytes
    assert found == files
    assert len(web.wholes()) == 5
    for path in users:
        assert (path.read_bytes(), path.stat().st_mtime) == (b"a" * 1000, 1), path.name
    with pytest.raises(DataError, match=r"has no room for images-000000\.tar .*--cache_gib"):
        remote(web, ShardCache(tmp_path / "tiny", 20_000 / GIB)).read(0)


READER = """
import sys
from pathlib import Path
from vae.shards.dataset_json import read_dataset
from vae.shards.shard_cache import ShardCache
from vae.shards.shard_images import ShardImages
ShardImages([read_dataset(sys.argv[1])], 1, ShardCache(Path(sys.argv[2]), 1)).read(9)
"""


def read_elsewhere(web, cache) -> subprocess.Popen:
    """A process that reads an image of the second shard."""
    words = [sys.executable, "-c", READER, web.url(), str(cache.folder.parent)]
    return subprocess.Popen(words, cwd=ROOT)


def test_killed_download_leaves_nothing_behind(web, cache, files):
    """While others wait for it; a command that uses the same folder finishes it."""
    web.answers["images-000001.tar"] = [HANG, 200]
    with read_elsewhere(web, cache) as process:
        while "images-000001.tar" not in web.wholes():
            assert process.poll() is None
        (part,) = cache.folder.glob("*.part")
        process.kill()
    assert part.exists()
    images = remote(web, room_for(cache, remote(web, cache), 2))
    images.read(39)  # another shard
    assert not part.exists()
    assert read_all(images) == files


def test_two_processes_download_a_shard_once(web, cache, files):
    """The second one waits, here for a try after an error."""
    web.answers["images-000001.tar"] = [500, 200]
    with read_elsewhere(web, cache) as process:
        while "images-000001.tar" not in web.wholes():
            assert process.poll() is None
        assert remote(web, cache).read(9) == files[9]
        assert process.wait(60) == 0
    assert web.wholes().count("images-000001.tar") == 2


def test_two_commands_share_a_small_cache(web, cache, files):
    few = room_for(cache, remote(web, cache), 2.2)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(read_all, [remote(web, few) for _ in range(2)])) == [files] * 2
    size = sum(path.stat().st_size for path in few.folder.iterdir())
    assert few.max_bytes / 3 < size <= few.max_bytes


def test_file_in_use_is_readable_to_the_end(web, cache):
    """Windows does not remove an open file: the next one is removed instead."""
    images = remote(web, room_for(cache, remote(web, cache), 2))
    for number, when in ((0, 1e9), (1, 2e9)):
        images.read(9 * number)
        os.utime(path_of(images, number), (when, when))
    content = path_of(images, 0).read_bytes()
    with open(path_of(images, 0), "rb") as file, open_elsewhere(path_of(images, 0)):
        images.read(39)
        assert file.read() == content
    assert [path_of(images, number).exists() for number in range(5)] == [True, False, False, False, True]


def test_commands_know_what_others_read_at_once(cache):
    """While these run: a claim ends with its process."""
    other, third = (ShardCache(cache.folder.parent, 1) for _ in range(2))
    versions = ["0" * 64, "1" * 64, "2" * 64]
    claims = [
        c.claim(size, v, 9) for c, size, v in zip((cache, other, third), (5, 7, 1), versions, strict=True)
    ]
    assert claims == [5, 5 + 7, 5 + 7 + 1]
    pickle.loads(pickle.dumps(cache))  # as a decoding process gets it
    del other
    assert cache.claim(2, "3" * 64, 9) == 1 + 5 + 2


def test_commands_share_the_shards_of_a_dataset(cache):
    other, third = (ShardCache(cache.folder.parent, 1) for _ in range(2))
    version = "0" * 64
    assert cache.claim(5, version, 9) == 5
    assert other.claim(5, version, 9) == 9
    assert third.claim(2, "1" * 64, 9) == 9 + 2


def test_claims_leave_files_of_others_alone(cache):
    path = cache.folder / "baggage.claim"
    path.write_text("a user's")
    cache.claim(5, "0" * 64, 9)
    assert path.read_text() == "a user's"


def test_shard_that_another_machine_removes_is_fetched_again(web, cache, files):
    images = remote(web, cache)
    for number in range(2):
        assert images.read(number) == files[number]
        path_of(images, 0).unlink()
    assert len(web.wholes()) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has /dev/full")
def test_full_disk_is_one_line(web, cache, monkeypatch):
    images = remote(web, cache)
    images.key(0)
    monkeypatch.setattr(shard_cache, "download", lambda _file, _path: Path("/dev/full").write_bytes(b"0"))
    with pytest.raises(DataError, match=r"--cache_dir .*No space left on device: free some space"):
        images.read(0)
    assert not list(cache.folder.glob("*.part"))


def test_a_local_folder_that_cannot_be_used_is_not_asked_again(monkeypatch):
    """The caches of packages, such as HF_HOME, are on this machine."""

    def refuse(_system, _path):
        raise NotADirectoryError(20, "Not a directory", os.path.abspath("cache"))

    monkeypatch.setattr(store, "_file_system", lambda file: (None, file.url))
    with pytest.raises(NotADirectoryError):
        store._with_tries(StoreFile("s3://bucket/a", "--data_path"), refuse)


def test_disk_without_room_limits_the_cache(cache, monkeypatch):
    free = SimpleNamespace(free=3 * GIB)
    monkeypatch.setattr("vae.shards.shard_cache.shutil.disk_usage", lambda _folder: free)
    assert ShardCache(cache.folder.parent, 50).available_bytes() == 2 * GIB


def test_folder_that_cannot_be_used_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--cache_dir .* is inside of .*file, which is a file"):
        ShardCache(tmp_path / "file", 1)

    def refuse(*_args):
        raise NotImplementedError

    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    with pytest.raises(UserError, match=r"--cache_dir .* has no locks: use another folder"):
        ShardCache(tmp_path / "cache", 1)


# ---- damage ------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(root, tmp_path, web):
    """The store with a copy of the dataset that the test may damage."""
    web.root = tmp_path / "copy"
    web.root.mkdir()
    for path in (*root.glob("*.tar"), *root.glob("*.npy"), root / "dataset.json"):
        (web.root / path.name).write_bytes(path.read_bytes())
    return web.root


def test_images_of_a_bad_shard_are_rejected_until_the_next_command(web, cache, damaged, files):
    flip_bit(damaged / "images-000000.tar", 3000)
    images = remote(web, cache)
    crops = CropDataset(images, image_size=32)
    rejected = [crops[0, n].rejection for n in range(40)]
    bad = images.datasets[0].shards[0].samples
    assert [one is not None for one in rejected] == [n < bad for n in range(40)]
    assert {one.reason for one in rejected[:bad]} == {"bad_shard"}
    assert rejected[0].name == f"images-000000.tar/{images.key(0)}"
    assert web.wholes().count("images-000000.tar") == 1
    assert len(list(cache.folder.glob("*.tar"))) == 4
    flip_bit(damaged / "images-000000.tar", 3000)
    assert remote(web, cache).read(0) == files[0]  # the next run, after the store was repaired


def test_damaged_copy_is_removed_and_rejects_one_image(web, cache, files):
    """Of a shard, and of an index: the next image downloads it again."""
    images = remote(web, cache)
    images.read(0)
    flip_bit(path_of(images, 0), int(images._index(0)["offset"][3]))
    with pytest.raises(BadImageError, match="checksum"):
        images.read(3)
    assert [images.read(n) for n in range(5)] == files[:5]
    assert len(web.wholes()) == 2
    (index,) = cache.folder.glob("*.npy")
    flip_bit(index, 200)
    again = remote(web, cache)
    with pytest.raises(BadImageError, match="bad_index"):
        again.read(0)
    assert again.read(0) == files[0]
    assert len(web.wholes("images-000000.npy")) == 2


def test_image_that_never_had_its_checksum_costs_no_download(web, cache, damaged):
    """The shard is the one that the dataset lists; its index is wrong."""
    images = remote(web, cache)
    images._index(0)["crc32"][0] += 1
    for _ in range(2):
        with pytest.raises(BadImageError, match="checksum"):
            images.read(0)
    assert len(web.wholes()) == 1


def test_bad_index_rejects_the_images_of_its_shard(web, cache, damaged):
    path = damaged / "images-000000.npy"
    path.write_bytes(path.read_bytes()[:-9])
    images = remote(web, cache)
    for number in range(3):
        with pytest.raises(BadImageError, match=r"bad_shard.*images-000000\.npy"):
            images.read(number)
    assert len(web.wholes("images-000000.npy")) == 1
    assert images.read(39)


def test_failed_download_that_is_still_open_is_the_stores_error(cache):
    """On Windows, what a thread of a store's package has open cannot be removed; the next try removes it."""
    name, sha256 = "a.tar", hashlib.sha256(b"data").hexdigest()
    opened = ExitStack()

    def stall(part: Path) -> None:
        opened.enter_context(open_elsewhere(part))
        raise StoreError("no answer")

    for _ in range(2):
        with pytest.raises(StoreError, match="no answer"):
            cache.obtain(name, sha256, 4, stall)
    opened.close()
    cache.obtain(name, sha256, 4, lambda part: part.write_bytes(b"data"))
    assert [path.name for path in cache.folder.glob(f"{sha256}*")] == [f"{sha256}.tar"]


# ---- stores that do not answer -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "words", "name"),
    [
        (403, "403", "dataset.json"),
        (500, "500", "images-000000.npy"),
        (HANG, "no answer for 0.4 s", "images-000000.tar"),
    ],
)
def test_store_that_fails_three_times_is_one_line(web, cache, capsys, monkeypatch, name, answer, words):
    if answer == HANG:
        monkeypatch.setattr(store, "STALL_SECONDS", 0.4)
    web.answers[name] = [answer]
    with pytest.raises(DataError) as caught:
        remote(web, cache).read(0)
    line = str(caught.value)
    assert line.startswith(f"--data_path {web.url(name)}: ")
    assert words in line
    assert "3 times" in line
    assert "\n" not in line
    assert web.requests.count(f"/{name}") == 3
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1  # that it waits
    assert "trying again" in printed[0]


def test_store_that_comes_back_in_time_is_waited_for(web, cache, files, capsys, monkeypatch):
    """Two errors are printed, one is not."""
    images = remote(web, cache)
    for answers in ([500, 200], [500, CUT, 200]):
        web.answers["images-000000.tar"] = answers
        assert images.read(0) == files[0]
        path_of(images, 0).unlink()
    assert capsys.readouterr().out.count("trying again") == 1
    web.stop()
    monkeypatch.setattr(store, "time", SimpleNamespace(sleep=lambda _seconds: web.start()))
    assert images.read(0) == files[0]


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("s3://bucket/dataset.json", "s3fs.*requirements-remote.txt"),
        ("gs://bucket/dataset.json", "gcsfs.*requirements-remote.txt"),
        ("htp://host/dataset.json", "another kind.*begins with s3://"),
        ("file:///x/dataset.json", "another kind"),
        ("simplecache::s3://bucket/dataset.json", "another kind"),
        ("https://host/folder", "dataset.json"),
    ],
)
def test_address_that_cannot_be_read_names_the_remedy(address, words, monkeypatch):
    from fsspec.registry import _registry  # keeps the classes that other tests have imported

    for package, scheme in (("s3fs", "s3"), ("gcsfs", "gs")):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(_registry, scheme, raising=False)
    with pytest.raises(UserError, match=words):
        read_dataset(address, flag="--val_path")


# ---- credentials -------------------------------------------------------------------------------------------


def test_passwords_and_signatures_are_used_and_not_shown(web, cache, capsys):
    url = web.url("dataset.json?signature=5ecret&a=%2B%20", login="me:pa55word@")
    images = ShardImages([read_dataset(url)], 1, cache)
    assert images.read(0)
    assert any("Basic" in one for one in web.authorizations)
    assert all(path.endswith("?signature=5ecret&a=%2B%20") for path in web.requests)
    web.answers["images-000001.tar"] = [403]
    with pytest.raises(DataError, match="403") as caught:
        images.read(15)
    shown = [str(caught.value), capsys.readouterr().out, json.dumps(images.record()), images.location]
    shown += [repr(images.datasets), str(StoreFile("http://[", "--data_path"))]
    assert not any(secret in text for secret in ("5ecret", "pa55word") for text in shown)
