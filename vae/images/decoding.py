"""Decoding of one image file to sRGB pixels, or the reason why it cannot be used.

The content determines the format, never the file name. Only formats of the allow-list are opened.
"""

import io
import os
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import BinaryIO, NamedTuple

import numpy as np
from PIL import Image, ImageColor, ImageFile, ImageOps
from PIL.TiffImagePlugin import TiffImageFile

from vae.config.declare import MAX_PIXELS
from vae.images.color import to_srgb, transform_to_srgb
from vae.images.formats import (
    BadImageError,
    check_gif,
    check_jpeg,
    check_png,
    extension_flag,
    load_plugin,
    plain_jpeg_size,
    sniff_format,
)
from vae.images.strict_jpeg import decode_strictly
from vae.system.errors import UserError
from vae.system.files import open_regular

NEW_SUBFILE_TYPE = 254  # TIFF 6.0 tag
ORIENTATION = 0x0112  # EXIF 2.32 tag
INTEGRITY_CHECKS = {"JPEG": check_jpeg, "PNG": check_png, "GIF": check_gif}
EMPTY_EXIF = 20  # bytes: the marker, a TIFF header and a directory without entries
# Exceptions that Pillow's readers may raise on damaged content; such a file is rejected, nothing else stops.
DECODER_ERRORS = (
    OSError, SyntaxError, ValueError, EOFError, KeyError, IndexError, TypeError,
    AttributeError, OverflowError, ArithmeticError, MemoryError, RuntimeError, struct.error,
)  # fmt: skip
_PILLOW_LIMIT = threading.Lock()  # Pillow's limit is global, and threads decode at the same time
TRUNCATED = ("truncated", "broken data stream", "not enough", "eof")
TEXT_BOMB = ("max_text_chunk", "too much memory used in text chunks")  # limits of Pillow's PNG reader


class DecodedImage(NamedTuple):
    """A decoded file: its pixels, its format by content, and codes for what was unusual about it."""

    pixels: np.ndarray  # uint8 (H, W, 3)
    format: str
    flags: tuple[str, ...]  # sorted codes: corrections made, and harmless oddities


def decode_image(
    path: str | os.PathLike[str], *, max_pixels: int = MAX_PIXELS, background: str = "white"
) -> np.ndarray:
    """Decode an image file upright, in sRGB and without transparency: uint8 (H, W, 3).

    Rotates by EXIF, converts colour profiles and CMYK, scales 16 bits to 8, and composites transparent pixels
    over `background`. Raises BadImageError if the file cannot be used completely.
    """
    return read_image(path, max_pixels=max_pixels, background=background).pixels


def read_image(
    path: str | os.PathLike[str],
    *,
    max_pixels: int = MAX_PIXELS,
    background: str = "white",
    first_frame: bool = False,
) -> DecodedImage:
    """Like decode_image, with format and flags; `first_frame` accepts files with several frames or pages."""
    backdrop = parse_background(background)
    with opened_image(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about broken metadata, which does not affect the pixels
        pil_image = _decode_open_file(file, max_pixels, backdrop, first_frame)
    flag = extension_flag(os.fspath(path), pil_image.format)
    return pil_image._replace(flags=tuple(sorted({*pil_image.flags, *flag})))


@contextmanager
def opened_image(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """An image file to read; BadImageError if it cannot be read, or is written to meanwhile."""
    try:
        with open_regular(path) as file:
            before = os.fstat(file.fileno())
            try:
                yield file
            finally:
                _check_unchanged(before, os.fstat(file.fileno()))
    except PermissionError as error:
        raise BadImageError("no_permission", "permission denied: fix its permissions") from error
    except OSError as error:
        if os.path.islink(path) and not os.path.exists(path):
            raise BadImageError(
                "broken_link", f"links to {os.readlink(path)}, which does not exist"
            ) from error
        raise BadImageError("unreadable", error.strerror or str(error)) from error


def read_image_bytes(
    data: bytes,
    name: str,
    *,
    max_pixels: int = MAX_PIXELS,
    background: str = "white",
    first_frame: bool = False,
) -> DecodedImage:
    """As `read_image`, of the content of a file with this name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about broken metadata, which does not affect the pixels
        backdrop = parse_background(background)
        image = _decode_open_file(io.BytesIO(data), max_pixels, backdrop, first_frame)
    flag = extension_flag(name, image.format)
    return image._replace(flags=tuple(sorted({*image.flags, *flag})))


def upright_size(path: str | os.PathLike[str], max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Width and height of an image after its EXIF rotation, from its header; BadImageError or OSError."""
    with open_regular(path) as file:
        return _read_header(file, max_pixels, first_frame=True, check=False)[1]


def check_header(data: bytes, *, max_pixels: int, first_frame: bool) -> tuple[str, tuple[int, int]]:
    """Format, and upright width and height, of an image file that is complete by its markers and checksums.

    Pixels are not decoded. BadImageError as in `read_image`.
    """
    file = io.BytesIO(data)
    size = plain_jpeg_size(data) if data.startswith(b"\xff\xd8\xff") else None
    if size is None or size[0] * size[1] > max_pixels:
        return _read_header(file, max_pixels, first_frame, check=True)
    check_jpeg(file, set())  # Pillow would take three times as long
    return "JPEG", size


def _read_header(
    file: BinaryIO, max_pixels: int, first_frame: bool, check: bool
) -> tuple[str, tuple[int, int]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            kind = sniff_format(file, max_pixels, first_frame)
            load_plugin(kind)
            pil_image = _open_header(file, kind, max_pixels)
            if check:
                if kind in INTEGRITY_CHECKS:
                    INTEGRITY_CHECKS[kind](file, set())
                _check_frames(pil_image, first_frame, set())
            # Pillow decodes a PNG to look for EXIF data behind its pixels.
            has_exif = kind != "PNG" or "exif" in pil_image.info
            orientation = _orientation(pil_image, set()) if has_exif else 1
        except DECODER_ERRORS as error:
            raise _explain(error) from error
    width, height = pil_image.size
    return kind, ((height, width) if orientation >= 5 else (width, height))


def decode_bytes(
    data: bytes,
    *,
    max_pixels: int = MAX_PIXELS,
    background: str = "white",
    first_frame: bool = False,
    is_verified: bool = False,
) -> np.ndarray:
    """The pixels of read_image, from the content of a file: uint8 (H, W, 3).

    `is_verified`: the bytes are those of a file that was decoded before, by their checksum. The checksums
    within a PNG are not compared again.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about broken metadata, which does not affect the pixels
        backdrop = parse_background(background)
        return _decode_open_file(io.BytesIO(data), max_pixels, backdrop, first_frame, is_verified).pixels


@lru_cache(maxsize=8)
def parse_background(background: str) -> tuple[int, int, int]:
    """Red, green and blue of a colour name or #rrggbb; UserError for anything else."""
    try:
        return ImageColor.getrgb(background)[:3]
    except ValueError:
        raise UserError(
            f"--background {background} is not a colour: give a name such as white or a value such as #808080"
        ) from None


def _check_unchanged(before: os.stat_result, after: os.stat_result) -> None:
    """Raise BadImageError if the file was written to while it was read: the result may mix old and new."""
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise BadImageError(
            "changed_while_reading", "was written to while it was read: wait until the writer has finished"
        )


def _decode_open_file(
    file: BinaryIO,
    max_pixels: int,
    backdrop: tuple[int, int, int],
    first_frame: bool,
    is_verified: bool = False,
) -> DecodedImage:
    kind = sniff_format(file, max_pixels, first_frame)
    load_plugin(kind)
    flags: set[str] = set()
    try:
        pil_image = _open_header(file, kind, max_pixels)
        if pil_image.format == "MPO":
            flags.add("mpo")
        skips_check = kind not in INTEGRITY_CHECKS or (is_verified and kind == "PNG")
        end = None if skips_check else INTEGRITY_CHECKS[kind](file, flags)
        _check_frames(pil_image, first_frame, flags)
        if kind == "JPEG":
            assert end is not None
            pixels = decode_strictly(file, end, pil_image.mode)
            if pixels is not None:
                return DecodedImage(_finish_jpeg(pixels, pil_image, backdrop, flags), kind, tuple(flags))
        file.seek(0)
        pil_image.load()
        profile = pil_image.info.get("icc_profile")
        upright = ImageOps.exif_transpose(pil_image) if _orientation(pil_image, flags) != 1 else pil_image
        return DecodedImage(to_srgb(upright, pil_image, profile, backdrop, flags), kind, tuple(flags))
    except BadImageError:
        raise
    except MemoryError as error:
        raise BadImageError("out_of_memory", "does not fit in memory: lower --max_pixels") from error
    except DECODER_ERRORS as error:
        raise _explain(error) from error


def _explain(error: Exception) -> BadImageError:
    text = " ".join(str(error).split()) or type(error).__name__
    if any(word in text.lower() for word in TEXT_BOMB):
        return BadImageError("text_bomb", "compressed text that expands beyond the size of any comment")
    truncated = any(word in text.lower() for word in TRUNCATED)
    return BadImageError("truncated" if truncated else "damaged", text)


def _open_header(file: BinaryIO, kind: str, max_pixels: int) -> Image.Image:
    """Read only the header, and check the size before any pixel is allocated."""
    assert not ImageFile.LOAD_TRUNCATED_IMAGES, "Pillow would fill truncated images with grey"
    file.seek(0)
    try:
        with _PILLOW_LIMIT:
            limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # our own limit is checked below
            try:
                pil_image = Image.open(file, formats=(kind,))
            finally:
                Image.MAX_IMAGE_PIXELS = limit
    except Image.UnidentifiedImageError as error:
        if kind in INTEGRITY_CHECKS:
            INTEGRITY_CHECKS[kind](file, set())  # may raise a more specific reason
        raise BadImageError("damaged", f"starts like {kind}, but its header cannot be read") from error
    width, height = pil_image.size
    if width * height > max_pixels:
        raise BadImageError("too_many_pixels", f"{width}x{height}, more than --max_pixels {max_pixels}")
    return pil_image


def _check_frames(pil_image: Image.Image, first_frame: bool, flags: set[str]) -> None:
    """Raise BadImageError for several frames or pages; those of MPO files and TIFF previews do not count."""
    if pil_image.format == "MPO":  # frame 0 is the image
        return
    frames = getattr(pil_image, "n_frames", 1)
    if frames > 1 and isinstance(pil_image, TiffImageFile):
        pages = 1
        for page in range(1, frames):
            pil_image.seek(page)
            pages += not pil_image.tag_v2.get(NEW_SUBFILE_TYPE, 0) & 1  # bit 0: reduced copy of another page
        pil_image.seek(0)
        frames = pages
    if frames > 1 and not first_frame:
        remedy = "save one of them, or run prepare_data.py --mode preprocess --first_frame"
        raise BadImageError("animated", f"{frames} frames or pages: {remedy}")
    if frames > 1:
        flags.add("first_frame")


def _orientation(pil_image: Image.Image, flags: set[str]) -> int:
    """EXIF orientation, 1 to 8; a broken EXIF block counts as 1, so the pixels are not rotated."""
    exif: Image.Exif | None = None
    orientation = 1
    try:
        exif = pil_image.getexif()
        orientation = exif.get(ORIENTATION, 1)
    except DECODER_ERRORS:
        exif = None
    if not exif and len(pil_image.info.get("exif") or b"") > EMPTY_EXIF:
        flags.add("broken_exif")
    if orientation not in range(2, 9):
        return 1
    flags.add("rotated")
    return orientation


ROTATIONS: dict[int, Callable[[np.ndarray], np.ndarray]] = {  # EXIF 2.32, tag 274: stored pixels to upright
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: np.rot90(pixels, 2).transpose(1, 0, 2),
    8: lambda pixels: np.rot90(pixels, 1),
}


def _finish_jpeg(
    pixels: np.ndarray, pil_image: Image.Image, backdrop: tuple[int, int, int], flags: set[str]
) -> np.ndarray:
    """Rotate and colour-convert pixels (H, W, 3) or (H, W, 1) that were decoded without Pillow."""
    profile = pil_image.info.get("icc_profile")
    rotate = ROTATIONS.get(_orientation(pil_image, flags))
    if rotate:
        pixels = np.ascontiguousarray(rotate(pixels))
    if pixels.shape[2] == 3 and (not profile or transform_to_srgb(profile) == ("RGB", None)):
        return pixels  # avoids two copies through Pillow
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    return to_srgb(image, pil_image, profile, backdrop, flags)
