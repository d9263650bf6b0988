"""Decoding of one image file to sRGB pixels, or the reason why it cannot be used.

The content determines the format, never the file name. Only formats of the allow-list are opened. Pillow
decodes them; libvips what Pillow cannot decode.
"""

import errno
import io
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image, ImageColor, ImageFile
from PIL.TiffImagePlugin import TiffImageFile

from vae.config.declare import MAX_PIXELS
from vae.images import libvips
from vae.images.channels import with_channels
from vae.images.color import BITS_PER_SAMPLE, Backdrop, flatten, to_srgb, transform_to_srgb
from vae.images.formats import (
    DECODER_ERRORS,
    HEAD_BYTES,
    MAX_IMAGE_BYTES,
    BadImageError,
    check_jpeg,
    check_png,
    explain,
    extension_flag,
    load_plugin,
    plain_jpeg_size,
    sniff_format,
)
from vae.images.metadata import ORIENTATION, metadata_first, orientation_of, profile_of, read_raw_profiles
from vae.system.errors import UserError

NEW_SUBFILE_TYPE, COMPRESSION = 254, 259  # TIFF 6.0 tags
UNCOMPRESSED = 1
SIDEWAYS = range(5, 9)  # orientations
INTEGRITY_CHECKS = {"JPEG": check_jpeg, "PNG": check_png}
_PILLOW_LIMIT = threading.Lock()  # Pillow's limit is global, and threads decode at the same time


class DecodedImage(NamedTuple):
    """A decoded file: its pixels, its format by content, and codes for what was unusual about it."""

    pixels: np.ndarray  # uint8 (H, W, 3), or as many channels as asked for
    format: str
    flags: tuple[str, ...]  # sorted codes: corrections made, and harmless oddities


class Header(NamedTuple):
    """The facts of a file's header, from the first library that can read it."""

    image: Image.Image | None  # opened by Pillow, not decoded; None: only libvips reads it
    vips_image: Any
    orientation: int  # EXIF 2.32, tag 274
    size: tuple[int, int]  # width and height of the upright image


def decode_image(
    path: str | os.PathLike[str],
    *,
    max_pixels: int = MAX_PIXELS,
    background: str = "white",
    channels: int = 3,
) -> np.ndarray:
    """Decode an image file upright and in sRGB: uint8 (H, W, channels), by default without transparency.

    Turns it by its metadata, converts its colours and CMYK, scales 16 bits to 8, and composites transparent
    pixels over `background`, unless there are 4 channels. Raises BadImageError if the file cannot be used
    completely.
    """
    return decode_bytes(read_content(path), max_pixels=max_pixels, background=background, channels=channels)


def read_content(path: str | os.PathLike[str]) -> bytes:
    """The bytes of an image file; BadImageError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > MAX_IMAGE_BYTES:
                raise BadImageError("too_large", f"{size} bytes")
            return file.read()
    except MemoryError as error:
        raise BadImageError("out_of_memory", "does not fit in memory") from error
    except PermissionError as error:
        raise BadImageError("no_permission", "permission denied: fix its permissions") from error
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # of this process or machine
            raise
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
    """Decode the content of a file with this name as decode_image does, with its format and flags.

    `first_frame` accepts files with several frames or pages.
    """
    image = _decode(data, max_pixels, parse_background(background), first_frame)
    flag = extension_flag(name, image.format)
    return image._replace(flags=tuple(sorted({*image.flags, *flag})))


def decode_bytes(
    data: bytes,
    *,
    max_pixels: int = MAX_PIXELS,
    background: str = "white",
    first_frame: bool = False,
    is_verified: bool = False,
    channels: int = 3,
) -> np.ndarray:
    """The pixels of decode_image, from the content of a file: uint8 (H, W, channels).

    `is_verified`: the bytes are those of a file that was decoded before, by their checksum. The checksums
    within a PNG are not compared again.
    """
    pixels = _decode(data, max_pixels, backdrop_of(background, channels), first_frame, is_verified).pixels
    return with_channels(pixels, channels)


def upright_size(path: str | os.PathLike[str], max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Width and height that an image has when it is decoded, from its header; BadImageError or OSError."""
    with open(path, "rb") as file, _errors_explained():
        head = file.read(HEAD_BYTES)
        kind = sniff_format(head, first_frame=True)
        load_plugin(kind)
        return _read_header(file, kind, max_pixels, set()).size


def check_header(data: bytes, *, max_pixels: int, first_frame: bool) -> tuple[str, tuple[int, int]]:
    """Format, and upright width and height, of an image file that is complete by its markers and checksums.

    Pixels are not decoded. BadImageError as in `read_image_bytes`.
    """
    size = plain_jpeg_size(data) if data.startswith(b"\xff\xd8\xff") else None
    if size is not None and size[0] * size[1] <= max_pixels:
        check_jpeg(data, set())  # Pillow would take three times as long
        return "JPEG", size
    with _errors_explained():
        kind = sniff_format(data[:HEAD_BYTES], first_frame)
        load_plugin(kind)
        header = _read_header(io.BytesIO(data), kind, max_pixels, set())
        if kind in INTEGRITY_CHECKS:
            INTEGRITY_CHECKS[kind](data, set())
        _check_frames(header, first_frame, set())
        if header.image is not None:
            profile_of(header.image, kind, data)
        return kind, header.size


@contextmanager
def _errors_explained() -> Iterator[None]:
    """Turn the errors of decoders into a BadImageError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about broken metadata, which does not affect the pixels
        try:
            yield
        except MemoryError as error:
            raise BadImageError("out_of_memory", "does not fit in memory: lower --max_pixels") from error
        except DECODER_ERRORS as error:
            raise explain(error) from error


@lru_cache(maxsize=8)
def parse_background(background: str) -> tuple[int, int, int]:
    """Red, green and blue of a colour name or #rrggbb; UserError for anything else."""
    try:
        return ImageColor.getrgb(background)[:3]
    except ValueError:
        raise UserError(
            f"--background {background} is not a colour: give a name such as white or a value such as #808080"
        ) from None


def backdrop_of(background: str, channels: int) -> Backdrop:
    """The colour behind transparent pixels; None if images keep alpha. UserError as `parse_background`."""
    color = parse_background(background)
    return None if channels == 4 else color


def _decode(
    data: bytes, max_pixels: int, backdrop: Backdrop, first_frame: bool, is_verified: bool = False
) -> DecodedImage:
    kind = sniff_format(data[:HEAD_BYTES], first_frame)
    load_plugin(kind)
    flags: set[str] = set()
    with _errors_explained():
        header = _read_header(io.BytesIO(data), kind, max_pixels, flags, with_pixels=True)
        image = header.image
        flags |= {"mpo"} if image is not None and image.format == "MPO" else set()
        skips_check = kind not in INTEGRITY_CHECKS or (is_verified and kind == "PNG")
        end = None if skips_check else INTEGRITY_CHECKS[kind](data, flags)
        _check_frames(header, first_frame, flags)
        orientation = header.orientation
        flags |= {"rotated"} if orientation > 1 else set()
        if image is None:
            pixels = flatten(*libvips.decode(header.vips_image, None, flags), backdrop, flags)
        else:
            profile = profile_of(image, kind, data)
            try:
                if _is_misread(image, profile, data):
                    raise NotImplementedError("needs libvips: run pip install pyvips pyvips-binary")
                pixels = _by_pillow(image, data, end, profile, backdrop, flags)
                orientation = 1 if kind == "TIFF" else orientation  # which Pillow turns
            except MemoryError:
                raise
            except DECODER_ERRORS as error:
                vips_image = libvips.open_image(data, kind)
                if vips_image is None:
                    raise
                try:
                    color_and_alpha = libvips.decode(vips_image, profile or b"", flags)
                except OSError:
                    raise error from None
                pixels = flatten(*color_and_alpha, backdrop, flags)
    if orientation > 1:
        pixels = np.ascontiguousarray(UPRIGHT[orientation](pixels))
    return DecodedImage(pixels, kind, tuple(flags))


def _read_header(
    file: BinaryIO, kind: str, max_pixels: int, flags: set[str], with_pixels: bool = False
) -> Header:
    """Read the header, and check the size before any pixel is allocated; `with_pixels`: to decode it."""
    if kind == "PNG":
        content, is_damaged = metadata_first(file, with_pixels)
        flags |= {"broken_metadata"} if is_damaged else set()
        file = io.BytesIO(content)
    try:
        image = _open(file, kind)
    except DECODER_ERRORS as error:
        file.seek(0)
        header = _vips_header(file.read(), kind, error)
    else:
        read_raw_profiles(image)
        orientation = orientation_of(image, flags)
        is_upright = getattr(image, "tag_v2", {}).get(ORIENTATION) in SIDEWAYS  # Pillow swaps the sides
        size = image.size[::-1] if orientation in SIDEWAYS and not is_upright else image.size
        header = Header(image, None, orientation, size)
    width, height = header.size
    if width * height > max_pixels:
        raise BadImageError("too_many_pixels", f"{width}x{height}, more than --max_pixels {max_pixels}")
    return header


def _vips_header(data: bytes, kind: str, error: Exception) -> Header:
    """Open with libvips a file that Pillow cannot open; BadImageError if it cannot either."""
    if kind in INTEGRITY_CHECKS:
        INTEGRITY_CHECKS[kind](data, set())  # may raise a more specific reason
    vips_image = libvips.open_image(data, kind)
    if vips_image is not None:
        orientation, size = libvips.orientation_and_size(vips_image)
        return Header(None, vips_image, orientation, size)
    if isinstance(error, Image.UnidentifiedImageError):
        raise BadImageError("damaged", f"starts like {kind}, but its header cannot be read") from error
    raise explain(error) from error


def _open(file: BinaryIO, kind: str) -> Image.Image:
    assert not ImageFile.LOAD_TRUNCATED_IMAGES, "Pillow would fill truncated images with grey"
    file.seek(0)
    with _PILLOW_LIMIT:
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # our own limit is checked
        try:
            return Image.open(file, formats=(kind,))
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _is_misread(image: Image.Image, profile: bytes | None, data: bytes) -> bool:
    """Whether Pillow 13 would decode pixels wrongly, so that libvips does; BadImageError if nobody can."""
    if isinstance(image, TiffImageFile):
        tags = image.tag_v2
        libvips.check_tiff(tags)
        is_planar = tags.get(libvips.PLANAR_CONFIGURATION) == libvips.SEPARATE_PLANES
        is_raw = tags.get(COMPRESSION, UNCOMPRESSED) == UNCOMPRESSED
        return image.mode == "F" or (is_planar and is_raw and tags.get(BITS_PER_SAMPLE, (1,))[0] != 8)
    if image.format != "PNG" or data[24] != 16 or image.mode not in ("RGB", "RGBA"):
        return False
    is_converted = profile is not None and transform_to_srgb(profile)[1] is not None
    return is_converted or "transparency" in image.info  # 8 bits are too few for both


def _by_pillow(
    image: Image.Image,
    data: bytes,
    end: int | None,
    profile: bytes | None,
    backdrop: Backdrop,
    flags: set[str],
) -> np.ndarray:
    """The pixels of `flatten`, not yet upright unless it is a TIFF. `end`: of a JPEG, in the data."""
    if image.format in ("JPEG", "MPO"):
        assert end is not None
        pixels = decode_strictly(data, end, image.mode)
        if pixels is not None:
            if pixels.shape[2] == 3 and (not profile or transform_to_srgb(profile) == ("RGB", None)):
                return pixels  # avoids two copies through Pillow
            gray_or_rgb = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
            return to_srgb(gray_or_rgb, profile, backdrop, flags)
    image.load()
    is_deep_tiff = isinstance(image, TiffImageFile) and image.tag_v2.get(BITS_PER_SAMPLE, (1,))[0] == 16
    if is_deep_tiff or (image.format == "PNG" and data[24] == 16):
        flags.add("scaled_to_8_bits")
    if image.format == "PNG":
        _scale_key(image, data[24])
    return to_srgb(image, profile, backdrop, flags)


def _scale_key(image: Image.Image, bits: int) -> None:
    """Give the transparent colour of a PNG the range of Pillow's pixels (PNG 1.2, 4.2.9: its low bits)."""
    key = image.info.get("transparency")
    if image.mode == "L" and isinstance(key, int):
        most = 2**bits - 1
        image.info["transparency"] = (key & most) * 255 // most
    elif image.mode == "RGB" and isinstance(key, tuple):
        image.info["transparency"] = tuple(value & 255 for value in key)


def _check_frames(header: Header, first_frame: bool, flags: set[str]) -> None:
    """Raise BadImageError for several frames or pages; those of MPO files and TIFF previews do not count."""
    frames = _count_frames(header.image) if header.image else libvips.count_pages(header.vips_image)
    if frames > 1 and not first_frame:
        remedy = "save one of them, or run prepare_data.py --mode preprocess --first_frame"
        raise BadImageError("animated", f"{frames} frames or pages: {remedy}")
    if frames > 1:
        flags.add("first_frame")


def _count_frames(image: Image.Image) -> int:
    if image.format == "MPO":  # frame 0 is the image
        return 1
    frames = getattr(image, "n_frames", 1)
    if frames == 1 or not isinstance(image, TiffImageFile):
        return frames
    pages = 1
    for page in range(1, frames):
        image.seek(page)
        pages += not image.tag_v2.get(NEW_SUBFILE_TYPE, 0) & 1  # bit 0: reduced copy of another page
    image.seek(0)
    return pages


UPRIGHT: dict[int, Callable[[np.ndarray], np.ndarray]] = {  # EXIF 2.32, tag 274: stored pixels to upright
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: np.rot90(pixels, 2).transpose(1, 0, 2),
    8: lambda pixels: np.rot90(pixels, 1),
}


# ---- JPEG by simplejpeg ------------------------------------------------------------------------------------
# simplejpeg is optional. It treats every warning of libjpeg as damage, and Pillow ignores them: of 200 images
# with one flipped byte, simplejpeg rejected 89 and Pillow 1. Both use libjpeg-turbo and give the same pixels;
# simplejpeg takes a third of the time.

COLOR_SPACES = {"RGB": "RGB", "L": "GRAY"}  # Pillow's mode: simplejpeg's name


@cache
def has_simplejpeg() -> bool:
    """Whether simplejpeg can be imported here."""
    try:
        import simplejpeg  # noqa: F401
    except ImportError:
        return False
    return True


def decode_strictly(data: bytes, end: int, mode: str) -> np.ndarray | None:
    """Pixels (H, W, 3) or (H, W, 1) of the JPEG up to byte `end`; None if only Pillow can decode it.

    Raises BadImageError if libjpeg reports an error or a warning.
    """
    if not has_simplejpeg():
        return None
    import simplejpeg

    with memoryview(data)[:end] as whole:
        try:
            if mode in COLOR_SPACES:
                return simplejpeg.decode_jpeg(whole, COLOR_SPACES[mode], strict=True)
            # Pillow decodes CMYK; this only checks for warnings. An eighth of the size still reads all bits.
            simplejpeg.decode_jpeg(whole, "CMYK", min_factor=8, strict=True)
        except ValueError as error:
            text = " ".join(str(error).split())
            raise BadImageError("truncated" if "remature end" in text else "damaged", text) from error
    return None
