#!/usr/bin/env python3
"""Recall of overlapping crops by --mode split, and the number of different images that it joins.

For each overlap, a pair is cut from every photograph, and all pairs are clustered together. A pair is two
crops of equal size, beside each other or diagonal, or the whole photograph and a crop. All are scaled to the
same shorter side, as preprocess does, and stored as JPEGs of different quality. Different images are the
photographs, disjoint tiles of them, and drawn images.
"""

import argparse
import io
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from vae.images.folder import list_images  # noqa: E402
from vae.prepare.demo.draw import draw_image  # noqa: E402
from vae.prepare.fingerprints import Fingerprint, fingerprint_pixels  # noqa: E402
from vae.prepare.near_duplicates import find_clusters  # noqa: E402
from vae.prepare.overlaps import join_overlapping  # noqa: E402

OVERLAPS = 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9  # shares of the area of the first image of a pair
SIDE = 384  # px: the shorter side of every image
QUALITIES = (95, 80)  # of the two JPEGs of a pair
CROP_SIDE = 0.6  # of the photograph's sides
Pair = tuple[Image.Image, Image.Image]


def prepare(image: Image.Image, quality: int) -> Fingerprint:
    """The fingerprint of an image after scaling and compression."""
    factor = SIDE / min(image.size)
    size = round(image.width * factor), round(image.height * factor)
    buffer = io.BytesIO()
    image.resize(size, Image.Resampling.LANCZOS).save(buffer, "JPEG", quality=quality)
    return fingerprint_pixels(Image.open(buffer))


def cut_crops(photo: Image.Image, overlap: float, chance: np.random.Generator) -> Pair:
    """Two crops of equal size that share `overlap` of their area."""
    part = min(CROP_SIDE, 0.99 / (2 - overlap))
    sides = np.array([photo.width * part, photo.height * part])
    direction = chance.integers(3)  # right, down, diagonal
    shares = ((1 - overlap, 0), (0, 1 - overlap), (1 - overlap**0.5, 1 - overlap**0.5))[direction]
    shift = sides * shares
    start = chance.random(2) * (np.array(photo.size) - sides - shift)
    if direction == 2 and chance.integers(2):  # the other diagonal
        first, second = start + shift * (1, 0), start + shift * (0, 1)
    else:
        first, second = start, start + shift
    return cut_box(photo, first, sides), cut_box(photo, second, sides)


def cut_box(photo: Image.Image, corner: np.ndarray, sides: np.ndarray) -> Image.Image:
    """The part of a photograph with this corner and these sides, in px."""
    left, top, right, bottom = np.concatenate([corner, corner + sides]).round().astype(int).tolist()
    return photo.crop((left, top, right, bottom))


def cut_part(photo: Image.Image, overlap: float, chance: np.random.Generator) -> Pair:
    """The whole photograph and a crop with `overlap` of its area."""
    sides = np.array(photo.size) * overlap**0.5
    start = chance.random(2) * (np.array(photo.size) - sides)
    return photo, cut_box(photo, start, sides)


def clusters_of(fingerprints: list[Fingerprint]) -> tuple[np.ndarray, np.ndarray]:
    """Clusters of images that look alike, and the same with overlapping images."""
    hashes = np.array([one.words for one in fingerprints], dtype=np.uint64)
    alike = find_clusters(hashes)
    return alike, join_overlapping(alike, hashes, [one.keypoints for one in fingerprints])


def measure_recall(
    photos: list[Image.Image], cut: Callable[..., Pair], overlap: float, rounds: int
) -> dict[str, float]:
    """Shares of the pairs that are found, by hash alone and with keypoints, and wrongly joined pairs."""
    chance = np.random.default_rng(round(100 * overlap))
    by_hash = found = wrong = 0
    for _ in range(rounds):
        pairs = [cut(photo, overlap, chance) for photo in photos]
        fingerprints = [
            prepare(image, quality) for pair in pairs for image, quality in zip(pair, QUALITIES, strict=True)
        ]
        alike, clusters = clusters_of(fingerprints)
        by_hash += int((alike[::2] == alike[1::2]).sum())
        found += int((clusters[::2] == clusters[1::2]).sum())
        wrong += joined_pairs(clusters, np.arange(len(fingerprints)) // 2)
    count = rounds * len(photos)
    shares = {"hash_alone": round(by_hash / count, 3), "found": round(found / count, 3)}
    return {"overlap": overlap, **shares, "wrongly_joined": wrong}


def joined_pairs(clusters: np.ndarray, photo_of: np.ndarray) -> int:
    """Pairs of images of different photographs in one cluster."""
    same = clusters[:, None] == clusters
    return int((same & (photo_of[:, None] < photo_of)).sum())


def measure_different(name: str, images: list[Image.Image]) -> dict[str, object]:
    """Joined pairs among images that all differ."""
    _, clusters = clusters_of([prepare(image, QUALITIES[0]) for image in images])
    count = len(images)
    joined = joined_pairs(clusters, np.arange(count))
    return {"images": name, "pairs": count * (count - 1) // 2, "wrongly_joined": joined}


def cut_tiles(photo: Image.Image) -> list[Image.Image]:
    """Six disjoint tiles."""
    sides = np.array(photo.size) // (3, 2)
    return [cut_box(photo, sides * (x, y), sides) for y in range(2) for x in range(3)]


def main() -> None:
    """Print one JSON object per line: recall for each overlap, and joined pairs of different images."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--photos", required=True, help="folder of photographs that all differ")
    parser.add_argument("--rounds", type=int, default=4, help="pairs of each photograph and overlap")
    parser.add_argument("--drawn", type=int, default=500, help="drawn images")
    options = parser.parse_args()
    names = list_images(options.photos)
    photos = [Image.open(Path(options.photos) / name).convert("RGB") for name in names]
    for kind, cut in (("two crops", cut_crops), ("crop and photograph", cut_part)):
        for overlap in OVERLAPS:
            found = measure_recall(photos, cut, overlap, options.rounds)
            print(json.dumps({"pair": kind, **found}), flush=True)
    print(json.dumps(measure_different("photographs", photos)))
    print(json.dumps(measure_different("tiles", [tile for photo in photos for tile in cut_tiles(photo)])))
    drawn = [Image.fromarray(draw_image(160, 5, index)) for index in range(options.drawn)]
    print(json.dumps(measure_different("drawn", drawn)))
    began = time.process_time()
    for photo in photos:
        fingerprint_pixels(photo)
    print(json.dumps({"cpu_ms_per_image": round(1000 * (time.process_time() - began) / len(photos), 1)}))


if __name__ == "__main__":
    main()
