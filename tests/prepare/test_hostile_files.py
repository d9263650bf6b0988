"""Randomly damaged and malicious files give an image or a reason, in bounded time and memory."""

import sys
from collections import Counter
from functools import partial

import numpy as np
import pytest

from tests.harness.image_bytes import png
from tests.harness.image_kinds import detailed, encoded
from vae.config.prepare_flags import ReadingConfig
from vae.prepare.check_file import check_file, decode_each
from vae.prepare.pool import Failure, Limits, run_each

FORMATS = {
    "a.jpg": ("JPEG", {"quality": 90}),
    "b.jpg": ("JPEG", {"progressive": True}),
    "a.png": ("PNG", {}),
    "b.png": ("PNG", {}),  # with a palette
    "a.webp": ("WEBP", {"quality": 90}),
    "b.webp": ("WEBP", {"lossless": True}),
    "a.tif": ("TIFF", {}),
    "b.tif": ("TIFF", {"compression": "tiff_lzw"}),
    "c.tif": ("TIFF", {"compression": "jpeg"}),
    "a.bmp": ("BMP", {}),
    "a.avif": ("AVIF", {}),
}
MUTATIONS = ("cut", "flip", "splice", "zero", "repeat", "header")


def mutate(whole: bytes, other: bytes, kind: str, random: np.random.Generator) -> bytes:
    """A damaged copy: cut, flipped, spliced with another file, zeroed, repeated or with a bad header."""
    data = bytearray(whole)
    at, end = sorted(int(value) for value in random.integers(0, len(data), 2))
    if kind == "cut":
        del data[at:]
    elif kind == "flip":
        for position in random.integers(0, len(data), int(random.integers(1, 20))):
            data[int(position)] ^= 1 << int(random.integers(8))
    elif kind == "splice":
        data[at:] = other[min(at, len(other)) :]
    elif kind == "zero":
        data[at:end] = bytes(end - at)
    elif kind == "repeat":
        data[at:at] = data[at:end]
    else:  # the first bytes contain sizes, counts and offsets
        for position in random.integers(0, min(400, len(data)), int(random.integers(1, 6))):
            data[int(position)] = int(random.choice([0, 1, 0x7F, 0x80, 0xFE, 0xFF]))
    return bytes(data)


@pytest.mark.parametrize("count", [180, pytest.param(2000, marks=pytest.mark.slow)])
def test_random_damage_gives_an_image_or_a_reason_within_one_gib(tmp_path, count):
    random, image = np.random.default_rng(1), detailed(0, 96, 96)
    palette = image.quantize(64)
    whole = [
        encoded(palette if name == "b.png" else image, kind, **options)
        for name, (kind, options) in FORMATS.items()
    ]
    for index in range(count):
        kind = MUTATIONS[index // len(whole) % len(MUTATIONS)]
        other = whole[int(random.integers(len(whole)))]
        damaged = mutate(whole[index % len(whole)], other, kind, random)
        (tmp_path / f"{index:05d}_{[*FORMATS][index % len(whole)]}").write_bytes(damaged)
    config = ReadingConfig(
        input_dir=str(tmp_path), max_pixels=20_000_000, time_limit=10, memory_gib=1.0, num_workers="1"
    )
    names = sorted(path.name for path in tmp_path.iterdir())
    results = [result for _, result in decode_each(partial(check_file, config), names, config)]
    reasons = Counter(result.reason for result in results)
    assert len(results) == count
    assert not {"crashed", "hung", "out_of_memory"} & set(reasons)
    assert {"damaged", "truncated"} <= set(reasons)
    assert reasons[""] < count * 2 / 3  # accepted


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no memory limit per process")
def test_bomb_reaches_the_memory_limit_and_the_next_image_is_read(tmp_path):
    """150 MB of pixels from a file of 150 kB, within --max_pixels, in a process limited to 128 MiB."""
    (tmp_path / "bomb.png").write_bytes(png(7000, 7000, 8, 2, bytes(7000 * (1 + 7000 * 3))))
    detailed(0).save(tmp_path / "good.png")
    check = partial(check_file, ReadingConfig(input_dir=str(tmp_path)))
    names = ["bomb.png", "good.png", "bomb.png", "good.png"]
    results = list(run_each(check, names, num_workers=1, limits=Limits(30, 0.125)))
    reasons = [result.reason for _, result in results]
    assert reasons == ["out_of_memory", "", "out_of_memory", ""]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no memory limit per process")
def test_slow_image_reaches_the_time_limit(tmp_path):
    """A JPEG with nearly the largest allowed product of scans and pixels; each scan takes some 10 ms."""
    whole = encoded(detailed(7, 2400, 2400), "JPEG", progressive=True)
    last = whole.rindex(b"\xff\xda")
    (tmp_path / "slow.jpg").write_bytes(whole[:last] + whole[last:-2] * 480 + b"\xff\xd9")
    detailed(0).save(tmp_path / "good.png")
    check = partial(check_file, ReadingConfig(input_dir=str(tmp_path)))
    found = dict(run_each(check, ["slow.jpg", "good.png"], num_workers=1, limits=Limits(1.0, None)))
    assert isinstance(found["slow.jpg"], Failure)
    assert found["slow.jpg"].reason == "hung"
    assert found["good.png"].reason == ""
