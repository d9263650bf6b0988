"""What a file is by its first bytes, and whether it is whole: checks made before anything is decoded."""

import mmap
import re
import struct
import zlib

# libjpeg's own progressive script has 10 scans; a file with thousands was made to be slow.
MAX_JPEG_SCANS = 500

SIGNATURES = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
    (b"GIF8", "GIF"),
)
# Formats people do have in their folders, so that the message can name them.
OTHER_SIGNATURES = (
    (b"%PDF", "PDF"),
    (b"8BPS", "Photoshop PSD"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\0\0\0\x0cJXL ", "JPEG XL"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"v/1\x01", "OpenEXR"),
    (b"#?RADIANCE", "Radiance HDR"),
    (b"\0\0\x01\0", "ICO"),
)
JPEG_CODINGS = {0xC3: "lossless", 0xC9: "arithmetic", 0xCA: "arithmetic"}
NEXT_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # inside a scan, FF 00 is data and FF D0-D7 a restart


class BadImageError(Exception):
    """A picture that cannot be used: a short stable `reason` code and a `detail` for people."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    def __reduce__(self):
        return BadImageError, (self.reason, self.detail)


def sniff_format(file, max_pixels: int) -> str:
    """Pillow's name of the format a file's first bytes announce; raises BadImageError for all others."""
    file.seek(0)
    head = file.read(64)
    if not head:
        raise BadImageError("empty", "the file has no bytes")
    for signature, name in SIGNATURES:
        if head.startswith(signature):
            return name
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        _check_webp_canvas(head, max_pixels)
        return "WEBP"
    if head[4:8] == b"ftyp":
        return _sniff_ftyp(head)
    for signature, name in OTHER_SIGNATURES:
        if head.startswith(signature):
            raise BadImageError("format_not_supported", f"{name}: convert it to PNG or JPEG")
    if b"<svg" in (head + file.read(1024)).lower():
        raise BadImageError("format_not_supported", "SVG: convert it to PNG or JPEG")
    if not head.strip(b"\0"):
        raise BadImageError("not_an_image", "begins with zeros only")
    raise BadImageError("not_an_image", f"begins with {head[:12]!r}")


def _check_webp_canvas(head: bytes, max_pixels: int) -> None:
    """The WebP reader allocates its canvas on opening, so an extended header is judged before."""
    if head[12:16] == b"VP8X" and len(head) >= 30:
        width = int.from_bytes(head[24:27], "little") + 1
        height = int.from_bytes(head[27:30], "little") + 1
        if width * height > max_pixels:
            raise BadImageError("too_many_pixels", f"{width}x{height}, more than --max_pixels {max_pixels}")


def _sniff_ftyp(head: bytes) -> str:
    """AVIF among the formats that share its container (ISO 14496-12: major brand, then compatible ones)."""
    size = int.from_bytes(head[:4], "big")
    brands = head[8 : min(size, len(head))]
    if b"avis" in brands[:4]:
        raise BadImageError("animated", "an AVIF sequence: save the frame you want as a picture")
    if b"avif" in brands:
        return "AVIF"
    if any(brand in brands for brand in (b"heic", b"heix", b"hevc", b"mif1", b"msf1")):
        raise BadImageError("format_not_supported", "HEIC: convert it to PNG or JPEG")
    raise BadImageError("not_an_image", "a video or another container")


def check_jpeg(file) -> None:
    """Walk a JPEG's markers to its end; raises BadImageError when it is torn or coded in an unusual way.

    Catches what the decoder forgives: a missing end marker and a tail filled with zeros.
    """
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        position, scans = 2, 0
        while True:
            found = NEXT_MARKER.search(data, position)
            if found is None:
                raise BadImageError("truncated", "the end marker is missing")
            marker, position = data[found.start() + 1], found.end()
            if marker == 0xD9:
                break
            if marker in (0x01, 0xD8):  # markers without a length
                continue
            if position + 2 > len(data):
                raise BadImageError("truncated", "the file ends inside a header")
            (length,) = struct.unpack(">H", data[position : position + 2])
            if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
                _check_coding(marker, data[position + 2])
            scans += marker == 0xDA
            if scans > MAX_JPEG_SCANS:
                raise BadImageError("too_many_scans", f"more than {MAX_JPEG_SCANS} scans in one JPEG")
            position += length
        if scans == 0:
            raise BadImageError("truncated", "no picture before the end marker")


def _check_coding(marker: int, bits: int) -> None:
    if marker not in (0xC0, 0xC1, 0xC2) or bits != 8:
        coding = JPEG_CODINGS.get(marker, "hierarchical" if marker > 0xC2 else f"{bits}-bit")
        raise BadImageError("format_not_supported", f"{coding} JPEG: convert it to PNG or 8-bit JPEG")


def check_png(file) -> None:
    """Walk a PNG's chunks to its end; raises BadImageError for a missing end or a wrong checksum.

    Catches a tail filled with zeros, which the decoder takes for the end.
    """
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        position = 8
        while True:
            if position + 12 > len(data):
                raise BadImageError("truncated", "the end chunk is missing")
            length, kind = struct.unpack(">I4s", data[position : position + 8])
            end = position + 8 + length
            if not kind.isalpha():
                raise BadImageError("damaged", f"no chunk begins at byte {position}")
            if end + 4 > len(data):
                raise BadImageError("truncated", f"the file ends inside chunk {kind.decode()}")
            is_critical = kind[:1].isupper()  # PNG 1.2, section 3.3: the picture needs these
            if is_critical and zlib.crc32(data[position + 4 : end]) != struct.unpack_from(">I", data, end)[0]:
                raise BadImageError("damaged", f"wrong checksum of chunk {kind.decode()} at byte {position}")
            if kind == b"IEND":
                return
            position = end + 4
