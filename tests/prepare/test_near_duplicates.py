"""Changed copies are found, other images are not, and clusters are the connected components of pairs."""

import io
from math import comb
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vae.prepare import near_duplicates
from vae.prepare.demo.draw import draw_image
from vae.prepare.fingerprints import fingerprint_file
from vae.prepare.near_duplicates import find_clusters
from vae.prepare.perceptual_hash import MIRROR, hash_pixels


def clusters_of(hashes):
    with TemporaryDirectory() as folder:
        return find_clusters(hashes, Path(folder))


@pytest.fixture(scope="module")
def drawn():
    return [Image.fromarray(draw_image(160, 5, index)) for index in range(24)]


def as_jpeg(image, quality):
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Image.open(buffer).convert("RGB")


CHANGES = {
    "compressed": lambda image: as_jpeg(image, 30),
    "halved": lambda image: image.resize((80, 80), Image.Resampling.LANCZOS),
    "enlarged": lambda image: image.resize((700, 700), Image.Resampling.BICUBIC),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.1),
    "grey": lambda image: image.convert("L").convert("RGB"),
    "blurred": lambda image: image.filter(ImageFilter.GaussianBlur(2)),
    "stretched": lambda image: image.resize((200, 150)),
    "mirrored": ImageOps.mirror,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_copies_are_clustered_and_others_are_not(drawn, change):
    hashes = np.array([hash_pixels(p) for p in drawn] + [hash_pixels(CHANGES[change](p)) for p in drawn])
    clusters = clusters_of(hashes)
    count = len(drawn)
    assert (clusters[:count] == np.arange(count)).all()  # no two different images are joined
    assert (clusters[count:] == np.arange(count)).mean() >= 0.95


def test_mirrored_image_has_the_mirrored_hash(drawn):
    for image in drawn[:5]:
        apart = hash_pixels(image) ^ MIRROR ^ hash_pixels(ImageOps.mirror(image))
        assert sum(int(word).bit_count() for word in apart) <= 4  # rounding flips signs near zero


def test_clusters_equal_those_from_all_pairs():
    random = np.random.default_rng(1)
    hashes = random.integers(0, 2**63, (300, 2), dtype=np.uint64)
    for row in range(100, 300):  # chains: each differs from an earlier one in up to 7 bits
        flips = random.choice(64, random.integers(0, 8), replace=False)
        mask = np.bitwise_or.reduce(np.uint64(1) << flips.astype(np.uint64), initial=np.uint64(0))
        hashes[row] = hashes[random.integers(0, row)] ^ np.array([mask, 0], np.uint64)
    expected = np.arange(300)
    near = np.zeros((300, 300), bool)
    for one in range(300):
        for other in range(300):
            for image in (hashes[other], hashes[other] ^ MIRROR):
                low, high = (int(word).bit_count() for word in hashes[one] ^ image)
                near[one, other] |= low <= 5 and low + high <= 20
    for _ in range(300):
        spread = np.array([expected[near[row]].min() for row in range(300)])
        if (spread == expected).all():
            break
        expected = spread
    assert clusters_of(hashes).tolist() == expected.tolist()
    assert len(set(expected)) > 100


@pytest.mark.parametrize("signs", [3, 4, 5])
def test_recall_of_long_keys_is_the_documented_one(signs, monkeypatch):
    """Pairs that differ in some of the lower 64 signs: all of them up to 4 signs, 76 % of those in 5."""
    monkeypatch.setattr(near_duplicates, "MAX_SHORT_KEYS", 0)
    random = np.random.default_rng(signs)
    hashes = random.integers(0, 2**64, (4000, 2), dtype=np.uint64)
    for row in range(2000):
        flips = random.choice(64, signs, replace=False).astype(np.uint64)
        hashes[2000 + row] = hashes[row] ^ np.array(
            [np.bitwise_or.reduce(np.uint64(1) << flips), 0], np.uint64
        )
    found = (clusters_of(hashes)[2000:] == np.arange(2000)).mean()
    in_five_bytes = comb(8, 5) * 8**5 / comb(64, 5) if signs == 5 else 0.0
    assert found == pytest.approx(1 - in_five_bytes, abs=0.04 if signs == 5 else 0.0)


def test_no_hashes_and_thousands_of_equal_hashes():
    assert clusters_of(np.zeros((0, 2), np.uint64)).tolist() == []
    assert set(clusters_of(np.zeros((50_000, 2), np.uint64)).tolist()) == {0}


def test_file_hash_is_near_the_hash_of_its_pixels_after_exif_rotation(drawn, tmp_path):
    large = drawn[0].resize((1200, 900))
    exif = Image.Exif()
    exif[0x0112] = 6
    large.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.jpg", exif=exif, quality=95)
    large.save(tmp_path / "plain.png")
    found = [fingerprint_file(tmp_path / name).words for name in ("turned.jpg", "plain.png")]
    assert hash_pixels(large).tolist() == list(found[1])
    hashes = np.array(found, dtype=np.uint64)
    assert set(clusters_of(hashes).tolist()) == {0}  # the reduced JPEG has a near hash
