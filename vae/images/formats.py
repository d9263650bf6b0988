"""Checks before decoding: the format by the first bytes, and whether the file is complete."""

import importlib
import os
import re
import struct
import zlib

HEAD_BYTES = 1088  # that `sniff_format` needs
MAX_IMAGE_BYTES = 2**31 - 2**12  # of one image file: Linux reads no more at once

SIGNATURES = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
    (b"GIF8", "GIF"),
    (b"\xff\x0a", "JXL"),
    (b"\0\0\0\x0cJXL ", "JXL"),
)
EXTENSIONS_OF = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "PNG": (".png", ".apng"),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "TIFF": (".tif", ".tiff"),
    "AVIF": (".avif",),
    "GIF": (".gif",),
    "HEIF": (".heic", ".heif", ".hif"),  # .hif: cameras of Canon, Fujifilm and Sony
    "JXL": (".jxl",),
}
# Formats that need an additional package: the module with the Pillow plugin, and the package.
PLUGINS = {"HEIF": ("pillow_heif", "pillow-heif"), "JXL": ("pillow_jxl", "pillow-jxl-plugin")}
MAX_SIDE = {"jpeg": 65_500, "webp": 16_383, "png": 2**31 - 1}  # px, of the files that --format writes
# Unsupported formats that are common in image folders, so that the message can name them.
OTHER_SIGNATURES = (
    (b"%PDF", "PDF"),
    (b"8BPS", "Photoshop PSD"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"v/1\x01", "OpenEXR"),
    (b"#?RADIANCE", "Radiance HDR"),
    (b"\0\0\x01\0", "ICO"),
)
JPEG_CODINGS = {0xC3: "lossless", 0xC9: "arithmetic", 0xCA: "arithmetic"}
# Exceptions that Pillow's readers may raise on damaged content; such a file is rejected, nothing else stops.
DECODER_ERRORS = (
    OSError, SyntaxError, ValueError, EOFError, KeyError, IndexError, TypeError,
    AttributeError, OverflowError, ArithmeticError, MemoryError, RuntimeError, struct.error,
)  # fmt: skip
TRUNCATED = ("truncated", "broken data stream", "not enough", "eof")
NEXT_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # in a scan, FF 00 is data and FF D0-D7 a restart


class BadImageError(Exception):
    """An unusable image file: a short stable `reason` code, and a `detail` for people."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type["BadImageError"], tuple[str, str]]:
        return BadImageError, (self.reason, self.detail)


def check_longest_side(side: int, file_format: str) -> None:
    """BadImageError if no file of a --format can have a side of this many px."""
    if side > MAX_SIDE[file_format]:
        problem = f"a side of {side} px exceeds the limit of {file_format}, {MAX_SIDE[file_format]}"
        raise BadImageError("too_large_for_format", f"{problem}: use --format png")


def explain(error: Exception) -> BadImageError:
    """The reason for rejecting a file, from the error of a decoder."""
    text = " ".join(str(error).split()) or type(error).__name__
    truncated = any(word in text.lower() for word in TRUNCATED)
    return BadImageError("truncated" if truncated else "damaged", text)


def sniff_format(head: bytes, first_frame: bool = False) -> str:
    """Pillow's name of the format that the first HEAD_BYTES show; BadImageError for unsupported formats.

    `first_frame` also accepts image sequences.
    """
    if not head:
        raise BadImageError("empty", "the file has no bytes")
    for signature, name in SIGNATURES:
        if head.startswith(signature):
            return name
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head[4:8] == b"ftyp":
        return _sniff_ftyp(head, first_frame)
    for signature, name in OTHER_SIGNATURES:
        if head.startswith(signature):
            raise BadImageError("format_not_supported", f"{name}: convert it to PNG or JPEG")
    if b"<svg" in head[:HEAD_BYTES].lower():
        raise BadImageError("format_not_supported", "SVG: convert it to PNG or JPEG")
    if not head[:64].strip(b"\0"):
        raise BadImageError("not_an_image", "starts with zeros only")
    raise BadImageError("not_an_image", f"starts with {head[:12]!r}")


def load_plugin(kind: str) -> None:
    """Register the Pillow plugin of a format that needs one; BadImageError if it is not installed."""
    if kind not in PLUGINS:
        return
    module, package = PLUGINS[kind]
    try:
        plugin = importlib.import_module(module)
    except ImportError:
        raise BadImageError(
            "plugin_missing", f"{kind}: run pip install {package}, or convert it to PNG or JPEG"
        ) from None
    if kind == "HEIF":
        plugin.register_heif_opener()  # pillow_jxl registers itself


def extension_flag(path: str, kind: str) -> list[str]:
    """The code for an extension that is missing or does not match the format `kind`; empty if it matches."""
    extension = os.path.splitext(path)[1].lower()
    if not extension:
        return ["no_extension"]
    return [] if extension in EXTENSIONS_OF[kind] else ["wrong_extension"]


def _sniff_ftyp(head: bytes, first_frame: bool) -> str:
    """AVIF or HEIF by the brands in their common container (ISO 14496-12: major, then compatible brands)."""
    size = int.from_bytes(head[:4], "big")
    brands = head[8 : min(size, len(head))]
    if b"avis" in brands[:4] and not first_frame:
        raise BadImageError("animated", "an AVIF sequence: save one frame as an image")
    if b"avif" in brands or b"avis" in brands:
        return "AVIF"
    if any(brand in brands for brand in (b"heic", b"heix", b"hevc", b"mif1", b"msf1")):
        return "HEIF"
    raise BadImageError("not_an_image", "a video or another container")


def check_jpeg(data: bytes, flags: set[str]) -> int:
    """Read a JPEG's markers and return the offset of its end; BadImageError if truncated or unsupported.

    Finds damage that the decoder ignores: a missing end marker and a tail filled with zeros.
    """
    position = 2
    has_scan = False
    while True:
        match = NEXT_MARKER.search(data, position)
        if match is None:
            raise BadImageError("truncated", "the end marker is missing")
        marker, position = data[match.start() + 1], match.end()
        if marker == 0xD9:
            break
        if marker in (0x01, 0xD8):  # markers without a length
            continue
        if position + 3 > len(data):
            raise BadImageError("truncated", "the file ends inside a header")
        (length,) = struct.unpack(">H", data[position : position + 2])
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            _check_coding(marker, data[position + 2])
        has_scan |= marker == 0xDA
        position += length
    if not has_scan:
        raise BadImageError("truncated", "no scan before the end marker")
    if len(data) > position and "mpo" not in flags:  # an MPO contains further images after the first
        flags.add("trailing_bytes")
    return position


def plain_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of a JPEG with one frame, without EXIF, XMP and further images; else None."""
    position = 2
    size = None
    while data[position : position + 1] == b"\xff" and position + 10 <= len(data):
        marker, length = struct.unpack_from(">BH", data, position + 1)
        if marker == 0xDA:
            return size
        if marker == 0xE1 or (marker == 0xE2 and data.startswith(b"MPF", position + 4)):
            return None
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width, components = struct.unpack_from(">HHB", data, position + 5)
            is_known = marker <= 0xC2 and components in (1, 3, 4) and length == 8 + 3 * components
            if size is not None or not (is_known and width and height):
                return None
            size = width, height
        position += 2 + length
    return None


def _check_coding(marker: int, bits: int) -> None:
    if marker not in (0xC0, 0xC1, 0xC2) or bits != 8:
        coding = JPEG_CODINGS.get(marker, "hierarchical" if marker > 0xC2 else f"{bits}-bit")
        raise BadImageError("jpeg_coding_not_supported", f"{coding} JPEG: convert it to 8-bit JPEG or PNG")


def check_png(data: bytes, flags: set[str]) -> int:
    """Read a PNG's chunks and return the offset of its end; BadImageError if damaged or truncated.

    Finds a tail filled with zeros, which the decoder treats as the end.
    """
    position = 8
    while True:
        if position + 12 > len(data):
            raise BadImageError("truncated", "the end chunk is missing")
        length, kind = struct.unpack(">I4s", data[position : position + 8])
        end = position + 8 + length
        if not kind.isalpha():
            raise BadImageError("damaged", f"no chunk starts at byte {position}")
        if end + 4 > len(data):
            raise BadImageError("truncated", f"the file ends inside chunk {kind.decode()}")
        is_critical = kind[:1].isupper()  # PNG 1.2, section 3.3: required for the image
        if is_critical and zlib.crc32(data[position + 4 : end]) != struct.unpack_from(">I", data, end)[0]:
            raise BadImageError("damaged", f"wrong checksum of chunk {kind.decode()} at byte {position}")
        position = end + 4
        if kind == b"IEND":
            break
    if len(data) > position:
        flags.add("trailing_bytes")
    return position
