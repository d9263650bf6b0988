"""What one file must be to enter the set: readable by the trainer's reader, and within the user's rules."""

import os
from dataclasses import dataclass

import numpy as np

from vae.config.options import MAX_PIXELS
from vae.data.decoding import DecodedImage, read_image
from vae.data.formats import BadImageError
from vae.host import GIB
from vae.prepare.pool import Limits

# Reading an image holds at most this many bytes a pixel: Pillow's four, a turned copy, and two arrays.
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
    """What decides whether an image is accepted, and its pixels."""

    max_pixels: int = MAX_PIXELS
    background: str = "white"
    first_frame: bool = False
    min_size: int = 1  # px: the shorter side
    max_aspect: float = 0.0  # longer over shorter side; 0: any


def limits_for(rules: Rules, seconds: float, memory_gib: float | None) -> Limits:
    """Limits of one image; without `memory_gib`, what the largest image the rules admit may need."""
    return Limits(seconds, memory_gib or 1 + rules.max_pixels * BYTES_PER_PIXEL / GIB)


def check_image(path: str | os.PathLike, rules: Rules) -> DecodedImage:
    """The image with all its flags; raises BadImageError where reader or rules reject it."""
    image = read_image(
        path, max_pixels=rules.max_pixels, background=rules.background, first_frame=rules.first_frame
    )
    height, width = image.pixels.shape[:2]
    if min(height, width) < rules.min_size:
        raise BadImageError("too_small", f"{width}x{height} is below --min_size {rules.min_size}")
    if rules.max_aspect and max(height, width) > rules.max_aspect * min(height, width):
        raise BadImageError("aspect", f"{width}x{height} is beyond --max_aspect {rules.max_aspect:g}")
    return image._replace(flags=tuple(sorted({*image.flags, *_blankness(image.pixels)})))


def _blankness(pixels: np.ndarray) -> list[str]:
    height, width = pixels.shape[:2]
    sample = pixels[:: -(-height // SAMPLE_SIDE), :: -(-width // SAMPLE_SIDE)]
    if sample.reshape(-1, 3).std(axis=0).max() >= NEAR_BLANK:
        return []
    return ["constant"] if (pixels == pixels[0, 0]).all() else ["near_blank"]
