"""Images that look alike are in one subset of a dataset of shards."""

import json
from hashlib import sha256

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.harness.image_kinds import encoded
from tests.harness.preparing import prepare
from tests.harness.runs import TINY
from tests.prepare.test_shard import shard
from vae.prepare import disk_blocks
from vae.prepare.demo.draw import draw_image
from vae.prepare.ledger import ACCEPTED, Ledger, Result
from vae.prepare.near_duplicates import are_near, cluster_sorted, near_between
from vae.prepare.perceptual_hash import MIRROR, hash_pixels
from vae.prepare.shard import write
from vae.prepare.shard.groups import Groups, hash_number
from vae.prepare.shard.shared import find_shared
from vae.shards.dataset_json import dataset_content, read_dataset
from vae.shards.shard_images import ShardImages
from vae.system.errors import DataError
from vae.training.run import train

PHOTOS = 16


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Drawn images, each with a mirrored copy and a compressed one, and a manifest without subsets."""
    folder = tmp_path_factory.mktemp("groups") / "raw"
    folder.mkdir()
    for number in range(PHOTOS):
        image = Image.fromarray(draw_image(96, 5, number))
        (folder / f"{number:02}_a.png").write_bytes(encoded(image, "PNG"))
        (folder / f"{number:02}_b.png").write_bytes(encoded(ImageOps.mirror(image), "PNG"))
        (folder / f"{number:02}_c.jpg").write_bytes(encoded(image, "JPEG", quality=50))
    return folder


def subsets(source, output):
    """The number of the photo of each image, for training and for validation."""
    photo = {sha256(path.read_bytes()).hexdigest()[:32]: path.name[:2] for path in source.glob("*_*")}
    found = []
    for name in ("dataset.json", "validation.json"):
        images = ShardImages(read_dataset(output / name), 1)
        found.append([photo[images.key(number)] for number in range(len(images))])
    return found


def test_copies_of_a_validation_image_do_not_train(source, tmp_path):
    done = shard(source, tmp_path / "set", "--val_split", "0.25")
    assert done.returncode == 0, done.stderr
    training, validation = subsets(source, tmp_path / "set")
    assert len(training) + len(validation) == 3 * PHOTOS
    assert not set(training) & set(validation)
    assert 0.1 < len(validation) / (3 * PHOTOS) < 0.5


def test_manifest_that_separates_copies_is_refused_unless_it_is_allowed(source, tmp_path):
    rows = [
        {"path": path.name, "sha256": "", "split": "val" if path.name == "03_b.png" else "train"}
        for path in sorted(source.glob("*_*"))
    ]
    manifest = source / "manifest.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        refused = shard(source, tmp_path / "set")
        assert refused.returncode not in (0, 1)
        assert "03_a.png, 03_b.png, 03_c.jpg" in refused.stderr
        assert "--group_by near_duplicates" in refused.stderr
        assert not list((tmp_path / "set").glob("*.tar"))
        allowed = shard(source, tmp_path / "set", "--no-near_duplicates")
        assert allowed.returncode == 0, allowed.stderr
        assert subsets(source, tmp_path / "set")[1] == ["03"]
    finally:
        manifest.unlink()


def grouped(tmp_path, phashes):
    """Groups of images with these perceptual hashes, and their results."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    results = []
    for number, phash in enumerate(phashes):
        digest = sha256(str(number).encode()).hexdigest()
        record = {"phash": f"{phash:032x}"}
        results.append(Result(f"{number}.png", ACCEPTED, sha256=digest, record=record))
        ledger.record(results[-1])
    ledger.list_files(result.name for result in results)
    groups = Groups(ledger, tmp_path / "phashes")
    ledger.close()
    return groups, results


def held(groups, results, share):
    chosen = groups.held_out(share)
    return [bool(chosen[groups.group(result)]) for result in results]


def unlike(count, seed=0):
    return [
        int(word) << 64 | number
        for number, word in enumerate(np.random.default_rng(seed).integers(2**63, size=count))
    ]


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 0.9])
@pytest.mark.parametrize("count", [1, 2, 30, 1500])
def test_images_without_copies_are_chosen_by_the_lowest_hashes(tmp_path, count, share):
    groups, results = grouped(tmp_path, unlike(count))
    found = held(groups, results, share)
    by_hash = [is_held for _, is_held in sorted(zip(map(hash_number, results), found, strict=True))]
    assert by_hash == sorted(by_hash, reverse=True)
    assert not all(found)
    assert abs(sum(found) - share * count) <= max(1, 0.05 * count)
    assert any(found) == (share > 0 and count > 1)


def test_large_group_trains_and_one_group_cannot_be_divided(tmp_path):
    alike = [7 << 64] * 40
    groups, results = grouped(tmp_path, [*alike, *unlike(60)])
    found = held(groups, results, 0.3)
    assert not any(found[:40])
    assert 10 < sum(found) <= 30
    (tmp_path / "one").mkdir()
    assert not any(held(*grouped(tmp_path / "one", alike), 0.3))


def test_smallest_group_validates_if_all_are_larger_than_the_share(tmp_path):
    groups, results = grouped(tmp_path, [unlike(3)[0]] * 9 + [unlike(3)[1]] * 8 + [unlike(3)[2]] * 9)
    assert held(groups, results, 0.05) == [False] * 9 + [True] * 8 + [False] * 9


def test_clusters_are_the_same_if_hashes_are_sorted_in_blocks(tmp_path, monkeypatch):
    random = np.random.default_rng(3)
    hashes = random.integers(0, 2**63, (3000, 2), dtype=np.uint64)
    hashes[2000:] = hashes[:1000] ^ (np.uint64(1) << random.integers(0, 63, (1000, 2)).astype(np.uint64))
    unique = np.unique(hashes, axis=0)
    found = cluster_sorted(unique, tmp_path)
    assert len(np.unique(found)) < len(unique) - 900
    monkeypatch.setattr(disk_blocks, "MAX_AT_ONCE", 500)
    assert np.array_equal(cluster_sorted(unique, tmp_path), found)


# ---- two datasets ----------------------------------------------------------------------------------------


def write_dataset(root, paths):
    """A dataset of one shard with these files."""
    members = []
    for path in paths:
        data, image = path.read_bytes(), Image.open(path)
        phash = hash_pixels(image).astype(">u8").tobytes().hex()
        digest, kind = sha256(data).hexdigest(), path.suffix[1:]
        members.append(write.Member(str(path), digest, kind, len(data), image.size, phash, "{}"))
    root.mkdir()
    written = write.write_shard(root, write.Plan("images-000000.tar", members))
    (root / "dataset.json").write_text(json.dumps(dataset_content([written], {}, None)))
    return root / "dataset.json"


@pytest.fixture(scope="module")
def two(source, tmp_path_factory):
    """A dataset of all images but one copy; others with this copy, one of its files, and neither."""
    root = tmp_path_factory.mktemp("two")
    (root / "x.png").write_bytes(encoded(Image.fromarray(draw_image(96, 5, 99)), "PNG"))
    parts = {
        "train": [path for path in sorted(source.glob("*_*")) if path.name != "03_b.png"],
        "alike": [source / "03_b.png"],
        "equal": [source / "05_a.png"],
        "other": [root / "x.png"],
    }
    return {name: write_dataset(root / name, paths) for name, paths in parts.items()}


@pytest.mark.parametrize(
    ("other", "reason"), [("alike", "looks_alike"), ("equal", "is_in_training"), ("other", None)]
)
def test_validation_names_images_that_two_datasets_share(two, tmp_path, other, reason):
    done = prepare(
        *("--mode", "validate", "--input_dir", two["train"], "--val_path", two[other]),
        *("--output_file", tmp_path / "report.json"),
    )
    problems = json.loads((tmp_path / "report.json").read_text())["problems"]
    assert [problem["reason"] for problem in problems] == ([reason] if reason else [])
    assert (done.returncode == 0) == (reason is None)
    if reason:
        key = ShardImages(read_dataset(two[other]), 1).key(0)
        assert key in done.stdout
        assert reason in done.stdout


@pytest.mark.parametrize("other", ["alike", "equal"])
def test_training_refuses_a_validation_set_that_shares_an_image(two, tmp_path, other):
    given = {**TINY, "data_path": str(two["train"]), "val_path": str(two[other]), "output_dir": str(tmp_path)}
    del given["val_split"]
    with pytest.raises(
        DataError, match=r"--val_path .*for example [0-9a-f]{32} \([0-9a-f]{32}\).*other images"
    ):
        train(given)


def test_two_sets_without_near_images_share_nothing(two):
    subsets = [ShardImages(read_dataset(two[name]), 1) for name in ("train", "other")]
    assert find_shared(*subsets) == []


def test_near_hashes_of_two_sets_are_those_of_all_pairs():
    random = np.random.default_rng(4)
    one, other = (random.integers(0, 2**63, (400, 2), dtype=np.uint64) for _ in range(2))
    one[:200] = other[:200] ^ (np.uint64(1) << random.integers(0, 63, (200, 2)).astype(np.uint64))
    one[200:250] = other[200:250] ^ MIRROR
    found = {pair for ours, theirs in near_between(one, other) for pair in zip(ours, theirs, strict=True)}
    expected = set()
    for theirs, hash_ in enumerate(other):
        near = are_near(one, hash_[None]) | are_near(one, (hash_ ^ MIRROR)[None])
        expected |= {(ours, theirs) for ours in np.flatnonzero(near)}
    assert found == expected
    assert len(found) >= 250
