"""Pixels of an opened image as sRGB: 16 bits to 8, transparency, colour profiles.

What was done is noted in `flags`, a set of short stable codes.
"""

from functools import lru_cache
from io import BytesIO

import numpy as np
from PIL import Image, ImageCms

from vae.data.formats import BadImageError

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
    """Pixels of a loaded image as sRGB, uint8 (H, W, 3).

    `opened` still has the tags that turning it has dropped. Raises BadImageError for pixels without meaning.
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
    if image.mode != "RGB":  # converting to the same mode would copy
        image = image.convert("RGB")
    if alpha is not None:
        darkest, lightest = alpha.getextrema()
        if lightest == 0:
            raise BadImageError("transparent", "every pixel is transparent")
        if darkest < 255:
            image = Image.composite(image, Image.new("RGB", image.size, backdrop), alpha)
            flags.add("alpha_flattened")
    return np.array(image)  # a copy: Pillow's buffer is read-only


def _to_8_bits(image: Image.Image, opened: Image.Image, flags: set[str]) -> Image.Image:
    """Scale deep grey to 8 bits; deep RGB has been brought to 8 bits by Pillow's own reader."""
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
    if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO:  # Pillow inverts 8-bit images of this kind, not 16-bit ones
        grey = 255 - grey
    result = Image.fromarray(grey)
    key = opened.info.get("transparency")
    if isinstance(key, int):
        result.putalpha(Image.fromarray(np.where(deep == key, 0, 255).astype(np.uint8)))
    return result


def _split_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Colour and alpha apart, so that a colour profile sees colours only."""
    mode = image.mode
    if mode in ("RGBa", "La"):  # premultiplied
        image = image.convert({"RGBa": "RGBA", "La": "LA"}[mode])
    elif mode in ("P", "PA") or "transparency" in image.info:
        has_alpha = mode == "PA" or "transparency" in image.info or image.palette.mode == "RGBA"
        image = image.convert("RGBA" if has_alpha else "RGB")
    elif mode in ("1", "YCbCr", "HSV", "RGBX"):
        image = image.convert("L" if mode == "1" else "RGB")
    if image.mode in ("RGBA", "LA"):
        return image.convert(image.mode[:-1]), image.getchannel("A")
    return image, None


def apply_profile(image: Image.Image, profile: bytes, flags: set[str]) -> Image.Image:
    """Colours of the embedded profile as sRGB; a profile that is broken or for another mode is ignored."""
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
    return ImageCms.applyTransform(image, transform)


@lru_cache(maxsize=32)
def transform_to_srgb(profile: bytes) -> tuple[str, ImageCms.ImageCmsTransform | None]:
    """Colour space of a profile and its way to sRGB; None where it is sRGB already or cannot be used."""
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
    """Whether a transform moves no colour of a 9x9x9 grid by more than one level: an sRGB profile."""
    steps = np.linspace(0, 255, 9).round().astype(np.uint8)
    grid = np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(27, 27, 3)
    moved = np.asarray(ImageCms.applyTransform(Image.fromarray(grid), transform))
    return int(np.abs(moved.astype(int) - grid).max()) <= 1


def _lab_to_srgb(image: Image.Image) -> Image.Image:
    srgb, lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    return ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB")
