"""Decoding one untrusted file with the trainer's reader, and checking it against the user's rules."""

import os
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np

from vae.config.prepare_flags import ReadingConfig, RulesConfig
from vae.images.decoding import DecodedImage, read_image
from vae.images.formats import BadImageError
from vae.images.strict_jpeg import has_simplejpeg
from vae.prepare.engine import run_tasks
from vae.prepare.ledger import ACCEPTED, KNOWN, REJECTED, Ledger, Result
from vae.prepare.perceptual_hash import hash_pixels
from vae.prepare.pool import Answer, Failure, Item, Limits
from vae.prepare.rejections import TRANSIENT
from vae.progress import Progress
from vae.system import console
from vae.system.files import sha256_of_file
from vae.system.host import GIB

# Reading an image needs at most this many bytes per pixel: Pillow's four, a rotated copy, and two arrays.
BYTES_PER_PIXEL = 16
NEAR_BLANK = 2.0  # levels: below this standard deviation only sensor noise remains
FILES_PER_TASK = 32  # for each core of a Ray node: at the end of a batch, cores wait for the slowest file
SAMPLE_SIDE = 256  # px: enough points to measure blankness

Measure = Callable[[ReadingConfig, str, DecodedImage], dict[str, Any]]  # values of the image in a file


def decode_each(
    function: Callable[[Item], Answer], items: Iterable[Item], config: ReadingConfig
) -> Generator[tuple[Item, Answer | Failure], None, None]:
    """Run `function` on each item in worker processes, within the limits that `config` sets for one image."""
    memory_gib = config.memory_gib or 1 + config.max_pixels * BYTES_PER_PIXEL / GIB
    limits = Limits(config.time_limit, memory_gib)
    return run_tasks(function, items, config, limits, items_per_task=FILES_PER_TASK)


def check_image(path: str | os.PathLike[str], config: ReadingConfig) -> DecodedImage:
    """The decoded image with all its flags; raises BadImageError if the reader or the rules reject it."""
    image = read_image(
        path, max_pixels=config.max_pixels, background=config.background, first_frame=config.first_frame
    )
    height, width = image.pixels.shape[:2]
    check_size(width, height, config)
    return image._replace(flags=tuple(sorted({*image.flags, *_blankness(image.pixels)})))


def check_size(width: int, height: int, config: RulesConfig) -> None:
    """BadImageError if the user's rules reject images of this size."""
    if min(height, width) < config.min_size:
        raise BadImageError("too_small", f"{width}x{height} is below --min_size {config.min_size}")
    if config.max_aspect and max(height, width) > config.max_aspect * min(height, width):
        raise BadImageError("aspect", f"{width}x{height} exceeds --max_aspect {config.max_aspect:g}")


def no_measures(_config: ReadingConfig, _path: str, _image: DecodedImage) -> dict[str, Any]:
    """No values of an image besides those of every result."""
    return {}


def phash_of(_config: ReadingConfig, _path: str, image: DecodedImage) -> dict[str, Any]:
    """The perceptual hash of an image."""
    return {"phash": hash_pixels(image.pixels).astype(">u8").tobytes().hex()}


def check_file(config: ReadingConfig, name: str, *, measure: Measure = no_measures) -> Result:
    """Decode one file and return its result, with the values that `measure` finds."""
    path = os.path.join(config.input_dir, name)
    try:
        image = check_image(path, config)
        measured = measure(config, path, image)
        status, digest = os.stat(path), sha256_of_file(path)
    except BadImageError as error:
        return Result(name, REJECTED, error.reason, error.detail, *_size_and_time(path))
    except OSError as error:  # it disappeared after it was decoded
        return Result(name, REJECTED, "unreadable", error.strerror or str(error))
    height, width = image.pixels.shape[:2]
    record: dict[str, Any] = {
        "format": image.format,
        "width": width,
        "height": height,
        "flags": list(image.flags),
        **measured,
    }
    return Result(name, ACCEPTED, "", "", status.st_size, status.st_mtime_ns, digest, record)


def record_checks(
    names: Iterable[str], ledger: Ledger, config: ReadingConfig, measure: Measure, bar: Progress
) -> None:
    """Check the files and record their results; the bar counts them, and those that are rejected."""
    bad = 0
    with closing(decode_each(partial(check_file, config, measure=measure), names, config)) as results:
        for name, result in results:
            if isinstance(result, Failure):
                result = Result(name, REJECTED, *result)
            ledger.record(result)
            bad += result.status == REJECTED
            bar.update(note=f"{bad} bad")


def hash_file(config: ReadingConfig, name: str) -> Result:
    """The result of a file that is known by its hash; it is not decoded. OSError if it cannot be read."""
    path = os.path.join(config.input_dir, name)
    return Result(name, KNOWN, "", "", *_size_and_time(path), sha256_of_file(path))


def is_current(result: Result | None, path: str) -> bool:
    """Whether a result is that of the file as it is now, and would be the same again."""
    if result is None or result.reason in TRANSIENT:
        return False
    return _size_and_time(path) == (result.size, result.mtime_ns)


def _size_and_time(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def warn_without_simplejpeg() -> None:
    """Print what a missing simplejpeg costs."""
    if not has_simplejpeg():
        console.warning(
            "simplejpeg is not installed: damage inside JPEG data is not detected, and reading takes 3x the "
            "time; python -m pip install simplejpeg"
        )


def _blankness(pixels: np.ndarray) -> list[str]:
    height, width = pixels.shape[:2]
    sample = pixels[:: -(-height // SAMPLE_SIDE), :: -(-width // SAMPLE_SIDE)]
    if sample.reshape(-1, 3).std(axis=0).max() >= NEAR_BLANK:
        return []
    return ["constant"] if (pixels == pixels[0, 0]).all() else ["near_blank"]
