"""Fingerprints of images, a perceptual hash and keypoints, and the file beside a manifest with them."""

import base64
import os
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

from vae.config.options import MAX_PIXELS
from vae.images.decoding import DECODER_ERRORS, read_image
from vae.images.formats import sniff_format
from vae.prepare.disk_blocks import map_file
from vae.prepare.keypoints import SIDE, find_keypoints, is_complete
from vae.prepare.perceptual_hash import hash_pixels

FILE_NAME = "perceptual_hashes.csv"  # one line per image: SHA-256 of its file, hash, keypoints

FILES = ("hashes", "keypoints", "contents")  # of FingerprintFiles


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


class FingerprintFiles(Sequence[bytes]):
    """Fingerprints of N images on disk; as a sequence, the packed keypoints of each."""

    def __init__(self, fingerprints: Iterable[tuple[str, Fingerprint]], folder: Path):
        """Write (SHA-256 of the file, fingerprint) to files in `folder`; 16 bytes of each stay in memory."""
        self._keypoint_ends, self._content_ends = array("q", [0]), array("q", [0])
        with ExitStack() as stack:
            words, keypoints, contents = (stack.enter_context(open(folder / name, "wb")) for name in FILES)
            for content, fingerprint in fingerprints:
                words.write(struct.pack("<2Q", *fingerprint.words))
                keypoints.write(fingerprint.keypoints)
                contents.write(content.encode())
                self._keypoint_ends.append(keypoints.tell())
                self._content_ends.append(contents.tell())
        self.words = map_file(folder / FILES[0], "<u8", 2)  # (N, 2)
        self._keypoints, self._contents = (map_file(folder / name, "u1", 1) for name in FILES[1:])

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, at: int) -> bytes:  # type: ignore[override]  # no slices
        return self._keypoints[self._keypoint_ends[at] : self._keypoint_ends[at + 1]].tobytes()

    def content(self, at: int) -> str:
        """The SHA-256 of an image's file."""
        return self._contents[self._content_ends[at] : self._content_ends[at + 1]].tobytes().decode()


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


def read_fingerprints(folder: Path) -> Iterator[tuple[str, Fingerprint]]:
    """The fingerprints stored in `folder`, each after the SHA-256 of its file; skips incomplete lines."""
    if (folder / FILE_NAME).exists():
        with open(folder / FILE_NAME, encoding="utf-8") as file:
            for line in file:
                content, _, text = line.rstrip("\n").partition(",")
                fingerprint = from_text(text) if len(content) == 64 else None
                if fingerprint is not None:
                    yield content, fingerprint


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
