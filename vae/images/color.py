"""Conversion of an opened image to sRGB pixels: 16 bits to 8, transparency, colour profiles.

`flags` is a set of short stable codes; each function adds the code of what it changed.
"""

import struct
from functools import lru_cache
from io import BytesIO

import numpy as np
from PIL import Image, ImageCms

from vae.images.formats import BadImageError

BITS_PER_SAMPLE, PHOTOMETRIC = 258, 262  # TIFF 6.0 tags
WHITE_IS_ZERO = 0
MODES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}  # ICC colour space: Pillow's mode
# x and y of white, red, green and blue, by the code points of ITU-T H.273, table 2
D65 = 0.3127, 0.3290
PRIMARIES: dict[int, tuple[float, ...]] = {
    1: (*D65, 0.64, 0.33, 0.30, 0.60, 0.15, 0.06),
    4: (0.310, 0.316, 0.67, 0.33, 0.21, 0.71, 0.14, 0.08),
    5: (*D65, 0.64, 0.33, 0.29, 0.60, 0.15, 0.06),
    6: (*D65, 0.630, 0.340, 0.310, 0.595, 0.155, 0.070),
    7: (*D65, 0.630, 0.340, 0.310, 0.595, 0.155, 0.070),
    8: (0.310, 0.316, 0.681, 0.319, 0.243, 0.692, 0.145, 0.049),
    9: (*D65, 0.708, 0.292, 0.170, 0.797, 0.131, 0.046),
    11: (0.314, 0.351, 0.680, 0.320, 0.265, 0.690, 0.150, 0.060),
    12: (*D65, 0.680, 0.320, 0.265, 0.690, 0.150, 0.060),
    22: (*D65, 0.630, 0.340, 0.295, 0.605, 0.155, 0.077),
}
BRADFORD = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])
D50 = np.array([0.9642, 1.0, 0.8249])  # ICC.1:2022, 6.3.4.3
SRGB_CURVE = (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)  # IEC 61966-2-1
Backdrop = tuple[int, int, int] | None  # the colour behind transparent pixels; None keeps alpha
GREY_FLAGS = {"1": "one_bit", "L": "grey", "LA": "grey", "La": "grey"}  # by Pillow's mode


def to_srgb(image: Image.Image, profile: bytes | None, backdrop: Backdrop, flags: set[str]) -> np.ndarray:
    """Convert a loaded image, whose colours `profile` defines, to the sRGB pixels of `flatten`.

    Raises BadImageError if the pixels have no defined colour.
    """
    if image.mode in GREY_FLAGS or image.mode.startswith("I"):
        flags.add(GREY_FLAGS.get(image.mode, "grey"))
    image, alpha = _split_alpha(_to_8_bits(image, flags))
    if image.mode == "CMYK" and not profile:
        flags.add("cmyk_without_profile")
    if profile:
        image = apply_profile(image, profile, flags)
    if image.mode == "LAB":
        image = _lab_to_srgb(image)
    if image.mode != "RGB":  # converting to the same mode would copy the pixels
        image = image.convert("RGB")
    return flatten(image, alpha, backdrop, flags)


def flatten(image: Image.Image, alpha: Image.Image | None, backdrop: Backdrop, flags: set[str]) -> np.ndarray:
    """The pixels of an RGB image over a backdrop, uint8 (H, W, 3); without one (H, W, 4) if it has alpha."""
    if alpha is not None:
        opacity = np.asarray(alpha)
        if not opacity.any():
            raise BadImageError("transparent", "every pixel is transparent")
        if backdrop is None:
            return np.dstack([np.asarray(image), opacity])
        if opacity.min() < 255:
            image = Image.composite(image, Image.new("RGB", image.size, backdrop), alpha)
            flags.add("alpha_flattened")
    return np.array(image)  # a copy: Pillow's buffer is read-only


def _to_8_bits(image: Image.Image, flags: set[str]) -> Image.Image:
    """Scale 16-bit grey to 8 bits; Pillow's reader has already scaled 16-bit RGB."""
    if image.mode == "I":
        raise BadImageError("format_not_supported", "signed or 32-bit integer pixels: save it as 16-bit")
    if not image.mode.startswith("I;16"):
        return image
    flags.add("scaled_to_8_bits")
    tags = getattr(image, "tag_v2", {})
    bits = tags.get(BITS_PER_SAMPLE, (16,))[0]
    full = 2**bits - 1
    deep = np.asarray(image).astype(np.uint32)
    grey = ((deep * 255 + full // 2) // full).astype(np.uint8)
    if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO:  # Pillow inverts such 8-bit images, not 16-bit ones
        grey = 255 - grey
    result = Image.fromarray(grey)
    key = image.info.get("transparency")
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


@lru_cache(maxsize=32)
def rgb_profile(chromaticities: tuple[float, ...], curve: tuple[float, ...]) -> bytes | None:
    """An ICC profile of x and y of white, red, green, blue, and a curve: a gamma, or SRGB_CURVE.

    None if the values have no meaning.
    """
    try:
        with np.errstate(all="raise"):
            x, y = np.array(chromaticities, dtype=float).reshape(4, 2).T
            xyz = np.stack([x / y, np.ones(4), (1 - x - y) / y])  # (XYZ, white and primaries)
            white, primaries = xyz[:, 0], xyz[:, 1:]
            adapted = np.linalg.inv(BRADFORD) @ np.diag(BRADFORD @ D50 / (BRADFORD @ white)) @ BRADFORD
            columns = (adapted @ primaries * np.linalg.solve(primaries, white)).T
        numbers = [struct.pack(">3i", *(column * 65536).round().astype(int)) for column in (D50, *columns)]
        kind = 0 if len(curve) == 1 else 3  # ICC.1:2022, 10.18
        body = struct.pack(f">H2x{len(curve)}i", kind, *(round(value * 65536) for value in curve))
    except (np.linalg.LinAlgError, ValueError, OverflowError, struct.error, FloatingPointError):
        return None
    tags = [(b"XYZ ", number) for number in numbers] + [(b"para", body)] * 3
    names = (b"wtpt", b"rXYZ", b"gXYZ", b"bXYZ", b"rTRC", b"gTRC", b"bTRC")
    table = struct.pack(">I", len(tags))
    content = b""
    for name, (kind_of_tag, value) in zip(names, tags, strict=True):
        element = kind_of_tag + bytes(4) + value
        table += name + struct.pack(">II", 132 + 12 * len(tags) + len(content), len(element))
        content += element
    header = bytes(4) + bytes(4) + b"\x04\x20\0\0mntrRGB XYZ " + bytes(12) + b"acsp" + bytes(28)
    header += struct.pack(">3i", *(D50 * 65536).round().astype(int)) + bytes(48)
    profile = header + table + content
    return struct.pack(">I", len(profile)) + profile[4:]


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
