"""Fingerprints of images, a perceptual hash and keypoints, and the file beside a manifest with them."""

import base64
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

from vae.config.options import MAX_PIXELS
from vae.images.decoding import DECODER_ERRORS, read_image
from vae.images.formats import sniff_format
from vae.prepare.keypoints import SIDE, find_keypoints, is_complete
from vae.prepare.perceptual_hash import hash_pixels

FILE_NAME = "perceptual_hashes.csv"  # one line per image: SHA-256 of its file, hash, keypoints


class Fingerprint(NamedTuple):
    """The perceptual hash of an image, and its packed keypoints."""

    words: tuple[int, int]
    keypoints: bytes


def fingerprint_pixels(pixels: np.ndarray | Image.Image) -> Fingerprint:
    """The fingerprint of an image: (H, W, 3) uint8 or a Pillow image."""
    image = Image.fromarray(pixels) if isinstance(pixels, np.ndarray) else pixels
    low, high = hash_pixels(image).tolist()
    return Fingerprint((low, high), find_keypoints(image))


def fingerprint_file(
    path: str | os.PathLike[str],
    max_pixels: int = MAX_PIXELS,
    background: str = "white",
    first_frame: bool = False,
) -> Fingerprint:
    """The fingerprint of an image file; JPEGs are decoded at reduced size. Raises BadImageError."""
    try:
        with open(path, "rb") as file:
            if sniff_format(file, max_pixels) == "JPEG":
                file.seek(0)
                jpeg = Image.open(file, formats=("JPEG",))
                if jpeg.mode in ("L", "RGB") and jpeg.width * jpeg.height <= max_pixels:
                    jpeg.draft(jpeg.mode, (SIDE, SIDE))  # each side stays at least as long
                    return fingerprint_pixels(ImageOps.exif_transpose(jpeg))
    except DECODER_ERRORS:
        pass  # the complete reader below reports the error
    image = read_image(path, max_pixels=max_pixels, background=background, first_frame=first_frame)
    return fingerprint_pixels(image.pixels)


def to_text(fingerprint: Fingerprint) -> str:
    """A fingerprint as hex digits of the hash, a comma, and base64 of the keypoints."""
    low, high = fingerprint.words
    return f"{low:016x}{high:016x},{base64.b64encode(fingerprint.keypoints).decode()}"


def from_text(text: str) -> Fingerprint | None:
    """The fingerprint in a text, or None if the text is incomplete or has no keypoints."""
    digits, _, keypoints = text.partition(",")
    try:
        if len(digits) == 32 and keypoints:
            words, packed = (int(digits[:16], 16), int(digits[16:], 16)), base64.b64decode(keypoints)
            return Fingerprint(words, packed) if is_complete(packed) else None
    except ValueError:  # not a number, or not base64
        pass
    return None


def read_fingerprints(folder: Path) -> dict[str, Fingerprint]:
    """The fingerprints stored in `folder`, by SHA-256 of the image file; incomplete lines are skipped."""
    known = {}
    if (folder / FILE_NAME).exists():
        with open(folder / FILE_NAME, encoding="utf-8") as file:
            for line in file:
                content, _, text = line.rstrip("\n").partition(",")
                fingerprint = from_text(text) if len(content) == 64 else None
                if fingerprint is not None:
                    known[content] = fingerprint
    return known


@contextmanager
def fingerprints_to_add(folder: Path) -> Iterator[Callable[[str, Fingerprint], object]]:
    """A function that stores one more fingerprint, by SHA-256 of the image file.

    If a killed run has left an incomplete last line, that line is ended first.
    """
    with open(folder / FILE_NAME, "a+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if file.read(1) not in (b"", b"\n"):
            file.write(b"\n")
        yield lambda content, fingerprint: file.write(fingerprint_line(content, fingerprint).encode())


def fingerprint_line(content: str, fingerprint: Fingerprint) -> str:
    """The line of the file with the fingerprint of an image, by SHA-256 of the image file."""
    return f"{content},{to_text(fingerprint)}\n"
