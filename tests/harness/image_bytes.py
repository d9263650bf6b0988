"""Image files and ICC profiles built byte by byte, and pixels to write into them."""

import struct
import zlib

import numpy as np


def smooth(height: int = 40, width: int = 56) -> np.ndarray:
    """Pixels of a smooth image, which lossy formats change by a few levels at most."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([x * 4, y * 5, 255 - x * 2 - y * 2], axis=-1).clip(0, 255).astype(np.uint8)


def png_chunk(kind: bytes, body: bytes) -> bytes:
    """A chunk of a PNG file."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, depth: int, color_type: int, raw: bytes, extra: bytes = b"") -> bytes:
    """A PNG from filtered scanlines `raw`; `extra`: chunks between the header and the data."""

    header = struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + extra
        + png_chunk(b"IDAT", zlib.compress(raw))
        + png_chunk(b"IEND", b"")
    )


def icc(color_space: bytes, tags: dict[bytes, bytes]) -> bytes:
    """An ICC profile (v2) of a colour space with these tags."""
    table, bodies, offset = b"", b"", 128 + 4 + 12 * len(tags)
    for name, body in tags.items():
        body += b"\0" * (-len(body) % 4)
        table += name + struct.pack(">II", offset + len(bodies), len(body))
        bodies += body
    lab = color_space == b"CMYK"
    header = bytearray(128)
    header[8:12] = b"\x02\x40\0\0"
    header[12:24] = (b"prtr" if lab else b"mntr") + color_space + (b"Lab " if lab else b"XYZ ")
    header[36:40] = b"acsp"
    header[68:80] = struct.pack(">iii", 0xF6D6, 0x10000, 0xD32D)  # the D50 white of the profile space
    profile = bytes(header) + struct.pack(">I", len(tags)) + table + bodies
    return struct.pack(">I", len(profile)) + profile[4:]


ADOBE_RGB_TO_XYZ_D50 = np.array(  # Adobe RGB (1998), annex: adapted to D50
    [[0.60974, 0.20528, 0.14919], [0.31111, 0.62567, 0.06322], [0.01947, 0.06087, 0.74457]]
)
SRGB_TO_XYZ_D50 = np.array(  # IEC 61966-2-1, Bradford-adapted
    [[0.43607, 0.38515, 0.14307], [0.22249, 0.71687, 0.06061], [0.01392, 0.09708, 0.71410]]
)
TEXT_TAG = b"text\0\0\0\0test\0"


def adobe_rgb_profile() -> bytes:
    """Adobe RGB (1998): a matrix profile of a wide gamut."""

    def xyz(column: int) -> bytes:
        return b"XYZ \0\0\0\0" + struct.pack(
            ">iii", *(round(v * 65536) for v in ADOBE_RGB_TO_XYZ_D50[:, column])
        )

    curve = b"curv\0\0\0\0" + struct.pack(">IH", 1, 563)  # gamma 563/256
    white = b"XYZ \0\0\0\0" + struct.pack(">iii", 0xF6D6, 0x10000, 0xD32D)
    tags = {b"cprt": TEXT_TAG, b"wtpt": white, b"rXYZ": xyz(0), b"gXYZ": xyz(1), b"bXYZ": xyz(2)}
    return icc(b"RGB ", tags | {b"rTRC": curve, b"gTRC": curve, b"bTRC": curve})


def cmyk_profile() -> bytes:
    """An invented press: cyan prints mid-grey and the other inks nothing, so no guess gives its colours."""
    identity = bytes(range(256))
    nodes = b"".join(
        bytes([round((54 if cyan else 100) * 2.55), 128, 128]) for cyan in (0, 1) for _ in range(8)
    )
    matrix = struct.pack(">9i", 65536, 0, 0, 0, 65536, 0, 0, 0, 65536)
    lut = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + matrix + identity * 4 + nodes + identity * 3
    white = b"XYZ \0\0\0\0" + struct.pack(">iii", 0xF6D6, 0x10000, 0xD32D)
    return icc(b"CMYK", {b"cprt": TEXT_TAG, b"wtpt": white, b"A2B0": lut, b"A2B1": lut})
