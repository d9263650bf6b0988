"""What one file must be to enter the set: readable by the trainer's reader, and within the user's rules."""

import hashlib
import os
from dataclasses import dataclass

import numpy as np

from vae.data.decoding import Picture, read_picture
from vae.data.formats import BadImageError
from vae.prepare.pool import GIB, Limits

# Reading a picture holds at most this many bytes a pixel: Pillow's four, a turned copy, and two arrays.
BYTES_PER_PIXEL = 16
NEAR_BLANK = 2.0  # levels: below this standard deviation nothing is seen but noise of the sensor
SAMPLE_SIDE = 256  # px: enough points to judge blankness by
# Reasons that may be gone the next time although the file is the same.
PASSING = frozenset(
    ("crashed", "hung", "out_of_memory", "unreadable", "no_permission", "broken_link",
     "changed_while_reading", "plugin_missing")
)  # fmt: skip
REMEDIES = {
    "animated": "save one frame, or use --first_frame",
    "aspect": "crop it, or raise --max_aspect",
    "broken_link": "mend the link",
    "changed_since_manifest": "copy it again, or write the manifest again",
    "changed_while_reading": "wait until it is finished, then run again",
    "crashed": "the decoder died of it: convert it, or leave it out",
    "damaged": "copy it again from where it came",
    "empty": "copy it again from where it came",
    "float_pixels": "save it as 16-bit",
    "format_not_supported": "convert it to PNG or JPEG",
    "hung": "convert it, or raise --time_limit",
    "jpeg_coding_not_supported": "convert it to 8-bit JPEG or PNG",
    "missing": "copy it again, or write the manifest again",
    "no_permission": "mend its permissions",
    "not_an_image": "leave it out",
    "out_of_memory": "raise --memory_gib, or lower --max_pixels",
    "plugin_missing": "install the package named",
    "text_bomb": "save it without its comments",
    "too_large_for_format": "use --format png, or lower --max_aspect",
    "too_many_pixels": "make it smaller, or raise --max_pixels",
    "too_many_scans": "save it anew",
    "too_small": "use a smaller size, or --upscale",
    "transparent": "leave it out",
    "truncated": "copy it again from where it came",
    "unreadable": "mend the disk, link or permission",
}


@dataclass(frozen=True)
class Rules:
    """What decides whether a picture is accepted, and its pixels."""

    max_pixels: int = 300_000_000
    background: str = "white"
    first_frame: bool = False
    min_size: int = 1  # px: the shorter side
    max_aspect: float = 0.0  # longer over shorter side; 0: any


def limits_for(rules: Rules, seconds: float, memory_gib: float | None) -> Limits:
    """Limits of one picture; without `memory_gib`, what the largest picture the rules admit may need."""
    return Limits(seconds, memory_gib or 1 + rules.max_pixels * BYTES_PER_PIXEL / GIB)


def check_picture(path: str | os.PathLike, rules: Rules) -> Picture:
    """The picture with all its flags; raises BadImageError where reader or rules reject it."""
    picture = read_picture(
        path, max_pixels=rules.max_pixels, background=rules.background, first_frame=rules.first_frame
    )
    height, width = picture.pixels.shape[:2]
    if min(height, width) < rules.min_size:
        raise BadImageError("too_small", f"{width}x{height} is below --min_size {rules.min_size}")
    if rules.max_aspect and max(height, width) > rules.max_aspect * min(height, width):
        raise BadImageError("aspect", f"{width}x{height} is beyond --max_aspect {rules.max_aspect:g}")
    return picture._replace(flags=tuple(sorted({*picture.flags, *_blankness(picture.pixels)})))


def _blankness(pixels: np.ndarray) -> list[str]:
    height, width = pixels.shape[:2]
    sample = pixels[:: -(-height // SAMPLE_SIDE), :: -(-width // SAMPLE_SIDE)]
    if sample.reshape(-1, 3).std(axis=0).max() >= NEAR_BLANK:
        return []
    return ["constant"] if (pixels == pixels[0, 0]).all() else ["near_blank"]


def hash_file(path: str | os.PathLike) -> str:
    """SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def printable(name: str) -> str:
    """A file's name as one line that any terminal or UTF-8 file can hold."""
    text = name.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
