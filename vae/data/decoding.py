"""One picture file to sRGB pixels, or the reason why it cannot be used.

The content decides the format, never the file's name, and only formats of the allow-list are opened.
"""

import os
import struct
import warnings
from functools import lru_cache
from io import BytesIO

import numpy as np
from PIL import Image, ImageCms, ImageColor, ImageFile, ImageOps

from vae.config.errors import UserError
from vae.data.formats import BadImageError, check_jpeg, check_png, sniff_format

NEW_SUBFILE_TYPE, BITS_PER_SAMPLE, PHOTOMETRIC = 254, 258, 262  # TIFF 6.0 tags
WHITE_IS_ZERO = 0
WHOLENESS_CHECKS = {"JPEG": check_jpeg, "PNG": check_png}
# What Pillow's readers may raise on bytes that are not what they claim; a decoder's fault costs one picture.
DECODER_ERRORS = (
    OSError, SyntaxError, ValueError, EOFError, KeyError, IndexError, TypeError,
    AttributeError, OverflowError, ArithmeticError, MemoryError, RuntimeError, struct.error,
)  # fmt: skip


def decode_image(
    path: str | os.PathLike, *, max_pixels: int = 300_000_000, background: str = "white"
) -> np.ndarray:
    """Decode a picture upright, in sRGB and without transparency: uint8 (H, W, 3).

    Rotates by EXIF, converts colour profiles and CMYK, scales 16 bits to 8, and lays transparent pixels over
    `background`. Raises BadImageError for whatever cannot be used whole.
    """
    backdrop = parse_background(background)
    try:
        with open(path, "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about broken metadata, which is no fault of the pixels
            return _decode_open_file(file, max_pixels, backdrop)
    except BadImageError:
        raise
    except OSError as error:
        raise BadImageError("unreadable", error.strerror or str(error)) from error


@lru_cache(maxsize=8)
def parse_background(background: str) -> tuple[int, int, int]:
    """Red, green and blue of a colour name or #rrggbb; raises UserError for anything else."""
    try:
        return ImageColor.getrgb(background)[:3]
    except ValueError:
        raise UserError(
            f"--background {background} is not a colour: give a name such as white or a value such as #808080"
        ) from None


def _decode_open_file(file, max_pixels: int, backdrop: tuple[int, int, int]) -> np.ndarray:
    kind = sniff_format(file, max_pixels)
    try:
        picture = _open_header(file, kind, max_pixels)
        _reject_animation(picture)
        if kind in WHOLENESS_CHECKS:
            WHOLENESS_CHECKS[kind](file)
        file.seek(0)
        picture.load()
        profile = picture.info.get("icc_profile")
        upright = ImageOps.exif_transpose(picture) if _orientation(picture) != 1 else picture
        return _to_srgb(upright, picture, profile, backdrop)
    except BadImageError:
        raise
    except MemoryError as error:
        raise BadImageError("too_many_pixels", "does not fit in memory: lower --max_pixels") from error
    except DECODER_ERRORS as error:
        text = " ".join(str(error).split()) or type(error).__name__
        torn = any(word in text.lower() for word in ("truncated", "broken data stream", "not enough", "eof"))
        raise BadImageError("truncated" if torn else "damaged", text) from error


def _open_header(file, kind: str, max_pixels: int) -> Image.Image:
    """Read the header only; the size is judged before any pixel is allocated."""
    assert not ImageFile.LOAD_TRUNCATED_IMAGES, "torn pictures would be filled with grey"
    file.seek(0)
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # ours is checked below
    try:
        picture = Image.open(file, formats=(kind,))
    except Image.UnidentifiedImageError as error:
        raise BadImageError("damaged", f"begins like {kind} but its header cannot be read") from error
    finally:
        Image.MAX_IMAGE_PIXELS = limit
    width, height = picture.size
    if width * height > max_pixels:
        raise BadImageError("too_many_pixels", f"{width}x{height}, more than --max_pixels {max_pixels}")
    return picture


def _reject_animation(picture: Image.Image) -> None:
    """Raise for several frames or pages; MPO (frame 0 is the picture) and TIFF previews do not count."""
    frames = getattr(picture, "n_frames", 1)
    if frames > 1 and picture.format == "TIFF":
        pages = 1
        for page in range(1, frames):
            picture.seek(page)
            pages += not picture.tag_v2.get(NEW_SUBFILE_TYPE, 0) & 1  # bit 0: reduced copy of another page
        picture.seek(0)
        frames = pages
    if frames > 1 and picture.format != "MPO":
        raise BadImageError("animated", f"{frames} frames or pages: save the one you want as a picture")
    if picture.format == "GIF":
        raise BadImageError("format_not_supported", "GIF: convert it to PNG")


def _orientation(picture: Image.Image) -> int:
    try:
        return picture.getexif().get(0x0112, 1)
    except DECODER_ERRORS:  # a broken EXIF block says nothing about the pixels: keep them as they lie
        return 1


def _to_srgb(
    picture: Image.Image, opened: Image.Image, profile: bytes | None, backdrop: tuple[int, int, int]
) -> np.ndarray:
    """Pixels of a loaded picture as sRGB; `opened` still has the tags that turning it has dropped."""
    picture, alpha = _split_alpha(_to_8_bits(picture, opened))
    picture = _apply_profile(picture, profile) if profile else picture
    if picture.mode == "LAB":
        picture = _lab_to_srgb(picture)
    if picture.mode != "RGB":  # converting to the same mode would copy
        picture = picture.convert("RGB")
    if alpha is not None:
        darkest, lightest = alpha.getextrema()
        if lightest == 0:
            raise BadImageError("transparent", "every pixel is transparent")
        if darkest < 255:
            picture = Image.composite(picture, Image.new("RGB", picture.size, backdrop), alpha)
    return np.array(picture)  # a copy: Pillow's buffer is read-only


def _to_8_bits(picture: Image.Image, opened: Image.Image) -> Image.Image:
    """Scale deep grey to 8 bits; deep RGB has been brought to 8 bits by Pillow's own reader."""
    if picture.mode == "F":
        raise BadImageError("float_pixels", "floating-point pixels have no defined white: save it as 16-bit")
    if picture.mode == "I":
        raise BadImageError("format_not_supported", "signed or 32-bit integer pixels: save it as 16-bit")
    if not picture.mode.startswith("I;16"):
        return picture
    tags = getattr(opened, "tag_v2", {})
    bits = tags.get(BITS_PER_SAMPLE, (16,))[0]
    full = 2**bits - 1
    deep = np.asarray(picture).astype(np.uint32)
    grey = ((deep * 255 + full // 2) // full).astype(np.uint8)
    if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO:  # Pillow inverts 8-bit pictures of this kind, not 16-bit ones
        grey = 255 - grey
    result = Image.fromarray(grey)
    key = opened.info.get("transparency")
    if isinstance(key, int):
        result.putalpha(Image.fromarray(np.where(deep == key, 0, 255).astype(np.uint8)))
    return result


def _split_alpha(picture: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Colour and alpha apart, so that a colour profile sees colours only."""
    mode = picture.mode
    if mode in ("RGBa", "La"):  # premultiplied
        picture = picture.convert({"RGBa": "RGBA", "La": "LA"}[mode])
    elif mode in ("P", "PA") or "transparency" in picture.info:
        has_alpha = mode == "PA" or "transparency" in picture.info or picture.palette.mode == "RGBA"
        picture = picture.convert("RGBA" if has_alpha else "RGB")
    elif mode in ("1", "YCbCr", "HSV", "RGBX"):
        picture = picture.convert("L" if mode == "1" else "RGB")
    if picture.mode in ("RGBA", "LA"):
        return picture.convert(picture.mode[:-1]), picture.getchannel("A")
    return picture, None


def _apply_profile(picture: Image.Image, profile: bytes) -> Image.Image:
    """Colours of the embedded profile as sRGB; a profile that is broken or for another mode is ignored."""
    space, transform = _transform_to_srgb(profile)
    if transform is None:
        return picture
    if space == "RGB" and picture.mode == "L":
        picture = picture.convert("RGB")
    if picture.mode != {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}[space]:
        return picture
    return ImageCms.applyTransform(picture, transform)


@lru_cache(maxsize=32)
def _transform_to_srgb(profile: bytes) -> tuple[str, ImageCms.ImageCmsTransform | None]:
    """Colour space of a profile and its way to sRGB; None where it is sRGB already or cannot be used."""
    try:
        source = ImageCms.ImageCmsProfile(BytesIO(profile))
        space = source.profile.xcolor_space.strip()
        mode = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}.get(space)
        if mode is None:
            return space, None
        transform = ImageCms.buildTransform(
            source,
            ImageCms.createProfile("sRGB"),
            mode,
            "RGB",
            ImageCms.Intent.RELATIVE_COLORIMETRIC,
            ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return "", None
    if mode == "RGB" and _is_identity(transform):
        return space, None
    return space, transform


def _is_identity(transform: ImageCms.ImageCmsTransform) -> bool:
    """Whether a transform moves no colour of a 9x9x9 grid by more than one level: an sRGB profile."""
    steps = np.linspace(0, 255, 9).round().astype(np.uint8)
    grid = np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(27, 27, 3)
    moved = np.asarray(ImageCms.applyTransform(Image.fromarray(grid), transform))
    return int(np.abs(moved.astype(int) - grid).max()) <= 1


def _lab_to_srgb(picture: Image.Image) -> Image.Image:
    srgb, lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    return ImageCms.profileToProfile(picture, lab, srgb, outputMode="RGB")
