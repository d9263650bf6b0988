"""One image file to sRGB pixels, or the reason why it cannot be used.

The content decides the format, never the file's name, and only formats of the allow-list are opened.
"""

import os
import struct
import warnings
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageColor, ImageFile, ImageOps

from vae.config.errors import UserError
from vae.config.options import MAX_PIXELS
from vae.data.color import to_srgb, transform_to_srgb
from vae.data.formats import (
    BadImageError,
    check_jpeg,
    check_png,
    extension_flag,
    load_plugin,
    sniff_format,
)
from vae.data.strict_jpeg import decode_strictly

NEW_SUBFILE_TYPE = 254  # TIFF 6.0 tag
ORIENTATION = 0x0112  # EXIF 2.32 tag
WHOLENESS_CHECKS = {"JPEG": check_jpeg, "PNG": check_png}
# What Pillow's readers may raise on bytes that are not what they claim; a decoder's fault costs one image.
DECODER_ERRORS = (
    OSError, SyntaxError, ValueError, EOFError, KeyError, IndexError, TypeError,
    AttributeError, OverflowError, ArithmeticError, MemoryError, RuntimeError, struct.error,
)  # fmt: skip
TORN = ("truncated", "broken data stream", "not enough", "eof")
TEXT_BOMB = ("max_text_chunk", "too much memory used in text chunks")  # limits of Pillow's PNG reader


class DecodedImage(NamedTuple):
    """A decoded file: its pixels, what it is by its content, and what is worth knowing about it."""

    pixels: np.ndarray  # uint8 (H, W, 3)
    format: str
    flags: tuple[str, ...]  # sorted codes: what was put right, and what is odd but harmless


def decode_image(
    path: str | os.PathLike, *, max_pixels: int = MAX_PIXELS, background: str = "white"
) -> np.ndarray:
    """Decode an image upright, in sRGB and without transparency: uint8 (H, W, 3).

    Rotates by EXIF, converts colour profiles and CMYK, scales 16 bits to 8, and lays transparent pixels over
    `background`. Raises BadImageError for whatever cannot be used whole.
    """
    return read_image(path, max_pixels=max_pixels, background=background).pixels


def read_image(
    path: str | os.PathLike,
    *,
    max_pixels: int = MAX_PIXELS,
    background: str = "white",
    first_frame: bool = False,
) -> DecodedImage:
    """Decode as decode_image does, with the flags; `first_frame` takes it of animations and pages."""
    backdrop = parse_background(background)
    try:
        with open(path, "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about broken metadata, which is no fault of the pixels
            before = os.fstat(file.fileno())
            try:
                pil_image = _decode_open_file(file, max_pixels, backdrop, first_frame)
            finally:
                _check_unchanged(before, os.fstat(file.fileno()))
    except BadImageError:
        raise
    except PermissionError as error:
        raise BadImageError("no_permission", "may not be read: mend its permissions") from error
    except OSError as error:
        if os.path.islink(path) and not os.path.exists(path):
            raise BadImageError("broken_link", f"links to {os.readlink(path)}, which is not there") from error
        raise BadImageError("unreadable", error.strerror or str(error)) from error
    flag = extension_flag(os.fspath(path), pil_image.format)
    return pil_image._replace(flags=tuple(sorted({*pil_image.flags, *flag})))


@lru_cache(maxsize=8)
def parse_background(background: str) -> tuple[int, int, int]:
    """Red, green and blue of a colour name or #rrggbb; raises UserError for anything else."""
    try:
        return ImageColor.getrgb(background)[:3]
    except ValueError:
        raise UserError(
            f"--background {background} is not a colour: give a name such as white or a value such as #808080"
        ) from None


def _check_unchanged(before: os.stat_result, after: os.stat_result) -> None:
    """Raise for a file that somebody wrote to meanwhile: whatever was read is neither the old nor the new."""
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise BadImageError("changed_while_reading", "was written to meanwhile: wait until it is finished")


def _decode_open_file(
    file, max_pixels: int, backdrop: tuple[int, int, int], first_frame: bool
) -> DecodedImage:
    kind = sniff_format(file, max_pixels, first_frame)
    load_plugin(kind)
    flags: set[str] = set()
    try:
        pil_image = _open_header(file, kind, max_pixels)
        _judge_frames(pil_image, first_frame, flags)
        end = WHOLENESS_CHECKS[kind](file, flags) if kind in WHOLENESS_CHECKS else None
        if kind == "JPEG":
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
        return BadImageError("text_bomb", "compressed text that unpacks to more than any comment needs")
    torn = any(word in text.lower() for word in TORN)
    return BadImageError("truncated" if torn else "damaged", text)


def _open_header(file, kind: str, max_pixels: int) -> Image.Image:
    """Read the header only; the size is judged before any pixel is allocated."""
    assert not ImageFile.LOAD_TRUNCATED_IMAGES, "torn images would be filled with grey"
    file.seek(0)
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # ours is checked below
    try:
        pil_image = Image.open(file, formats=(kind,))
    except Image.UnidentifiedImageError as error:
        if kind in WHOLENESS_CHECKS:
            WHOLENESS_CHECKS[kind](file, set())  # may know the reason better
        raise BadImageError("damaged", f"begins like {kind} but its header cannot be read") from error
    finally:
        Image.MAX_IMAGE_PIXELS = limit
    width, height = pil_image.size
    if width * height > max_pixels:
        raise BadImageError("too_many_pixels", f"{width}x{height}, more than --max_pixels {max_pixels}")
    return pil_image


def _judge_frames(pil_image: Image.Image, first_frame: bool, flags: set[str]) -> None:
    """Raise for several frames or pages; MPO (frame 0 is the image) and TIFF previews do not count."""
    frames = getattr(pil_image, "n_frames", 1)
    if pil_image.format == "MPO":
        flags.add("mpo")
        return
    if frames > 1 and pil_image.format == "TIFF":
        pages = 1
        for page in range(1, frames):
            pil_image.seek(page)
            pages += not pil_image.tag_v2.get(NEW_SUBFILE_TYPE, 0) & 1  # bit 0: reduced copy of another page
        pil_image.seek(0)
        frames = pages
    if frames > 1 and not first_frame:
        raise BadImageError("animated", f"{frames} frames or pages: save one of them, or use --first_frame")
    if frames > 1:
        flags.add("first_frame")
    elif pil_image.format == "GIF" and not first_frame:
        raise BadImageError("format_not_supported", "GIF: convert it to PNG, or use --first_frame")


def _orientation(pil_image: Image.Image, flags: set[str]) -> int:
    """EXIF orientation, 1 to 8; a broken block says nothing about the pixels, which stay as they lie."""
    try:
        exif = pil_image.getexif()
        orientation = exif.get(ORIENTATION, 1)
    except DECODER_ERRORS:
        exif, orientation = {}, 1
    if not exif and len(pil_image.info.get("exif") or b"") > EMPTY_EXIF:
        flags.add("broken_exif")
    if orientation not in range(2, 9):
        return 1
    flags.add("rotated")
    return orientation


EMPTY_EXIF = 20  # bytes: the marker, a TIFF header and a directory of no entries


TURNS = {  # EXIF 2.32, tag 274: how to bring stored rows and columns upright
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
    """Turn and colour-convert pixels (H, W, 3) or (H, W, 1) decoded outside Pillow."""
    profile = pil_image.info.get("icc_profile")
    turn = TURNS.get(_orientation(pil_image, flags))
    if turn:
        pixels = np.ascontiguousarray(turn(pixels))
    if pixels.shape[2] == 3 and (not profile or transform_to_srgb(profile) == ("RGB", None)):
        return pixels  # without two copies through Pillow
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    return to_srgb(image, pil_image, profile, backdrop, flags)
