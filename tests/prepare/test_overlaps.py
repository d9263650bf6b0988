"""Crops that overlap are joined, other images are not; stored fingerprints survive an interrupted write."""

import io
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from vae.prepare import disk_blocks, near_duplicates, overlaps
from vae.prepare.demo.draw import draw_image
from vae.prepare.fingerprints import (
    FILE_NAME,
    fingerprint_file,
    fingerprint_pixels,
    fingerprints_to_add,
    from_text,
    read_fingerprints,
    to_text,
)
from vae.prepare.keypoints import HEADER, STORED, find_keypoints, is_complete, unpack
from vae.prepare.near_duplicate_groups import near_duplicate_groups
from vae.prepare.near_duplicates import find_clusters
from vae.prepare.overlaps import join_overlapping, overlap_share

SIDE = 288


@pytest.fixture(scope="module")
def drawn():
    return [Image.fromarray(draw_image(SIDE, 5, index)) for index in range(8)]


def crop(image, left, top, right, bottom):
    """A part of an image, by shares of its sides."""
    return image.crop([round(share * SIDE) for share in (left, top, right, bottom)])


def as_jpeg(image):
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=80)
    return Image.open(buffer).convert("RGB")


def with_folder(function, *values):
    with TemporaryDirectory() as folder:
        return function(*values, Path(folder)).tolist()


def clusters_of(images):
    fingerprints = [fingerprint_pixels(image) for image in images]
    hashes = np.array([one.words for one in fingerprints], dtype=np.uint64)
    clusters = np.array(with_folder(find_clusters, hashes))
    return with_folder(join_overlapping, clusters, hashes, [one.keypoints for one in fingerprints])


PAIRS = {
    "70 % across": lambda image: (crop(image, 0, 0.1, 0.7, 0.8), crop(image, 0.21, 0.1, 0.91, 0.8)),
    "70 % down": lambda image: (crop(image, 0.1, 0, 0.8, 0.7), crop(image, 0.1, 0.21, 0.8, 0.91)),
    "80 % diagonal": lambda image: (crop(image, 0, 0, 0.8, 0.8), crop(image, 0.085, 0.085, 0.885, 0.885)),
    "a part of 64 %": lambda image: (image, crop(image, 0.1, 0.2, 0.9, 1)),
    "compressed": lambda image: (image, as_jpeg(crop(image, 0.2, 0, 1, 0.8))),
    "halved": lambda image: (image, crop(image, 0, 0, 0.8, 0.8).resize((SIDE // 2, SIDE // 2))),
    "brighter": lambda image: (image, ImageEnhance.Brightness(crop(image, 0, 0, 0.8, 0.8)).enhance(1.2)),
    "mirrored": lambda image: (image, ImageOps.mirror(crop(image, 0, 0.1, 0.8, 0.9))),
}


@pytest.mark.parametrize("change", PAIRS)
def test_overlapping_crops_are_joined_and_different_images_are_not(drawn, change):
    images = [one for image in drawn for one in PAIRS[change](image)]
    hashes = np.array([fingerprint_pixels(image).words for image in images], dtype=np.uint64)
    assert with_folder(find_clusters, hashes) == list(range(16))  # the perceptual hash alone finds none
    clusters = clusters_of(images)
    assert {clusters[at] for at in range(0, 16, 2)} == set(range(0, 16, 2))  # no different images are joined
    assert sum(clusters[at] == clusters[at + 1] for at in range(0, 16, 2)) >= 7


def test_groups_are_the_same_if_hashes_and_keypoints_do_not_fit_into_memory(drawn, tmp_path, monkeypatch):
    """Of many blocks on disk as of one; and no file stays."""
    images = [one for change in PAIRS.values() for image in drawn for one in change(image)]
    found = sorted((f"{number:016}", fingerprint_pixels(image)) for number, image in enumerate(images))
    expected = near_duplicate_groups(found, tmp_path)
    assert 8 <= len(set(expected.values())) < len(expected) / 8
    monkeypatch.setattr(disk_blocks, "MAX_AT_ONCE", 50)
    for module in (overlaps, near_duplicates):
        monkeypatch.setattr(module, "CHUNK", 30)
    monkeypatch.setattr(overlaps, "IMAGES_AT_ONCE", 20)
    assert near_duplicate_groups(found, tmp_path) == expected
    assert not list(tmp_path.iterdir())


def test_disjoint_parts_of_an_image_are_different_images(drawn):
    halves = [crop(image, 0, top, 1, top + 0.5) for image in drawn for top in (0, 0.5)]
    assert clusters_of(halves) == list(range(16))


def test_clusters_are_the_connected_components_of_overlaps(drawn):
    """A chain of crops, of which the first and the last do not overlap, and a cluster that existed before."""
    chain = [crop(drawn[0], start, 0, start + 0.5, 1) for start in (0.0, 0.17, 0.34, 0.5)]
    images = [drawn[1], *chain, drawn[2]]
    keypoints = [find_keypoints(image) for image in images]
    hashes = np.arange(12, dtype=np.uint64).reshape(6, 2)
    assert with_folder(join_overlapping, np.arange(6), hashes, keypoints) == [0, 1, 1, 1, 1, 5]
    before = np.array([0, 1, 2, 3, 0, 5])  # the last crop was already with the first image
    assert with_folder(join_overlapping, before, hashes, keypoints) == [0, 0, 0, 0, 0, 5]


def test_share_of_an_overlap_is_measured(drawn):
    one, other = (unpack(find_keypoints(image)) for image in PAIRS["70 % across"](drawn[0]))
    near = [
        (left, right)
        for left, word in enumerate(one.hashes.tolist())
        for right, same in enumerate(other.hashes.tolist())
        if (word ^ same).bit_count() <= 8
    ]
    left, right = np.array(near).T
    share = overlap_share(one, other, left, right, np.zeros(len(near), bool))
    assert share == pytest.approx(0.7, abs=0.03)


def test_images_without_keypoints_and_empty_sets():
    flat = Image.new("RGB", (300, 200), (90, 120, 200))
    assert len(unpack(find_keypoints(flat)).hashes) == 0
    assert len(unpack(find_keypoints(Image.new("RGB", (3000, 2)))).hashes) == 0
    assert clusters_of([flat, Image.new("RGB", (30, 20), "black")]) == [
        0,
        0,
    ]  # equal hashes: no detail at all
    assert with_folder(join_overlapping, np.zeros(0, np.int64), np.zeros((0, 2), np.uint64), []) == []


def test_many_equal_images_take_no_time():
    keypoints = [find_keypoints(Image.fromarray(draw_image(96, 5, index))) for index in range(2)]
    hashes = np.zeros((20_000, 2), np.uint64)
    hashes[-1] = 1
    clusters = np.zeros(20_000, np.int64)
    clusters[-1] = 19_999
    joined = with_folder(join_overlapping, clusters, hashes, [*[keypoints[0]] * 19_999, keypoints[1]])
    assert joined == clusters.tolist()


def test_keypoints_are_stored_in_a_few_hundred_bytes(drawn):
    packed = find_keypoints(drawn[0])
    found = unpack(packed)
    assert is_complete(packed)
    assert not is_complete(packed[:-1])
    assert not is_complete(b"")
    assert len(packed) == HEADER.size + STORED.itemsize * len(found.hashes) < 600
    assert 10 < len(found.hashes) <= 48
    assert (found.places[:, :2] >= 0).all()
    assert (found.places[:, :2] <= found.sides).all()


def test_stored_fingerprints_are_read_back_without_incomplete_lines(drawn, tmp_path):
    drawn[0].save(tmp_path / "a.png")
    one, other = fingerprint_file(tmp_path / "a.png"), fingerprint_pixels(drawn[1])
    assert one == fingerprint_pixels(drawn[0])
    assert from_text(to_text(one)) == one
    with fingerprints_to_add(tmp_path) as add:
        add("0" * 64, one)
    with open(tmp_path / FILE_NAME, "a") as file:
        file.write("1" * 64 + "," + to_text(other)[:-24])  # a killed run
    with fingerprints_to_add(tmp_path) as add:
        add("2" * 64, other)
    with open(tmp_path / FILE_NAME, "a") as file:
        file.write("3" * 64 + "," + to_text(other)[:32] + "\n")  # a hash without keypoints
    assert dict(read_fingerprints(tmp_path)) == {"0" * 64: one, "2" * 64: other}
