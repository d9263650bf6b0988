"""Decoding by libvips, if pyvips is installed, of files that Pillow cannot decode, or decodes wrongly."""

import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from vae.images.color import BITS_PER_SAMPLE, PHOTOMETRIC, WHITE_IS_ZERO, transform_to_srgb
from vae.images.formats import DECODER_ERRORS, BadImageError

# TIFF 6.0 tags and their values
SAMPLES_PER_PIXEL, PLANAR_CONFIGURATION, EXTRA_SAMPLES, SAMPLE_FORMAT = 277, 284, 338, 339
SEPARATE_PLANES, SIGNED, FLOAT = 2, 2, 3
ALPHA = 1, 2  # associated or not; other samples are not part of the picture
COLOR_BANDS = {0: 1, 1: 1, 2: 3, 5: 4, 8: 3}  # by PhotometricInterpretation
LAB_PHOTOMETRICS = 8, 9
BIG_TIFF = 43

LOADERS = {"JPEG": "jpegload_buffer", "PNG": "pngload_buffer", "TIFF": "tiffload_buffer"}
COLORS = {"uchar": "srgb", "ushort": "rgb16"}  # by the format of a band
GREYS = {"uchar": "b-w", "ushort": "grey16"}
INKS = "cmyk"
LAB = ("lab", "labs")
SPACES = {*LAB, INKS, *COLORS.values(), *GREYS.values()}
# libvips' TIFF reader reports these problems about complete files.
NOT_SUPPORTED = ("not configured", "not supported", "unsupported", "not a whole number", "out of range")


@cache
def load() -> Any:
    """The module pyvips, without a cache of its own; None if it cannot be imported here."""
    try:
        import pyvips
    except (ImportError, OSError):  # cffi without its library
        return None
    pyvips.cache_set_max(0)
    return pyvips


def open_image(data: bytes, kind: str) -> Any:
    """The file as an image of libvips, whose pixels are not decoded yet; None if only Pillow can tell."""
    pyvips = load()
    if pyvips is None or kind not in LOADERS:
        return None
    tags = _tiff_tags(data) if kind == "TIFF" else {}
    check_tiff(tags)
    try:
        image = getattr(pyvips.Image, LOADERS[kind])(data, fail_on="warning")
    except pyvips.Error as error:
        _check_supported(error)
        return None
    color_bands = COLOR_BANDS.get(tags.get(PHOTOMETRIC, -1))
    has_alpha = tags.get(EXTRA_SAMPLES, ALPHA)[0] in ALPHA
    return image if has_alpha or color_bands is None else image[:color_bands]


def check_tiff(tags: Mapping[int, Any]) -> None:
    """BadImageError for kinds of TIFF, by their tags, that neither Pillow nor libvips decodes right."""
    formats = tags.get(SAMPLE_FORMAT, ())
    is_planar = tags.get(PLANAR_CONFIGURATION) == SEPARATE_PLANES
    is_half = FLOAT in formats and 16 in tags.get(BITS_PER_SAMPLE, ())
    if SIGNED in formats and tags.get(PHOTOMETRIC) not in LAB_PHOTOMETRICS:
        raise BadImageError("format_not_supported", "signed pixels: save it as 8-bit or 16-bit")
    if (
        (is_planar and (is_half or tags.get(SAMPLES_PER_PIXEL) == 2))
        or (FLOAT in formats and tags.get(PHOTOMETRIC) == WHITE_IS_ZERO)
    ):  # fmt: skip
        raise BadImageError("format_not_supported", "an unusual order of samples: save it as 8-bit or 16-bit")


def _tiff_tags(data: bytes) -> Mapping[int, Any]:
    """The tags of the first page, whatever its pixels are."""
    is_big = BIG_TIFF in data[2:4]
    file = BytesIO(data)
    with suppress(*DECODER_ERRORS), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tags = ImageFileDirectory_v2(file.read(16 if is_big else 8))
        file.seek(tags.next)
        tags.load(file)
        return tags
    return {}


def _check_supported(error: Exception) -> None:
    if any(text in str(error) for text in NOT_SUPPORTED):
        raise BadImageError(
            "format_not_supported", "bits or a compression that cannot be read: save it as 8-bit or 16-bit"
        ) from error


def orientation_and_size(vips_image: Any) -> tuple[int, tuple[int, int]]:
    """EXIF orientation of an image, and width and height after it is turned."""
    orientation = vips_image.get("orientation") if vips_image.get_typeof("orientation") else 1
    size = vips_image.width, vips_image.height
    return (
        (orientation, size[::-1] if orientation >= 5 else size) if orientation in range(2, 9) else (1, size)
    )


def count_pages(vips_image: Any) -> int:
    """Number of frames or pages of a file."""
    return vips_image.get("n-pages") if vips_image.get_typeof("n-pages") else 1


def decode(vips_image: Any, profile: bytes | None, flags: set[str]) -> tuple[Image.Image, Image.Image | None]:
    """Colours in sRGB and opacity of an image, not yet upright. `profile`: None for the embedded one.

    Raises BadImageError if pixels have no defined colour, and the errors of libvips.
    """
    pyvips = load()
    flags.add("read_by_libvips")
    if profile is None and vips_image.get_typeof("icc-profile-data"):
        profile = vips_image.get("icc-profile-data")
    try:
        return _decode(pyvips, vips_image, profile, flags)
    except pyvips.Error as error:
        _check_supported(error)
        raise OSError(error.detail or error.message) from error


def _decode(
    pyvips: Any, image: Any, profile: bytes | None, flags: set[str]
) -> tuple[Image.Image, Image.Image | None]:
    space = image.interpretation
    if image.format == "float" and space not in LAB:
        image = _scaled(pyvips, image)
    elif space not in SPACES or (image.format not in COLORS and space not in LAB):
        raise BadImageError(
            "format_not_supported", f"{image.format} pixels of {space}: save it as 8-bit or 16-bit RGB"
        )
    if image.format != "uchar":
        flags.add("scaled_to_8_bits")
    colors = 4 if space == INKS else 1 if image.bands < 3 else 3
    alpha = image[colors] if image.bands > colors else None
    image = image[:colors] if image.bands > colors else image
    if space not in (*LAB, INKS):
        image = image.copy(interpretation=(GREYS if colors == 1 else COLORS)[image.format])
        flags |= {"grey"} if colors == 1 else set()
    if space == INKS and not profile:
        flags.add("cmyk_without_profile")
    opacity = None if alpha is None else Image.fromarray(_to_8_bits(alpha)[..., 0])
    return _to_srgb(pyvips, image, profile, flags), opacity


def _scaled(pyvips: Any, image: Any) -> Any:
    """Floating-point pixels from 0 to 1, in 16 bits; BadImageError for another range."""
    values = image.numpy()
    if not (values.min() >= 0 and values.max() <= 1):  # also of NaN
        raise BadImageError("float_pixels", "floating-point pixels beyond 0 to 1 have no defined white")
    deep = np.ascontiguousarray((values * 65535 + 0.5).astype(np.uint16)).reshape(
        image.height, image.width, image.bands
    )
    return pyvips.Image.new_from_array(deep)


def _to_srgb(pyvips: Any, image: Any, profile: bytes | None, flags: set[str]) -> Image.Image:
    if image.interpretation in LAB:
        return Image.fromarray(image.colourspace("srgb").cast("uchar").numpy())
    space, transform = transform_to_srgb(profile) if profile else ("", None)
    if transform is not None:
        if space == "RGB" and image.bands == 1:
            image = image.bandjoin([image, image]).copy(interpretation=COLORS[image.format])
        image = image.copy()
        image.set_type(pyvips.GValue.blob_type, "icc-profile-data", profile)
        try:
            options = {"embedded": True, "intent": "relative", "black_point_compensation": True, "depth": 8}
            converted = image.icc_transform("srgb", **options)
            flags.add("profile_converted")
            return Image.fromarray(converted.numpy())
        except pyvips.Error:  # of another colour space
            flags.add("broken_profile")
    elif profile and not space:
        flags.add("broken_profile")
    pixels = _to_8_bits(image)
    if image.bands == 1:
        return Image.fromarray(pixels[..., 0]).convert("RGB")
    return Image.fromarray(pixels, "CMYK" if image.bands == 4 else "RGB").convert("RGB")


def _to_8_bits(image: Any) -> np.ndarray:
    """Pixels (H, W, bands) of 8 or 16 bits, in 8 bits."""
    pixels = image.numpy().reshape(image.height, image.width, image.bands)
    if pixels.dtype == np.uint8:
        return pixels
    return ((pixels.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8)
