"""The orientation and the colour space of an image file, from its metadata.

Metadata are read from the header. Those behind the pixels of a PNG come first: `metadata_first`.
"""

import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, BinaryIO

from PIL import ExifTags, Image

from vae.images.color import PRIMARIES, SRGB_CURVE, rgb_profile
from vae.images.formats import DECODER_ERRORS, BadImageError

ORIENTATION = 0x0112  # EXIF 2.32 tags
COLOR_SPACE = 0xA001
# TIFF 6.0, section 20
WHITE_POINT, PRIMARY_CHROMATICITIES = 318, 319
EMPTY_EXIF = 20  # bytes: the marker, a TIFF header and a directory without entries
XMP_MARKER = b"http://ns.adobe.com/xap/1.0/\0"
XMP_ORIENTATION = re.compile(rb"tiff:Orientation\s*(?:=\s*[\"']|>)\s*([1-8])")
RAW_PROFILE = "raw profile type "  # of ImageMagick, with its kind in text chunks of a PNG
PIXEL_CHUNKS = (b"IDAT", b"fcTL", b"fdAT")
# DCF 2.0: the interoperability index R03 is Adobe RGB. The value 2 of ColorSpace is that of other programs.
ADOBE_RGB_EXIF = re.compile(rb"R03\0|\x01\xa0\x03\0\x01\0\0\0\x02\0|\xa0\x01\0\x03\0\0\0\x01\0\x02")
ADOBE_RGB = (0.3127, 0.3290, 0.64, 0.33, 0.21, 0.71, 0.15, 0.06)  # Adobe RGB (1998), 4.3.1; gamma 563/256
SRGB_GAMMA = 1 / 2.2
SAME_GAMMA = 0.05  # relative: as libpng's PNG_GAMMA_THRESHOLD
SAME_PRIMARIES = 0.001  # rounding of programs
# ITU-T H.273, table 3: curves that are shown as sRGB's, and those of high dynamic range
SRGB_TRANSFERS = (1, 2, 6, 11, 13, 14, 15)
HDR_TRANSFERS = {16: "PQ", 18: "HLG"}
UNSPECIFIED = 2, 2
GAMMA_TRANSFERS = {4: 2.2, 5: 2.8, 8: 1.0}


def metadata_first(file: BinaryIO, with_pixels: bool) -> tuple[bytes, bool]:
    """A PNG with its metadata before its pixels, and whether some had a wrong checksum and were left out.

    Pillow reads those behind the pixels only with them. Without pixels, one empty chunk stands for them.
    """
    metadata = [b"\x89PNG\r\n\x1a\n"]
    pixels = []
    is_damaged = False
    for kind, chunk in _png_chunks(file, skipped=() if with_pixels else PIXEL_CHUNKS):
        if kind in PIXEL_CHUNKS:
            pixels.append(chunk)
        elif kind == b"IEND":
            break
        elif zlib.crc32(chunk[4:-4]) == int.from_bytes(chunk[-4:], "big"):
            metadata.append(chunk)
        else:
            is_damaged = True
    end = [b"\0\0\0\0IEND\xaeB`\x82"]
    return b"".join(metadata + (pixels or [b"\0\0\0\0IDAT5\xaf\x06\x1e"]) + end), is_damaged


def _png_chunks(file: BinaryIO, skipped: tuple[bytes, ...]) -> Iterator[tuple[bytes, bytes]]:
    """Kind and bytes of each chunk, which are not read for those that are skipped."""
    position = 8
    while True:
        file.seek(position)
        head = file.read(8)
        if len(head) < 8:
            return
        length, kind = struct.unpack(">I4s", head)
        yield kind, b"" if kind in skipped else head + file.read(length + 4)
        position += 12 + length


def read_raw_profiles(image: Image.Image) -> None:
    """Take over EXIF, XMP and ICC profiles that a PNG has as hexadecimal text."""
    for key, text in list(image.info.items()):
        if not isinstance(key, str) or not key.lower().startswith(RAW_PROFILE) or not isinstance(text, str):
            continue
        kind = key[len(RAW_PROFILE) :].lower()
        try:
            content = bytes.fromhex("".join(text.split()[2:]))  # after a name and the length
        except ValueError:
            continue
        if kind in ("icc", "icm"):
            image.info.setdefault("icc_profile", content)
        elif kind == "xmp" or content.startswith(XMP_MARKER):
            image.info.setdefault("xmp", content.removeprefix(XMP_MARKER))
        elif kind == "exif" or content.startswith(b"Exif\0\0"):
            image.info.setdefault("exif", content)


def orientation_of(image: Image.Image, flags: set[str]) -> int:
    """Orientation of an opened image by EXIF, else XMP, 1 to 8; 1 if the metadata are broken."""
    exif: Image.Exif | None = None
    orientation: Any = 1
    with suppress(*DECODER_ERRORS):
        exif = Image.Image.getexif(image)  # that of a PNG decodes its pixels
        orientation = exif.get(ORIENTATION) or _xmp_orientation(image)
    if not exif and len(image.info.get("exif") or b"") > EMPTY_EXIF:
        flags.add("broken_exif")
    return orientation if orientation in range(2, 9) else 1


def _xmp_orientation(image: Image.Image) -> int:
    """The orientation in XMP, with either kind of quotes; Pillow reads one of them."""
    packet = image.info.get("xmp") or image.info.get("XML:com.adobe.xmp") or b""
    match = XMP_ORIENTATION.search(packet.encode() if isinstance(packet, str) else packet)
    return int(match[1]) if match else 1


def profile_of(image: Image.Image, kind: str, data: bytes) -> bytes | None:
    """The ICC profile of the colours of an opened image, whatever tells them; None for sRGB.

    BadImageError if they have a high dynamic range.
    """
    info = image.info
    cicp = _png_cicp(data) if kind == "PNG" else None
    embedded = info.get("icc_profile")
    if kind in ("AVIF", "HEIF") and not embedded:
        cicp = _nclx(data)
    if cicp not in (None, UNSPECIFIED):
        return _profile_of_codes(*cicp)
    if embedded:
        _check_range(_cicp_of_profile(embedded))
        return embedded
    if "srgb" in info:
        return None
    if "gamma" in info or "chromaticity" in info:
        return _profile_of_gamma(info.get("gamma"), info.get("chromaticity"))
    tags = getattr(image, "tag_v2", {})
    if len(primaries := tags.get(PRIMARY_CHROMATICITIES, ())) == 6:
        white = tags.get(WHITE_POINT, PRIMARIES[1][:2])
        return _profile_of_gamma(None, (*white, *primaries))
    return rgb_profile(ADOBE_RGB, (563 / 256,)) if _is_adobe_rgb(image) else None


def _is_adobe_rgb(image: Image.Image) -> bool:
    content = image.info.get("exif")
    if image.format != "TIFF" and not (content and ADOBE_RGB_EXIF.search(content)):
        return False  # reading all directories takes longer
    with suppress(*DECODER_ERRORS):
        exif = Image.Image.getexif(image)
        if exif.get_ifd(ExifTags.IFD.Exif).get(COLOR_SPACE) == 2:
            return True
        return exif.get_ifd(ExifTags.IFD.Interop).get(1) == "R03"
    return False


def _profile_of_gamma(gamma: float | None, chromaticities: tuple[float, ...] | None) -> bytes | None:
    """The profile of PNG's gAMA and cHRM; None for sRGB, or for values without a meaning."""
    values = tuple(map(float, chromaticities or PRIMARIES[1]))
    is_srgb = all(abs(a - b) < SAME_PRIMARIES for a, b in zip(values, PRIMARIES[1], strict=True))
    if is_srgb and gamma and abs(gamma / SRGB_GAMMA - 1) < SAME_GAMMA:
        return None
    return rgb_profile(values, (1 / gamma,) if gamma else SRGB_CURVE)


def _profile_of_codes(primaries: int, transfer: int) -> bytes | None:
    """The profile of code points of ITU-T H.273; None for sRGB."""
    _check_range(transfer)
    if transfer not in SRGB_TRANSFERS and transfer not in GAMMA_TRANSFERS:
        raise BadImageError("color_not_supported", f"transfer function {transfer} of H.273: save it as sRGB")
    if primaries != 2 and primaries not in PRIMARIES:
        raise BadImageError("color_not_supported", f"colour primaries {primaries} of H.273: save it as sRGB")
    gamma = GAMMA_TRANSFERS.get(transfer)
    if gamma is None and primaries in (1, 2):
        return None
    return rgb_profile(PRIMARIES.get(primaries, PRIMARIES[1]), (gamma,) if gamma else SRGB_CURVE)


def _check_range(transfer: int | None) -> None:
    if transfer in HDR_TRANSFERS:
        raise BadImageError(
            "high_dynamic_range",
            f"{HDR_TRANSFERS[transfer]} has no defined white: convert it to sRGB with a program for HDR",
        )


def _png_cicp(data: bytes) -> tuple[int, int] | None:
    """Primaries and transfer function of a PNG; the name of a profile is PQ's before there was cICP."""
    head = data[: data.find(b"IDAT")]
    if b"iCCPITUR_2100_PQ_FULL\0" in head:
        return 9, 16
    start = head.find(b"\0\0\0\4cICP")
    if start < 0 or start + 12 > len(head):
        return None
    primaries, transfer, _, is_full = head[start + 8 : start + 12]
    if not is_full:
        raise BadImageError("color_not_supported", "a PNG of narrow range: save it as sRGB")
    return primaries, transfer


def _cicp_of_profile(profile: bytes) -> int | None:
    """The transfer function in an ICC profile's tag cicp (ICC.1:2022, 9.2.17)."""
    count = int.from_bytes(profile[128:132], "big")
    for start in range(132, min(132 + 12 * count, len(profile)), 12):
        if profile[start : start + 4] == b"cicp":
            position = int.from_bytes(profile[start + 4 : start + 8], "big")
            return int.from_bytes(profile[position + 9 : position + 10], "big")
    return None


def _nclx(data: bytes) -> tuple[int, int] | None:
    """Primaries and transfer function of the primary image of AVIF or HEIF (ISO 23008-12, ISO 14496-12)."""
    with suppress(struct.error, KeyError, IndexError):
        meta = _boxes(data, *_boxes(data, 0, len(data))[b"meta"][0], skip=4)
        start, _ = meta[b"pitm"][0]
        primary = struct.unpack_from(">I" if data[start] else ">H", data, start + 4)[0]
        iprp = _boxes(data, *meta[b"iprp"][0])
        container = iprp[b"ipco"][0]
        properties = sorted((box, kind) for kind, boxes in _boxes(data, *container).items() for box in boxes)
        for ipma, _ in iprp[b"ipma"]:
            for index in _associations(data, ipma).get(primary, ()):
                (start, _), kind = properties[index - 1]
                if kind == b"colr" and data[start : start + 4] == b"nclx":
                    return struct.unpack_from(">HH", data, start + 4)
    return None


def _boxes(data: bytes, start: int, end: int, skip: int = 0) -> dict[bytes, list[tuple[int, int]]]:
    """The starts and ends of the contents of the boxes between two positions, by their kind."""
    boxes: dict[bytes, list[tuple[int, int]]] = {}
    position = start + skip
    while position + 8 <= end:
        size, kind = struct.unpack_from(">I4s", data, position)
        header = 16 if size == 1 else 8
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, position + 8)
        stop = position + size if size else end
        if stop < position + header:
            break
        boxes.setdefault(kind, []).append((position + header, min(stop, end)))
        position = stop
    return boxes


def _associations(data: bytes, start: int) -> dict[int, list[int]]:
    """The numbers of the properties of each item, from an item property association box."""
    version, is_wide = data[start], data[start + 3] & 1
    (count,) = struct.unpack_from(">I", data, start + 4)
    position = start + 8
    properties: dict[int, list[int]] = {}
    for _ in range(count):
        item, number = struct.unpack_from(">HB" if version < 1 else ">IB", data, position)
        position += 3 if version < 1 else 5
        numbers = struct.unpack_from(f">{number}{'H' if is_wide else 'B'}", data, position)
        position += number * (2 if is_wide else 1)
        properties[item] = [value & (0x7FFF if is_wide else 0x7F) for value in numbers]
    return properties
