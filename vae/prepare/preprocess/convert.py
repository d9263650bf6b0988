"""One source file to its images of every target size, as temporary files beside their record."""

import hashlib
import os
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from PIL import Image

from vae.data.formats import BadImageError
from vae.files import sha256_of_file
from vae.prepare.check_file import Rules, check_image
from vae.prepare.ledger import ACCEPTED, REJECTED, Result
from vae.prepare.preprocess.resize import Shape, plan_shape, resize_to_shapes

EXTENSIONS = {"jpeg": ".jpg", "png": ".png", "webp": ".webp"}


@dataclass(frozen=True)
class Recipe:
    """What is made of an accepted image."""

    target_sizes: tuple[int, ...]  # px
    resize_mode: str = "cover"
    format: str = "jpeg"
    quality: int = 95  # of JPEG and WebP
    upscale: bool = False
    rules: Rules = Rules()  # noqa: RUF009 - frozen

    @property
    def extension(self) -> str:
        """Of the files written."""
        return EXTENSIONS[self.format]


def convert_file(input_dir: str, scratch: str, recipe: Recipe, task: tuple[str, str]) -> Result:
    """Make the images of one (name, output) in `scratch`; rejected where not even one size can be made.

    The record holds by size either width, height, bytes, sha256 and temporary file, or reason and detail.
    """
    name, output = task
    path = os.path.join(input_dir, name)
    size, mtime_ns = 0, 0
    try:
        status = os.stat(path)
        size, mtime_ns = status.st_size, status.st_mtime_ns
        image = check_image(path, recipe.rules)
        digest = sha256_of_file(path)
        after = os.stat(path)
        if (after.st_size, after.st_mtime_ns) != (size, mtime_ns):
            raise BadImageError("changed_while_reading", "was written to meanwhile")
    except BadImageError as error:
        return _rejected(name, output, error, size, mtime_ns)
    except OSError as error:
        reason = "broken_link" if os.path.islink(path) else "unreadable"
        return _rejected(name, output, BadImageError(reason, error.strerror or str(error)), size, mtime_ns)
    record = {"output": output, "flags": list(image.flags), "sizes": {}}
    shapes: dict[int, Shape] = {}
    for target in recipe.target_sizes:
        try:
            shapes[target] = _shape(image.pixels, target, recipe)
        except BadImageError as error:
            record["sizes"][str(target)] = {"reason": error.reason, "detail": error.detail}
            last = error
    if not shapes:
        return _rejected(name, output, last, size, mtime_ns, digest)
    arrays = resize_to_shapes(image.pixels, list(shapes.values()), recipe.rules.background)
    for (target, shape), pixels in zip(shapes.items(), arrays, strict=True):
        record["sizes"][str(target)] = _write(name, scratch, pixels, target, shape, recipe)
    return Result(name, ACCEPTED, size=size, mtime_ns=mtime_ns, sha256=digest, record=record)


def _rejected(
    name: str, output: str, error: BadImageError, size: int, mtime_ns: int, digest: str | None = None
) -> Result:
    record = {"output": output, "flags": [], "sizes": {}}
    return Result(name, REJECTED, error.reason, error.detail, size, mtime_ns, digest, record)


def _shape(pixels: np.ndarray, target: int, recipe: Recipe) -> Shape:
    height, width = pixels.shape[:2]
    return plan_shape(
        width,
        height,
        target,
        recipe.resize_mode,
        upscale=recipe.upscale,
        max_pixels=recipe.rules.max_pixels,
        file_format=recipe.format,
    )


def _write(name: str, scratch: str, pixels: np.ndarray, target: int, shape: Shape, recipe: Recipe) -> dict:
    encoded = encode(pixels, recipe.format, recipe.quality)
    key = hashlib.blake2b(os.fsencode(name), digest_size=16).hexdigest()
    temporary = os.path.join(scratch, f"{key}_{target}")
    with open(temporary, "wb") as file:
        file.write(encoded)
    height, width = pixels.shape[:2]
    return {
        "width": width,
        "height": height,
        "bytes": len(encoded),
        "sha256": hashlib.sha256(encoded).hexdigest(),
        "upscaled": shape.upscaled,
        "temporary": temporary,
    }


def encode(pixels: np.ndarray, file_format: str, quality: int) -> memoryview:
    """The file of uint8 (H, W, 3) pixels; JPEG with full colour resolution."""
    options = {
        "jpeg": {"format": "JPEG", "quality": quality, "subsampling": 0},
        "png": {"format": "PNG"},
        "webp": {"format": "WEBP", "quality": quality},
    }[file_format]
    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, **options)
    return buffer.getbuffer()
