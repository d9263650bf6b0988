"""A new version of a dataset shares the shards of the one before it: all of them, or the unchanged ones."""

import hashlib
import json
import os
import shutil

import numpy as np
import pytest
from PIL import Image

from tests.harness.image_kinds import detailed, encoded
from tests.harness.shards import make_older, pack
from tests.prepare.test_shard import members
from vae.config.prepare_flags import ShardConfig, ValidateConfig, parse_prepare_flags
from vae.prepare import check_file
from vae.prepare.ledger import ACCEPTED, REJECTED, Ledger, Result
from vae.prepare.shard import verify
from vae.prepare.shard.members import TRAINING, VALIDATION, Members
from vae.prepare.shard.shard_images import run_shard
from vae.prepare.shard.verify import run_verify, verify_shard
from vae.shards.dataset_json import read_dataset
from vae.shards.index import index_path, read_index
from vae.shards.shard_images import ShardImages
from vae.system.errors import DataError, UserError

IMAGES = 30


def add(folder, numbers):
    for number in numbers:
        (folder / f"{number:02}.png").write_bytes(encoded(detailed(seed=number), "PNG"))


def write(root, name, parent=None, **flags):
    """Pack raw/ in shards of at most 40 kB: about 4 images each."""
    before = str(root / parent / "dataset.json") if parent else None
    flags = {"val_split": 0.2, "parent": before, **flags}
    return read_dataset(pack(root / "raw", root / name, shard_bytes=40_000, **flags))


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """A folder with two versions: the second has two more images, and lacks one."""
    root = tmp_path_factory.mktemp("versions")
    (root / "raw").mkdir()
    add(root / "raw", range(IMAGES))
    (root / "raw" / "preprocess_settings.json").write_text('{"target_size": [64], "format": "png"}')
    first = write(root, "one")
    add(root / "raw", (100, 101))
    (root / "raw" / "07.png").unlink()
    return root, first, write(root, "two", "one", drop=True)


def names(folder):
    return {path.name for path in folder.glob("*.tar")}


def test_unchanged_shards_are_the_same_files(versions):
    root, _, _ = versions
    both = names(root / "one") & names(root / "two")
    assert len(both) >= 3
    for name in both:
        for suffix in (".tar", ".npy", ".idx", ".tar.idx"):
            one, two = (root / part / name.replace(".tar", suffix) for part in ("one", "two"))
            assert one.samefile(two)
    assert names(root / "two") - both


def test_new_version_has_all_images_once_and_is_valid(versions, tmp_path):
    root, _, second = versions
    found = [data for name, data in members(root / "two") if name.endswith(".png")]
    assert sorted(found) == sorted(path.read_bytes() for path in (root / "raw").glob("*.png"))
    report = tmp_path / "report.json"
    config = ValidateConfig(input_dir=str(second.path), output_file=str(report), num_workers="1")
    assert run_verify(config) == 0


def test_version_of_the_parent_and_the_transforms_are_on_record(versions):
    _, first, second = versions
    assert (first.parent, second.parent) == (None, first.version)
    assert first.transforms == second.transforms == {"target_size": [64], "format": "png"}
    assert first.version != second.version


def test_repeated_command_changes_nothing(versions):
    root, _, second = versions
    before = {path: path.stat().st_mtime_ns for path in (root / "two").glob("[iv]*-*")}
    assert write(root, "two", "one", drop=True).version == second.version
    assert {path: path.stat().st_mtime_ns for path in (root / "two").glob("[iv]*-*")} == before


@pytest.fixture(scope="module")
def grown(versions, tmp_path_factory):
    """A version, and a folder with an old image, three new ones, and two like old ones of each subset."""
    root, _, _ = versions
    new = tmp_path_factory.mktemp("new")
    (new / "known.png").write_bytes((root / "raw" / "03.png").read_bytes())
    add(new, (200, 201, 202))
    by_key = {hashlib.sha256(path.read_bytes()).hexdigest()[:32]: path for path in (root / "raw").iterdir()}
    likes = {}
    for name in ("dataset.json", "validation.json"):
        key = next(key for key in keys_of(root / "one" / name) if key in by_key)
        likes[name] = new / f"like_{name}.jpg"
        with Image.open(by_key[key]) as image:
            image.convert("RGB").save(likes[name], quality=60)
    return root, new, likes


def keys_of(path):
    return [row["key"].decode() for rows in ShardImages(read_dataset(path), 1).indexes() for row in rows]


def test_parent_is_kept_whole_and_only_new_files_are_decoded(grown, capsys, tmp_path, monkeypatch):
    root, new, likes = grown
    decoded, read = [], check_file.read_image
    counted = lambda path, **more: decoded.append(path) or read(path, **more)  # noqa: E731
    monkeypatch.setattr(check_file, "read_image", counted)
    given = {"shard_bytes": 40_000, "val_split": 0.2, "parent": str(root / "one" / "dataset.json")}
    path = pack(new, tmp_path / "set", **given)
    assert len(decoded) == 5
    old = [read_dataset(root / "one" / name).samples for name in likes]
    now = [read_dataset(tmp_path / "set" / name).samples for name in likes]
    assert sum(old) == IMAGES
    assert sum(now) == IMAGES + 5
    printed = capsys.readouterr().out
    for name, like, before, after in zip(likes, likes.values(), old, now, strict=True):
        keys = keys_of(tmp_path / "set" / name)
        assert set(keys_of(root / "one" / name)) < set(keys)
        assert hashlib.sha256(like.read_bytes()).hexdigest()[:32] in keys  # in the subset of its twin
        assert f"{after} ({before} of --parent and {after - before} new)" in printed
    config = ValidateConfig(input_dir=str(path), output_file=str(tmp_path / "report.json"), num_workers="1")
    assert run_verify(config) == 0
    version = read_dataset(path).version
    assert read_dataset(pack(new, tmp_path / "set", **given)).version == version
    assert len(decoded) == 5  # the same command again
    only = pack(new, tmp_path / "only", parent=str(path), drop=True)
    assert len(keys_of(only)) == 6


def test_image_that_looks_like_both_subsets_is_left_out(tmp_path):
    """Two new images look alike, one looks like an old training image, the other like a validation image."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    names = {"like_training": 0b1, "like_validation": 0b111}
    for number, (name, phash) in enumerate(names.items()):
        record = {"phash": f"{phash:016x}{0:016x}", "format": "PNG"}
        record |= {"width": 8, "height": 8, "flags": []}
        ledger.add_file(name)
        ledger.record(Result(name, ACCEPTED, sha256=f"{number:064x}", record=record))
    old = {TRAINING: 0, VALIDATION: 0b1111111}

    def hashes(side):
        yield np.array([[old[side], 0]], np.uint64)

    config = ShardConfig(input_dir="raw", output_dir="out", val_split=0.0)
    found = Members(ledger, config, tmp_path / "scratch", hashes)
    members = [(side, member.path) for side, member in found]
    assert members == [(TRAINING, os.path.join("raw", "like_training"))]
    assert ledger.counts(REJECTED) == [("looks_like_both", 1)]
    ledger.close()


def test_other_rules_than_those_of_the_parent_are_refused(grown, tmp_path):
    root, new, _ = grown
    with pytest.raises(UserError, match=r"--parent .*--min_size 1.*--drop"):
        pack(new, tmp_path / "set", parent=str(root / "one" / "dataset.json"), min_size=8)


def test_damaged_parent_is_refused(grown, tmp_path):
    root, new, _ = grown
    shutil.copytree(root / "one", tmp_path / "one")
    os.truncate(tmp_path / "one" / "images-000000.tar", 1000)
    with pytest.raises(DataError, match=r"--parent .*is damaged: images-000000\.tar"):
        pack(new, tmp_path / "set", parent=str(tmp_path / "one" / "dataset.json"))


def test_version_of_an_older_dataset_has_the_hashes_of_all_indexes(grown, tmp_path):
    root, new, _ = grown
    shutil.copytree(root / "one", tmp_path / "one")
    for name in ("dataset.json", "validation.json"):
        make_older(tmp_path / "one" / name)
    path = pack(new, tmp_path / "set", parent=str(tmp_path / "one" / "dataset.json"), val_split=0.1)
    assert all(shard.index_sha256 for shard in read_dataset(path).shards)
    assert len(keys_of(path)) >= IMAGES * 0.75


def test_other_images_in_the_same_folder_name_the_parent_as_remedy(versions):
    root, _, _ = versions
    with pytest.raises(UserError, match=r"--output_dir .*new folder, with --parent .*dataset\.json"):
        write(root, "one")


def test_missing_parent_is_an_error_before_anything_is_read(versions):
    root, _, _ = versions
    with pytest.raises(DataError, match=r"--parent .*does not exist"):
        write(root, "three", "nothing")
    assert not (root / "three").exists()


def test_parent_that_is_no_version_is_refused(versions, tmp_path):
    _, first, _ = versions
    content = json.loads(first.path.read_text())
    (tmp_path / "dataset.json").write_text(json.dumps(content | {"parent": 5}))
    with pytest.raises(DataError, match="parent"):
        read_dataset(tmp_path / "dataset.json")


def test_four_hundred_and_ten_images_cost_ten(tmp_path, monkeypatch):
    """The same folder with more files: the old ones are neither decoded nor hashed nor written again."""
    raw = tmp_path / "raw"
    raw.mkdir()
    for number in range(400):
        (raw / f"{number:03}.png").write_bytes(encoded(detailed(seed=number, height=16, width=16), "PNG"))
    (raw / "broken.png").write_bytes((raw / "000.png").read_bytes()[:60])
    (raw / "copy.png").write_bytes((raw / "000.png").read_bytes())
    given = {"shard_bytes": 100_000, "val_split": 0.1}
    first = pack(raw, tmp_path / "one", **given)
    for number in range(400, 410):
        (raw / f"{number:03}.png").write_bytes(encoded(detailed(seed=number, height=16, width=16), "PNG"))
    calls = {"read_image": [], "sha256_of_file": []}
    for name, names in calls.items():
        whole = getattr(check_file, name)
        counted = lambda path, names=names, whole=whole, **more: names.append(path) or whole(path, **more)  # noqa: E731
        monkeypatch.setattr(check_file, name, counted)
    second = pack(raw, tmp_path / "two", parent=str(first), **given)
    assert {name: len(names) for name, names in calls.items()} == {
        "read_image": 10,
        "sha256_of_file": 20,  # to look for them in the parent, and with the result
    }
    added = [json.loads(second.with_name(name).read_text())["changes"]["added"] for name in SUBSETS]
    assert sum(one["images"] for one in added) == 10
    for one, name in zip(added, SUBSETS, strict=True):
        new = {shard.name for shard in read_dataset(second.with_name(name)).shards}
        old = {shard.name for shard in read_dataset(first.with_name(name)).shards}
        assert old < new
        assert one["shards"] == sorted(new - old)
    for path in (tmp_path / "one").glob("*-*.tar"):
        assert path.samefile(tmp_path / "two" / path.name)


SUBSETS = ("dataset.json", "validation.json")


@pytest.fixture(scope="module")
def removal(versions, tmp_path_factory):
    """A version without one whole shard, one more training image and one validation image."""
    root, first, _ = versions
    gone = {key_of(first, 0, row) for row in range(first.shards[0].samples)} | {key_of(first, 1, 0)}
    gone.add(key_of(read_dataset(root / "one" / "validation.json"), 0, 0))
    folder = tmp_path_factory.mktemp("removal")
    (folder / "keys.txt").write_text("".join(f"{key}\n" for key in sorted(gone)) + f"\n{'0' * 64}\n")
    words = ["--mode", "shard", "--output_dir", str(folder / "set"), "--parent", str(first.path)]
    assert run_shard(parse_prepare_flags([*words, "--remove", str(folder / "keys.txt")])) == 0
    return root, folder / "set", gone


def key_of(dataset, number, row):
    return read_index(index_path(dataset.folder, dataset.shards[number]), dataset.shards[number])["key"][
        row
    ].decode()


def test_removed_images_are_not_read_although_no_shard_is_written(removal, tmp_path):
    root, folder, gone = removal
    assert names(folder) == names(root / "one") - {"images-000000.tar"}
    assert all(path.samefile(root / "one" / path.name) for path in folder.glob("*.tar"))
    before = {key for name in SUBSETS for key in keys_of(root / "one" / name)}
    after = [keys_of(folder / name) for name in SUBSETS]
    assert {key for keys in after for key in keys} == before - gone
    for name, keys in zip(SUBSETS, after, strict=True):
        images = ShardImages(read_dataset(folder / name), 1)
        assert len(images) == len(keys)
        for number, key in enumerate(keys):
            assert hashlib.sha256(images.read(number)).hexdigest()[:32] == key
            assert images.metadata(number)["key"] == key
    changes = json.loads((folder / "dataset.json").read_text())["changes"]
    assert changes["added"] == {"images": 0, "shards": []}
    assert changes["removed"] == {"images": len(gone) - 1, "shards": ["images-000000.tar"]}


def test_validation_does_not_decode_removed_images(removal, tmp_path, monkeypatch):
    _, folder, gone = removal
    decoded = []
    whole = verify.decode_bytes
    monkeypatch.setattr(
        verify, "decode_bytes", lambda data, **more: decoded.append(data) or whole(data, **more)
    )
    dataset = read_dataset(folder / "dataset.json")
    assert [problem for shard in dataset.shards for problem in verify_shard(dataset, 10**6, shard)] == []
    assert len(decoded) == dataset.samples
    assert not gone & {hashlib.sha256(data).hexdigest()[:32] for data in decoded}


def test_removed_images_stay_out_of_later_versions(removal, tmp_path):
    """Whether shards are kept or packed again; the next list adds to the first."""
    root, folder, gone = removal
    for flags in ({}, {"drop": True}):
        given = {"val_split": 0.2, "parent": str(folder / SUBSETS[0]), **flags}
        path = pack(root / "raw", tmp_path / f"set{len(flags)}", **given)
        kept = {key for name in SUBSETS for key in keys_of(path.with_name(name))}
        sources = {
            hashlib.sha256(file.read_bytes()).hexdigest()[:32] for file in (root / "raw").glob("*.png")
        }
        assert kept >= sources - gone
        assert not kept & gone
        removed = json.loads(path.with_name("removed.json").read_text())
        assert {key for keys in removed.values() for key in keys} == gone | {"0" * 32}
    another = sorted(kept)[0]
    (tmp_path / "keys.txt").write_text(another)
    config = ShardConfig(
        input_dir="", output_dir=str(tmp_path / "set3"), parent=str(path), remove=str(tmp_path / "keys.txt")
    )
    assert run_shard(config) == 0
    assert not {another, *gone} & {key for name in SUBSETS for key in keys_of(tmp_path / "set3" / name)}


def test_unknown_key_is_one_line(removal, tmp_path, capsys):
    root, _, _ = removal
    (tmp_path / "keys.txt").write_text(f"{'1' * 32}\n")
    run_shard(
        ShardConfig(
            input_dir="",
            output_dir=str(tmp_path / "set"),
            parent=str(root / "one" / "dataset.json"),
            remove=str(tmp_path / "keys.txt"),
        )
    )
    printed = capsys.readouterr()
    (line,) = [line for line in (printed.out + printed.err).splitlines() if "--remove" in line]
    assert f"1 of 1 keys are in no shard of --parent, for example {'1' * 32}" in line


def test_files_are_named_as_training_and_metadata_name_them(versions, tmp_path, capsys):
    _, first, _ = versions
    images = ShardImages(first, 1)
    printed, source = images.name(0), images.metadata(5)["source"]
    (tmp_path / "names.txt").write_text(f"{printed}\n{source}\nmisspelled.png\n")
    words = ["--mode", "shard", "--output_dir", str(tmp_path / "set"), "--parent", str(first.path)]
    assert run_shard(parse_prepare_flags([*words, "--remove", str(tmp_path / "names.txt")])) == 0
    before, after = (set(keys_of(path)) for path in (first.path, tmp_path / "set" / "dataset.json"))
    assert before - after == {images.key(0), images.key(5)}
    assert (
        "1 of 3 names are of no image of --parent, for example line 3 (misspelled.png)"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("text", "message"), [("", "has no line.*sha256sum"), ("a.png", r"line 1 \(a\.png\): give the SHA-256")]
)
def test_list_without_keys_is_refused(removal, tmp_path, text, message):
    root, _, _ = removal
    (tmp_path / "keys.txt").write_text(text)
    parent = str(root / "one" / "dataset.json")
    with pytest.raises(UserError, match=f"--remove .*{message}"):
        run_shard(
            ShardConfig(
                input_dir="",
                output_dir=str(tmp_path / "set"),
                parent=parent,
                remove=str(tmp_path / "keys.txt"),
            )
        )
    assert not (tmp_path / "set").exists()


def test_changed_list_of_removed_keys_is_noticed(removal, tmp_path):
    _, folder, _ = removal
    shutil.copytree(folder, tmp_path / "set")
    (tmp_path / "set" / "removed.json").write_text("{}")
    with pytest.raises(DataError, match=r"removed\.json does not have the SHA-256"):
        read_dataset(tmp_path / "set" / "dataset.json")
