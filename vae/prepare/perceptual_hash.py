"""Perceptual hashes of images, and the file beside a manifest that stores them.

A hash is uint64 (2,): the signs of the 128 lowest frequencies of the image's brightness. The first word
contains the lower 64 of them.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from vae.config.options import MAX_PIXELS
from vae.data.decoding import DECODER_ERRORS, decode_image
from vae.data.formats import sniff_format

HASHES_NAME = "perceptual_hashes.csv"
SIDE = 32  # px: the image's brightness is reduced to a square with this side
DRAFT_SIDE = 64  # px: a JPEG is decoded no larger than necessary


def _frequencies() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    steps = np.arange(SIDE)
    cosines = np.cos(np.pi * (2 * steps + 1) * steps[:, None] / (2 * SIDE))  # DCT-II, (frequency, px)
    pairs = [(down, right) for down in steps for right in steps if down + right > 0]
    pairs.sort(key=lambda pair: (pair[0] + pair[1], max(pair), pair))
    down, right = np.array(pairs[:128]).T
    return cosines, down, right


_COSINES, _DOWN, _RIGHT = _frequencies()
# The mirrored image has the opposite sign at the odd frequencies along x.
MIRROR = np.packbits(_RIGHT % 2 == 1).view(">u8").astype(np.uint64)


def hash_pixels(pixels: np.ndarray | Image.Image) -> np.ndarray:
    """Perceptual hash uint64 (2,) of an image: (H, W, 3) uint8 or a Pillow image."""
    image = Image.fromarray(pixels) if isinstance(pixels, np.ndarray) else pixels
    image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, reducing_gap=3.0).convert("L")
    waves = _COSINES @ np.asarray(image, dtype=np.float64) @ _COSINES.T  # (32, 32)
    return np.packbits(waves[_DOWN, _RIGHT] > 1e-6).view(">u8").astype(np.uint64)


def hash_image_file(
    path: str | os.PathLike[str], *, max_pixels: int = MAX_PIXELS, background: str = "white"
) -> np.ndarray:
    """Perceptual hash of an image file; JPEGs are decoded at 64 px. Raises BadImageError."""
    try:
        with open(path, "rb") as file:
            if sniff_format(file, max_pixels) == "JPEG":
                file.seek(0)
                image = Image.open(file, formats=("JPEG",))
                if image.mode in ("L", "RGB") and image.width * image.height <= max_pixels:
                    image.draft(image.mode, (DRAFT_SIDE, DRAFT_SIDE))
                    return hash_pixels(ImageOps.exif_transpose(image))
    except DECODER_ERRORS:
        pass  # the complete reader below reports the error
    return hash_pixels(decode_image(path, max_pixels=max_pixels, background=background))


def hash_text(words: Sequence[int] | np.ndarray) -> str:
    """A hash as 32 hex digits."""
    return f"{int(words[0]):016x}{int(words[1]):016x}"


def hash_of_text(text: str) -> tuple[int, int]:
    """The two words of a hash from its hex digits."""
    return int(text[:16], 16), int(text[16:32], 16)


def read_hashes(folder: Path) -> dict[str, tuple[int, int]]:
    """The hashes stored in `folder`, by SHA-256 of the image file; incomplete lines are skipped."""
    known = {}
    if (folder / HASHES_NAME).exists():
        with open(folder / HASHES_NAME, encoding="utf-8") as file:
            for line in file:
                content, _, text = line.rstrip("\n").partition(",")
                if len(content) == 64 and len(text) == 32:
                    known[content] = hash_of_text(text)
    return known


@contextmanager
def hashes_to_add(folder: Path) -> Iterator[Callable[[str, Sequence[int]], object]]:
    """A function that stores one more hash, by SHA-256 of the image file.

    If a killed run has left an incomplete last line, that line is ended first.
    """
    with open(folder / HASHES_NAME, "a+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if file.read(1) not in (b"", b"\n"):
            file.write(b"\n")
        yield lambda content, words: file.write(f"{content},{hash_text(words)}\n".encode())
