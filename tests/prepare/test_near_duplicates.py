"""Changed copies are found, other images are not, and clusters are the connected components of pairs."""

import io

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vae.prepare.demo import draw_image
from vae.prepare.near_duplicates import MIRROR, find_clusters, hash_pixels


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
    clusters = find_clusters(hashes)
    count = len(drawn)
    assert (clusters[:count] == np.arange(count)).all()  # no two different images are joined
    assert (clusters[count:] == np.arange(count)).mean() >= 0.95


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
    assert find_clusters(hashes).tolist() == expected.tolist()
    assert len(set(expected)) > 100


def test_no_hashes_and_thousands_of_equal_hashes():
    assert find_clusters(np.zeros((0, 2), np.uint64)).tolist() == []
    assert set(find_clusters(np.zeros((50_000, 2), np.uint64)).tolist()) == {0}
