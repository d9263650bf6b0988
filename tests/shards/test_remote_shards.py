"""Shards on a web server: cached, verified, shared, removed in order; every fault of a store has an end."""

import json
import os
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.harness.damaged_files import flip_bit
from tests.harness.http_store import CUT, DRIP, ENDLESS, HANG, http_store, hurry
from tests.harness.image_kinds import write_noise
from tests.harness.runs import ROOT
from tests.harness.shards import pack
from vae.data.dataset import CropDataset
from vae.data.loading import TrainLoader
from vae.data.probing import probe
from vae.images.formats import BadImageError
from vae.sampling.buckets import aspects, assign, bucket_shapes
from vae.sampling.stream_buckets import StreamBuckets
from vae.shards import dataset_json, remote_shards, shard_cache, store
from vae.shards.dataset_json import read_dataset
from vae.shards.remote_shards import open_images
from vae.shards.shard_cache import FOLDER_NAME, Entry, ShardCache, open_cache
from vae.shards.shard_images import ShardImages
from vae.shards.store import StoreFile
from vae.system.errors import DataError, UserError
from vae.system.host import GIB

pytest.importorskip("aiohttp", reason="requirements-remote.txt is not installed")


# Of localhost, signed by itself, for this test.
CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBfzCCASWgAwIBAgIUWi9JGmPw2MIPgUE6PGHiLXtEA1kwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMzAzMDk1MFoYDzIxMjYxMDMw
MDMwOTUwWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAASeBbgBn+EHUN6d+LkBx+wYolsrJYVCTYD04kv0vlZAXoXu+ifHHnXv
VkcnQZHrn4HkoJgbWlRnjVTRkpjWfLKDo1MwUTAdBgNVHQ4EFgQUGpo+BXsvfwYj
84bWssjlm72CT6IwHwYDVR0jBBgwFoAUGpo+BXsvfwYj84bWssjlm72CT6IwDwYD
VR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNIADBFAiEAwll7w5SZ9Lh9ywf6j9e5
F09CfDEFO33KTO/JaUd6MX4CIAQRAjqFLWWSyo6qO20mZPcrz8NmK2w2MCuxscc0
YZgE
-----END CERTIFICATE-----
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgi7kYhuMLoshW7bPu
kOC9yyuZQRC0IAjcNR+MgblLLvqhRANCAASeBbgBn+EHUN6d+LkBx+wYolsrJYVC
TYD04kv0vlZAXoXu+ifHHnXvVkcnQZHrn4HkoJgbWlRnjVTRkpjWfLKD
-----END PRIVATE KEY-----
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A dataset of 40 images in shards of about 9 images and 70 kB."""
    folder = tmp_path_factory.mktemp("store")
    write_noise(folder / "raw", 40, 48, 48)
    dataset = pack(folder / "raw", folder / "set", shard_bytes=80_000)
    assert len(read_dataset(dataset).shards) == 5
    return folder / "set"


@pytest.fixture
def web(root, monkeypatch):
    hurry(monkeypatch)
    monkeypatch.setattr(shard_cache, "POLL_SECONDS", 0.01)
    with http_store(root) as server:
        yield server


@pytest.fixture
def cache(tmp_path):
    return ShardCache(tmp_path / "cache", 1)


def test_local_shards_go_through_a_cache_that_was_asked_for(root, tmp_path, monkeypatch):
    monkeypatch.setattr(remote_shards, "FIRST_READS", 0)
    shared = tmp_path / "shared?disk #1 100%"
    shared.symlink_to(root)
    path, folder = str(shared / "dataset.json"), str(tmp_path / "cache")
    assert open_cache([path, None], None, 1) is None
    assert open_cache([str(root)], folder, 1) is None  # a folder of images
    dataset = read_dataset(path)
    here, cached = open_images(dataset, 4, None), open_images(dataset, 4, open_cache([path], folder, 1))
    default = open_images(dataset, 4, ShardCache(tmp_path / "of_another", 1))  # of a remote part of a mixture
    assert default.read(0) == here.read(0)
    assert "hits" not in default.counts()
    for images in (cached, cached.scattered()):
        assert [images.read(index) for index in range(40)] == [here.read(index) for index in range(40)]
    assert len(list(Path(folder, FOLDER_NAME).glob("*.tar"))) == 5
    cached.counts()
    assert cached.read(7) == here.read(7)
    assert cached.counts()["hits"] == 1


def remote(web, cache, num_streams=1) -> ShardImages:
    return open_images(read_dataset(web.url()), num_streams, cache)


def local(root) -> ShardImages:
    return ShardImages(read_dataset(root / "dataset.json"), num_streams=1)


def test_each_shard_is_downloaded_once_and_its_bytes_are_those_of_the_folder(web, cache, root):
    images = remote(web, cache)
    assert [images.read(n) for n in range(40)] == [local(root).read(n) for n in range(40)]
    again = remote(web, cache)  # as another process does
    assert [again.read(n) for n in range(40)] == [images.read(n) for n in range(40)]
    assert len(web.wholes()) == len(set(web.wholes())) == 5
    assert len(web.wholes(".npy")) == 5
    assert {images.metadata(n)["key"] for n in range(40)} == {images.key(n) for n in range(40)}
    assert images.metadata(39) == local(root).metadata(39)
    counts, tars = images.counts(), sum(shard.bytes for shard in images.dataset.shards)
    assert (counts["misses"], counts["hits"]) == (5, 116)
    indexes = sum(path.stat().st_size for path in root.glob("*.npy"))
    assert (
        counts["remote_bytes"]
        == tars + indexes
        == web.sent.total() - 2 * (root / "dataset.json").stat().st_size
    )
    assert again.counts()["remote_bytes"] == 0


def test_testing_a_few_images_downloads_no_shard(web, cache):
    assert probe(CropDataset(remote(web, cache), image_size=32), 0.0) == []
    assert web.wholes() == []


def test_store_without_ranges_gives_whole_shards(web, cache, root, capsys):
    web.gives_ranges = False
    images = remote(web, cache).scattered()
    assert [images.read(n) for n in range(40)] == [local(root).read(n) for n in range(40)]
    assert len(web.wholes()) == 5
    capsys.readouterr()
    nothing = remote(web, ShardCache(cache.folder / "none", 0))
    with pytest.raises(DataError, match="--cache_gib"):
        nothing.read(0)
    assert capsys.readouterr().out == ""  # no cache was asked for


def test_shards_of_the_next_windows_are_there_before_they_are_read(web, cache):
    """Training waits for no shard after the first ones."""
    crops = CropDataset(remote(web, cache, num_streams=2), image_size=32)
    with TrainLoader(crops, local_batch=2) as loader:
        batches = loader.batches(0)
        counts = [next(batches).counts]
        crops.images._files._ahead.join()
        counts += [batch.counts for batch in batches]
    assert sum(one.get("misses", 0) for one in counts[1:]) == 0
    assert sum(one["hits"] for one in counts[1:]) == 2 * (len(counts) - 1)
    assert counts[1]["open_shards"] == 5
    assert len(web.wholes()) == 5


def test_buckets_announce_the_windows_of_their_batches(web, cache):
    """The windows of the other order; a resumed epoch has the same batches."""
    images = remote(web, cache, num_streams=2)
    buckets = assign(aspects(images.sizes(images.spread(10))), bucket_shapes(32, 8, 3), 1)
    crops = CropDataset(images, image_size=32, buckets=buckets)
    order = StreamBuckets(images.order(0), images.sizes, buckets, 4)
    with TrainLoader(crops, local_batch=4, order=order) as loader:
        batches = [next(loader.batches(0))]
        images._files._ahead.join()
        batches += loader.batches(0, first_step=1)
        again = [batch.indices.tolist() for batch in loader.batches(0, first_step=3)]
    assert sum(batch.counts.get("misses", 0) for batch in batches[1:]) == 0
    assert {tuple(batch.images.shape) for batch in batches} == {(4, 3, 32, 32)}
    assert again == [batch.indices.tolist() for batch in batches[3:]]
    assert len(batches) == 10


# ---- the cache ---------------------------------------------------------------------------------------------


def entries(images: ShardImages) -> list[Entry]:
    return [Entry(shard.name, shard.bytes, shard.sha256) for shard in images.dataset.shards]


def cached(cache: ShardCache) -> set[str]:
    return {path.stem for path in cache.folder.glob("*.tar")}


def room_for(cache: ShardCache, images: ShardImages, shards: int) -> ShardCache:
    """The same folder with room for so many shards, and all indexes."""
    most = max(shard.bytes for shard in images.dataset.shards)
    return ShardCache(cache.folder.parent, (shards + 0.5) * most / GIB)


def test_shards_that_were_used_longest_ago_are_removed(web, cache):
    few = room_for(cache, remote(web, cache), 2)
    images = remote(web, few)
    shards = entries(images)
    for number, when in ((0, 3e9), (1, 1e9)):  # the clock of another machine may be ahead
        images.read(9 * number)
        os.utime(few.find(shards[number]), (when, when))
    images.read(39)
    assert cached(few) == {shards[0].sha256, shards[4].sha256}


def test_pinned_shards_stay_and_others_are_read_by_range(web, cache, root, capsys):
    few = room_for(cache, remote(web, cache), 1)
    images = remote(web, few)
    images.read(0)
    few.pin(entries(images)[0])
    assert images.read(39) == local(root).read(39)
    assert cached(few) == {entries(images)[0].sha256}
    assert capsys.readouterr().out.count("--cache_gib") == 1
    few.unpin(entries(images)[0])
    few.look_again()
    images.read(39)
    assert cached(few) == {entries(images)[4].sha256}


HOLDER = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from vae.shards.shard_cache import Entry, ShardCache
cache = ShardCache(Path(sys.argv[1]), 1)
cache.pin(Entry("x", 1, sys.argv[2]))
print("pinned", flush=True)
time.sleep(60)
"""


def test_pins_and_downloads_of_a_killed_process_end_with_it(web, cache):
    few = room_for(cache, remote(web, cache), 1)
    images = remote(web, few)
    images.read(0)
    first, last = entries(images)[0], entries(images)[4]
    words = [sys.executable, "-c", HOLDER, str(cache.folder.parent), first.sha256]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=ROOT) as holder:
        assert holder.stdout.readline() == b"pinned\n"
        images.read(39)
        assert cached(few) == {first.sha256}
        holder.kill()
    left = cache.folder / f"{last.sha256}.{last.bytes}.01234567.part"  # of a download that was killed
    left.touch()
    few.look_again()
    images.read(39)
    assert cached(few) == {last.sha256}
    assert not left.exists()


@pytest.mark.parametrize("indexes", [0, 2])
def test_indexes_count_for_the_limit(web, cache, root, indexes):
    """A limit with room for so many indexes is never exceeded, and all images can be read."""
    size = max(path.stat().st_size for path in root.glob("*.npy"))
    few = ShardCache(cache.folder.parent, indexes * size / GIB)
    images = remote(web, few)
    for number in range(40):
        assert images.read(number) == local(root).read(number)
        kept = [path.stat().st_size for path in few.folder.glob("*.*") if path.suffix]
        assert sum(kept) <= indexes * size
    assert len(kept) == indexes


def test_two_readers_of_a_shard_download_it_once(web, cache):
    readers = [remote(web, cache) for _ in range(4)]
    threads = [threading.Thread(target=reader.read, args=(0,)) for reader in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(web.wholes()) == 1


def test_shard_that_another_machine_removes_is_fetched_again(web, cache, root):
    images = remote(web, cache)
    for number in range(3):
        assert images.read(number) == local(root).read(number)
        cache.find(entries(images)[0]).unlink()
    assert len(web.wholes()) == 3


def test_full_disk_is_one_line_and_images_are_read_one_by_one(web, cache, root, capsys, monkeypatch):
    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "touch", full)
    images = remote(web, cache)
    assert [images.read(n) for n in range(40)] == [local(root).read(n) for n in range(40)]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert "--cache_dir" in lines[0]
    assert "No space left" in lines[0]


def test_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--cache_dir .* is inside of .*file, which is a file"):
        ShardCache(tmp_path / "file", 1)


# Names in a user's folder: each suffix of the cache, its patterns, and what comes close to them.
SHA = "0123456789abcdef" * 4
USERS_NAMES = (
    "backup.tar",
    "labels.npy",
    "film.part",
    "x.5.part",
    "notes.bad",
    "a.tmp",
    f"{SHA}.tar",
    f"{SHA}.npy",
)
USERS_NAMES += (f"{SHA}.bad", f"{SHA}.5.01234567.part", ".lock", "noise")
IN_THE_CACHE = (
    "backup.tar",
    "labels.npy",
    "film.part",
    "film.5.part",
    "notes.bad",
    f"{SHA}.tar.gz",
    "short0.tar",
)
IN_THE_CACHE += (f"{SHA}.5.part", f"{SHA}.5.notes.part", f"{SHA.upper()}.TAR", f"x{SHA}.tar", f"{SHA}.txt")


def test_files_of_others_are_neither_counted_nor_removed(web, tmp_path, root):
    """In --cache_dir every name; in the folder of the cache every name that the cache does not make."""
    parent = tmp_path / "mine"
    own = ShardCache(parent, 1).folder
    users = [parent / name for name in USERS_NAMES] + [own / name for name in IN_THE_CACHE]
    for path in users:
        path.write_bytes(b"a" * 1000)
        os.utime(path, (1, 1))
    small = room_for(ShardCache(parent, 1), remote(web, ShardCache(tmp_path / "other", 1)), 1)
    images = remote(web, small)
    assert [images.read(n) for n in range(40)] == [local(root).read(n) for n in range(40)]
    assert len([path for path in own.glob("*.tar") if len(path.stem) == 64]) == 1  # others were removed
    assert ShardCache(parent, 5e-7).room() == int(5e-7 * GIB)
    for path in users:
        assert (path.read_bytes(), path.stat().st_mtime) == (b"a" * 1000, 1), path.name


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_links_in_the_cache_are_not_followed(web, cache, tmp_path, root):
    """What links with names of the cache lead to stays as it is, and no file appears there."""
    images = remote(web, cache)
    first, second = entries(images)[:2]
    users, new = tmp_path / "users", tmp_path / "new"
    users.write_bytes(b"a" * first.bytes)  # the shard's size
    os.utime(users, (1, 1))
    for suffix in ("tar", "npy"):
        (cache.folder / f"{first.sha256}.{suffix}").symlink_to(users)
    (cache.folder / f"{second.sha256}.bad").symlink_to(new)
    cache.touch(first)
    assert images.read(0) == local(root).read(0)
    with pytest.raises(BadImageError, match="bad_shard"):
        images.read(9)
    assert (users.read_bytes(), users.stat().st_mtime) == (b"a" * first.bytes, 1)
    assert not new.exists()
    (tmp_path / "b" / FOLDER_NAME).mkdir(parents=True)
    (tmp_path / "b" / FOLDER_NAME / ".lock").symlink_to(new)
    with pytest.raises(UserError, match="--cache_dir"):
        ShardCache(tmp_path / "b", 1)
    assert not new.exists()


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_folder_of_the_cache_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "users").mkdir()
    (tmp_path / FOLDER_NAME).symlink_to(tmp_path / "users")
    with pytest.raises(UserError, match=r"--cache_dir .* is a link: give the folder that it points to"):
        ShardCache(tmp_path, 1)
    assert not list((tmp_path / "users").iterdir())


def test_second_name_of_a_users_file_is_not_of_the_cache(web, cache, tmp_path, root):
    """A hard link to a copy of the shard: neither used nor marked as used."""
    images = remote(web, cache)
    first = entries(images)[0]
    users = tmp_path / "users"
    users.write_bytes((root / first.name).read_bytes())
    os.utime(users, (1, 1))
    os.link(users, cache.folder / f"{first.sha256}.tar")
    assert images.read(0) == local(root).read(0)
    assert users.stat().st_mtime == 1
    assert len(web.wholes()) == 1


# ---- damage ------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(root, tmp_path, web):
    """The store with a copy of the dataset that the test may damage."""
    web.root = tmp_path / "copy"
    web.root.mkdir()
    for path in (*root.glob("*.tar"), *root.glob("*.npy"), root / "dataset.json"):
        (web.root / path.name).write_bytes(path.read_bytes())
    return web.root


def test_bad_shard_is_fetched_again_once_and_then_quarantined(web, cache, damaged):
    flip_bit(damaged / "images-000000.tar", 3000)
    images = remote(web, cache)
    crops = CropDataset(images, image_size=32)
    rejected = [crops[0, n].rejection for n in range(40)]
    bad = images.dataset.shards[0].samples
    assert [one is not None for one in rejected] == [n < bad for n in range(40)]
    assert {one.reason for one in rejected[:bad]} == {"bad_shard"}
    assert rejected[0].name == f"images-000000.tar/{images.key(0)}"
    assert web.wholes().count("images-000000.tar") == 2
    assert len(cached(cache)) == 4


def test_later_runs_try_a_bad_shard_once_until_the_store_is_repaired(web, tmp_path, damaged, capsys):
    """Each run says what it has from earlier ones; a process that shares the cache does not try again."""

    def run():
        cache, web.requests[:] = ShardCache(tmp_path / "cache", 1), []
        images, beside = remote(web, cache), remote(web, ShardCache(tmp_path / "cache", 1))
        good = [
            CropDataset(one, image_size=32)[0, n].rejection is None
            for one in (images, beside)
            for n in (0, 1)
        ]
        assert len(set(good)) == 1
        lines = [line for line in capsys.readouterr().out.splitlines() if "earlier runs" in line]
        return (
            good[0],
            web.wholes().count("images-000000.tar"),
            [line.partition(", since")[0] for line in lines],
        )

    line = "bad shards that earlier runs found in the store: 1"
    flip_bit(damaged / "images-000000.tar", 3000)
    assert run() == (False, 2, [])
    assert run() == (False, 1, [line, line])
    flip_bit(damaged / "images-000000.tar", 3000)
    assert run() == (True, 1, [line, line])
    assert run() == (True, 0, [])


def test_copy_that_changed_on_the_disk_is_fetched_again(web, cache, root):
    images = remote(web, cache)
    images.read(0)
    path, offset = cache.find(entries(images)[0]), int(images._index(0)["offset"][3])
    flip_bit(path, offset)
    assert [images.read(n) for n in range(5)] == [local(root).read(n) for n in range(5)]
    assert len(web.wholes()) == 2
    os.truncate(path, 2000)
    assert images.read(0) == local(root).read(0)
    assert len(web.wholes()) == 3


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not say who may write")
@pytest.mark.parametrize("is_shared", [False, True])
def test_cache_that_others_may_write_is_verified_once(web, tmp_path, root, is_shared):
    """Another file of the right size, in which the bytes of the image are right: its JSON file is not."""
    (tmp_path / "cache").mkdir()
    remote(web, ShardCache(tmp_path / "cache", 1)).read(0)
    folder = tmp_path / "cache" / FOLDER_NAME
    folder.chmod(0o777 if is_shared else 0o755)
    (path,) = folder.glob("*.tar")
    path.chmod(0o644)
    end = path.stat().st_size - 600
    flip_bit(path, path.read_bytes().rindex(b"}", 0, end))
    images = remote(web, ShardCache(tmp_path / "cache", 1))
    assert images.read(0) == local(root).read(0)
    assert len(web.wholes()) == 1 + is_shared
    flip_bit(path, path.read_bytes().rindex(b"}", 0, end))
    assert images.read(0) == local(root).read(0)
    assert len(web.wholes()) == 1 + is_shared  # this process has verified it


def test_forged_index_in_the_cache_is_fetched_again(web, cache, root):
    images = remote(web, cache)
    expected = images.read(0)
    (path,) = cache.folder.glob("*.npy")
    rows = np.load(path)
    rows["width"] *= 2
    np.save(path, rows)
    images = remote(web, cache)
    assert images.sizes(np.arange(1)).tolist() == [[48, 48]]
    assert images.read(0) == expected
    assert len(web.wholes(".npy")) == 2


@pytest.mark.parametrize("bad", ["cut", "larger"])
def test_bad_index_rejects_the_images_of_its_shard(web, cache, damaged, bad):
    path = damaged / "images-000000.npy"
    path.write_bytes(path.read_bytes()[:-9] if bad == "cut" else path.read_bytes() + bytes(5000))
    images = remote(web, cache)
    for number in range(3):
        with pytest.raises(BadImageError, match="bad_index"):
            images.read(number)
    assert len(web.wholes("images-000000.npy")) == 2
    assert images.read(39)


def test_connection_that_ends_within_a_shard_is_tried_again(web, cache, root):
    web.answers["images-000000.tar"] = [CUT, CUT, 200]
    assert remote(web, cache).read(0) == local(root).read(0)


# ---- stores that do not answer -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "words"),
    [(403, "403"), (500, "500"), (HANG, "no answer for 0.4 s")],
)
@pytest.mark.parametrize("name", ["dataset.json", "images-000000.npy", "images-000000.tar"])
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
    assert len([path for path, _ in web.requests if path == f"/{name}"]) == 3
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1  # that it waits
    assert "trying again" in printed[0]


def test_store_that_comes_back_in_time_is_waited_for(web, cache, root, capsys, monkeypatch):
    images = remote(web, cache)
    for answer in (500, HANG):
        monkeypatch.setattr(store, "STALL_SECONDS", 0.4 if answer == HANG else 30)
        web.answers["images-000000.tar"] = [answer, answer, 200]
        assert images.read(0) == local(root).read(0)
        cache.find(entries(images)[0]).unlink()
    assert capsys.readouterr().out.count("trying again") == 2
    web.stop()
    monkeypatch.setattr(store, "STALL_SECONDS", 30)
    monkeypatch.setattr(store, "time", SimpleNamespace(sleep=lambda _seconds: web.start()))
    assert images.read(0) == local(root).read(0)


def test_single_errors_delay_nothing_and_are_no_news(web, cache, root, capsys):
    web.answers["images-000000.tar"] = [500, 200]
    assert remote(web, cache).read(0) == local(root).read(0)
    assert capsys.readouterr().out == ""


def test_endless_answers_are_read_no_further_than_asked(web, cache, monkeypatch):
    images = remote(web, cache)
    images.key(0)
    for name in ("images-000000.tar", "images-000001.npy"):
        web.answers[name] = [ENDLESS]
    files = images._files.scattered()
    with pytest.raises(BadImageError, match="bad_shard"):
        files.read_unchecked(images.dataset.shards[0], 0, 4096)
    with pytest.raises(BadImageError, match="larger than an index"):
        files.fetch_index(images.dataset.shards[1])
    assert max(web.sent[name] for name in web.answers) < 2**26  # buffers of both sides, of several tries
    web.answers["dataset.json"] = [ENDLESS]
    monkeypatch.setattr(dataset_json, "MAX_JSON_BYTES", 2**20)
    with pytest.raises(DataError, match="larger than"):
        read_dataset(web.url())


def test_store_that_sends_a_few_bytes_per_second_is_one_line(web, monkeypatch):
    monkeypatch.setattr(store, "STALL_SECONDS", 0.5)
    web.answers["dataset.json"] = [DRIP]
    with pytest.raises(DataError, match="or less than 30 kB, 3 times: check the network"):
        read_dataset(web.url())


def test_first_images_do_not_wait_for_a_whole_shard(web, cache, root, monkeypatch):
    monkeypatch.setattr(remote_shards, "FIRST_READS", 8)
    web.holds_wholes = True
    images = remote(web, cache)
    assert [images.read(n) for n in range(8)] == [local(root).read(n) for n in range(8)]
    assert not list(cache.folder.glob("*.tar"))
    web.released.set()
    assert [images.read(n) for n in range(9)] == [local(root).read(n) for n in range(9)]
    images._files._ahead.join()
    assert web.wholes() == ["images-000000.tar"]
    assert images.read(0)
    assert images.counts()["hits"] > 0


def test_certificate_that_is_not_trusted_is_named(root, tmp_path, monkeypatch):
    hurry(monkeypatch)
    (tmp_path / "both.pem").write_text(CERTIFICATE)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "both.pem")
    with http_store(root) as web:
        web._server.socket = context.wrap_socket(web._server.socket, server_side=True)
        url = web.url().replace("http:", "https:")
        with pytest.raises(DataError) as caught:
            read_dataset(url)
        with pytest.raises(DataError, match="certificate is not trusted"):
            store.stamp(StoreFile(url, "--data_path"))
    assert "certificate is not trusted (self-signed certificate), 3 times" in str(caught.value)
    assert "SSL_CERT_FILE" in str(caught.value)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("s3://bucket/dataset.json", "s3fs.*requirements-remote.txt"),
        ("gs://bucket/dataset.json", "gcsfs.*requirements-remote.txt"),
        ("htp://host/dataset.json", "another kind.*begins with s3://"),
        ("file:///x/dataset.json", "another kind"),
        ("simplecache::s3://bucket/dataset.json", "another kind"),
        ("https://host:99999/dataset.json", "no valid host or port"),
        ("https://[x/dataset.json", "no valid host or port"),
        ("https:///dataset.json", "no valid host or port"),
        ("https://a..b/dataset.json", "no valid host or port"),
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


def test_ranges_are_given_by_name(tmp_path):
    """The second parameter of s3fs.S3FileSystem.cat_file is the version of a file."""
    from fsspec import register_implementation
    from fsspec.implementations.local import LocalFileSystem

    class Versioned(LocalFileSystem):
        @classmethod
        def _strip_protocol(cls, path):
            return path.removeprefix("versioned://")

        def cat_file(self, path, version_id=None, start=None, end=None):
            assert version_id is None
            return super().cat_file(path, start=start, end=end)

    register_implementation("versioned", Versioned)
    (tmp_path / "file").write_bytes(b"0123456789")
    file = StoreFile(f"versioned://{tmp_path}/file", "--data_path")
    assert store.read_range(file, 2, 3) == b"234"


# ---- credentials -------------------------------------------------------------------------------------------


def test_passwords_and_signatures_are_used_and_not_shown(web, cache, capsys):
    url = web.url("dataset.json?signature=5ecret&a=%2B%20", login="me:pa55word@")
    images = open_images(read_dataset(url), 1, cache)
    assert images.read(0)
    assert any("Basic" in one for one in web.authorizations)
    assert all(path.endswith("?signature=5ecret&a=%2B%20") for path, _ in web.requests)
    web.answers["images-000001.tar"] = [403]
    with pytest.raises(DataError, match="403") as caught:
        images.read(15)
    shown = [str(caught.value), capsys.readouterr().out, json.dumps(images.record()), images.location]
    shown += [repr(images.dataset), str(StoreFile("http://[", "--data_path"))]
    assert not any(secret in text for secret in ("5ecret", "pa55word") for text in shown)
