"""Conversion of an opened image to sRGB pixels: 16 bits to 8, transparency, colour profiles.

`flags` is a set of short stable codes; each function adds the code of what it changed.
"""

from functools import lru_cache
from io import BytesIO

import numpy as np
from PIL import Image, ImageCms

from vae.images.formats import BadImageError

BITS_PER_SAMPLE, PHOTOMETRIC = 258, 262  # TIFF 6.0 tags
WHITE_IS_ZERO = 0
MODES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}  # ICC colour space: Pillow's mode
GREY_FLAGS = {"1": "one_bit", "L": "grey", "LA": "grey", "La": "grey"}  # by Pillow's mode


def to_srgb(
    image: Image.Image,
    opened: Image.Image,
    profile: bytes | None,
    backdrop: tuple[int, int, int],
    flags: set[str],
) -> np.ndarray:
    """Convert a loaded image to sRGB pixels, uint8 (H, W, 3).

    `opened` is the image before its EXIF rotation, which removes the tags. Raises BadImageError if the pixels
    have no defined colour.
    """
    if opened.mode in GREY_FLAGS or opened.mode.startswith("I"):
        flags.add(GREY_FLAGS.get(opened.mode, "grey"))
    image, alpha = _split_alpha(_to_8_bits(image, opened, flags))
    if image.mode == "CMYK" and not profile:
        flags.add("cmyk_without_profile")
    if profile:
        image = apply_profile(image, profile, flags)
    if image.mode == "LAB":
        image = _lab_to_srgb(image)
    if image.mode != "RGB":  # converting to the same mode would copy the pixels
        image = image.convert("RGB")
    if alpha is not None:
        opacity = np.asarray(alpha)
        if not opacity.any():
            raise BadImageError("transparent", "every pixel is transparent")
        if opacity.min() < 255:
            image = Image.composite(image, Image.new("RGB", image.size, backdrop), alpha)
            flags.add("alpha_flattened")
    return np.array(image)  # a copy: Pillow's buffer is read-only


def _to_8_bits(image: Image.Image, opened: Image.Image, flags: set[str]) -> Image.Image:
    """Scale 16-bit grey to 8 bits; Pillow's reader has already scaled 16-bit RGB."""
    if image.mode == "F":
        raise BadImageError("float_pixels", "floating-point pixels have no defined white: save it as 16-bit")
    if image.mode == "I":
        raise BadImageError("format_not_supported", "signed or 32-bit integer pixels: save it as 16-bit")
    if not image.mode.startswith("I;16"):
        return image
    flags.add("scaled_to_8_bits")
    tags = getattr(opened, "tag_v2", {})
    bits = tags.get(BITS_PER_SAMPLE, (16,))[0]
    full = 2**bits - 1
    deep = np.asarray(image).astype(np.uint32)
    grey = ((deep * 255 + full // 2) // full).astype(np.uint8)
    if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO:  # Pillow inverts such 8-bit images, not 16-bit ones
        grey = 255 - grey
    result = Image.fromarray(grey)
    key = opened.info.get("transparency")
    if isinstance(key, int):
        result.putalpha(Image.fromarray(np.where(deep == key, 0, 255).astype(np.uint8)))
    return result


def _split_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Separate colour and alpha, because a colour profile applies to colours only."""
    mode = image.mode
    if mode in ("RGBa", "La"):  # premultiplied
        image = image.convert({"RGBa": "RGBA", "La": "LA"}[mode])
    elif mode in ("P", "PA") or "transparency" in image.info:
        palette_mode = image.palette.mode if image.palette else None
        has_alpha = mode == "PA" or "transparency" in image.info or palette_mode == "RGBA"
        image = image.convert("RGBA" if has_alpha else "RGB")
    elif mode in ("1", "YCbCr", "HSV", "RGBX"):
        image = image.convert("L" if mode == "1" else "RGB")
    if image.mode in ("RGBA", "LA"):
        return image.convert(image.mode[:-1]), image.getchannel("A")
    return image, None


def apply_profile(image: Image.Image, profile: bytes, flags: set[str]) -> Image.Image:
    """Convert colours by the embedded profile; a broken profile, or one of another mode, is ignored."""
    space, transform = transform_to_srgb(profile)
    if transform is None:
        flags |= set() if space in MODES else {"broken_profile"}
        return image
    if space == "RGB" and image.mode == "L":
        image = image.convert("RGB")
    if image.mode != MODES[space]:
        flags.add("broken_profile")
        return image
    flags.add("profile_converted")
    converted = ImageCms.applyTransform(image, transform)
    assert converted is not None  # only with inPlace=True
    return converted


@lru_cache(maxsize=32)
def transform_to_srgb(profile: bytes) -> tuple[str, ImageCms.ImageCmsTransform | None]:
    """Colour space of a profile and its transform to sRGB; None if it is sRGB already or unusable."""
    try:
        source = ImageCms.ImageCmsProfile(BytesIO(profile))
        space = source.profile.xcolor_space.strip()
        mode = MODES.get(space)
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
    """Whether a transform changes each colour of a 9x9x9 grid by at most one level: an sRGB profile."""
    steps = np.linspace(0, 255, 9).round().astype(np.uint8)
    grid = np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(27, 27, 3)
    converted = np.asarray(ImageCms.applyTransform(Image.fromarray(grid), transform))
    return int(np.abs(converted.astype(int) - grid).max()) <= 1


def _lab_to_srgb(image: Image.Image) -> Image.Image:
    srgb, lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    converted = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB")
    assert converted is not None  # only with inPlace=True
    return converted
