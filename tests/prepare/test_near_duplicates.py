"""Changed copies are found, other images are not, and clusters are the connected components of pairs."""

import io
import random

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageOps

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


def page(seed):
    """A scanned page: words in lines, which begin and end where those of every other page do."""
    image = Image.new("RGB", (310, 440), "white")
    draw = ImageDraw.Draw(image)
    chance = random.Random(seed)
    for top in range(25, 410, 11):
        left = 25
        while left < 270:
            width = min(chance.randint(4, 40), 285 - left)
            draw.rectangle([left, top, left + width, top + 5], fill=(30, 30, 30))
            left += width + 5
    return image


def test_pages_with_other_words_are_other_images():
    pages = [page(seed) for seed in range(12)]
    copies = [change(one) for change in CHANGES.values() for one in pages]
    clusters = find_clusters(np.array([hash_pixels(one) for one in [*pages, *copies]]))
    assert clusters.tolist() == list(range(12)) * (1 + len(CHANGES))


def test_alpha_is_compared_and_white_drawings_are_seen():
    masks = [Image.fromarray(draw_image(160, 5, index)).convert("L") for index in range(12)]

    def drawing(mask, color):
        image = Image.new("RGBA", mask.size, color)
        image.putalpha(mask.point(lambda level: 255 * (level > 110)))
        return image

    drawings = [drawing(mask, color) for color in ("white", "black") for mask in masks]
    reduced = [image.resize((80, 80), Image.Resampling.LANCZOS) for image in drawings]
    flat = [Image.alpha_composite(Image.new("RGBA", image.size, "white"), image) for image in drawings[12:]]
    found = find_clusters(np.array([hash_pixels(image) for image in [*drawings, *reduced, *flat]]))
    assert found.tolist() == [*range(24), *range(24), *range(12, 24)]


def test_clusters_equal_those_from_all_pairs():
    chance = np.random.default_rng(1)
    hashes = np.zeros((300, 8), np.uint64)
    hashes[:, :2] = chance.integers(0, 2**63, (300, 2), dtype=np.uint64)
    for row in range(100, 300):  # chains: each differs from an earlier one in up to 7 bits
        flips = chance.choice(64, chance.integers(0, 8), replace=False)
        mask = np.bitwise_or.reduce(np.uint64(1) << flips.astype(np.uint64), initial=np.uint64(0))
        hashes[row] = hashes[chance.integers(0, row)] ^ np.array([mask, *[0] * 7], np.uint64)
        hashes[row] ^= MIRROR * np.uint64(row % 2)
    expected = np.arange(300)
    near = np.zeros((300, 300), bool)
    for one in range(300):
        for other in range(300):
            for image in (hashes[other], hashes[other] ^ MIRROR):
                low, high, *fine = (int(word).bit_count() for word in hashes[one] ^ image)
                near[one, other] |= low <= 5 and low + high <= 20 and sum(fine) <= 84
    for _ in range(300):
        spread = np.array([expected[near[row]].min() for row in range(300)])
        if (spread == expected).all():
            break
        expected = spread
    assert find_clusters(hashes).tolist() == expected.tolist()
    assert len(set(expected)) > 100


def test_no_hashes_and_thousands_of_equal_hashes():
    assert find_clusters(np.zeros((0, 8), np.uint64)).tolist() == []
    assert set(find_clusters(np.zeros((50_000, 8), np.uint64)).tolist()) == {0}
