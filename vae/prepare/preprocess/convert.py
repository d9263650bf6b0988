"""Convert one source file to images of every target size, as temporary files with a record."""

import hashlib
import os
from typing import Any
from uuid import uuid4

import numpy as np

from vae.config.prepare_flags import PreprocessConfig
from vae.images.decoding import DecodedImage
from vae.images.formats import BadImageError
from vae.prepare.check_file import check_image
from vae.prepare.encode import encode
from vae.prepare.ledger import ACCEPTED, REJECTED, Result
from vae.prepare.preprocess.resize import Shape, plan_shape, resize_to_shapes
from vae.system.files import sha256_of_file


def convert_file(config: PreprocessConfig, scratch: str, task: tuple[str, str]) -> Result:
    """Write the images of one (name, output) to `scratch`; rejected if no target size can be made.

    For each size, the record contains width, height, bytes, sha256, upscaled and the temporary file, or a
    reason and detail.
    """
    name, output = task
    path = os.path.join(config.input_dir, name)
    rejected = Result(name, REJECTED, record=record_without_images(output))
    try:
        status = os.stat(path)
        rejected = rejected._replace(size=status.st_size, mtime_ns=status.st_mtime_ns)
        image = check_image(path, config)
        digest = sha256_of_file(path)
        after = os.stat(path)
        if (after.st_size, after.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
            raise BadImageError("changed_while_reading", "was written to while it was read")
    except BadImageError as error:
        return rejected._replace(reason=error.reason, detail=error.detail)
    except OSError as error:
        reason = "broken_link" if os.path.islink(path) else "unreadable"
        return rejected._replace(reason=reason, detail=error.strerror or str(error))
    sizes = _convert(image, scratch, config)
    if all("reason" in made for made in sizes.values()):
        failed = list(sizes.values())[-1]
        return rejected._replace(reason=failed["reason"], detail=failed["detail"], sha256=digest)
    record = {"output": output, "flags": list(image.flags), "sizes": sizes}
    return rejected._replace(status=ACCEPTED, sha256=digest, record=record)


def record_without_images(output: str) -> dict[str, Any]:
    """The record of a file with this output name for which no image is written."""
    return {"output": output, "flags": [], "sizes": {}}


def _convert(image: DecodedImage, scratch: str, config: PreprocessConfig) -> dict[str, Any]:
    """For each target size: what was written, or the reason and detail why not."""
    made: dict[str, Any] = {}
    shapes: dict[int, Shape] = {}
    height, width = image.pixels.shape[:2]
    for target in config.target_size:
        try:
            shapes[target] = plan_shape(width, height, target, config)
        except BadImageError as error:
            made[str(target)] = {"reason": error.reason, "detail": error.detail}
    arrays = resize_to_shapes(image.pixels, list(shapes.values()), config.background)
    for (target, shape), pixels in zip(shapes.items(), arrays, strict=True):
        made[str(target)] = _write(pixels, os.path.join(scratch, uuid4().hex), shape, config)
    return made


def _write(pixels: np.ndarray, temporary: str, shape: Shape, config: PreprocessConfig) -> dict[str, Any]:
    encoded = encode(pixels, config.format, config.quality)
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
