"""Files as scanners, cameras and other programs write them: their pixels, and which way is up."""

import struct
import zlib
from functools import partial

import numpy as np
import pytest
from PIL import Image

from tests.harness.image_kinds import detailed, encoded, png
from vae.images.decoding import check_header, read_image_bytes, upright_size
from vae.images.formats import BadImageError

pyvips = pytest.importorskip("pyvips")

WIDTH, HEIGHT = 48, 32
SIDES = np.mgrid[0:HEIGHT, 0:WIDTH]
RGB = np.stack([SIDES[1] * 5, SIDES[0] * 7, SIDES.sum(0) * 3], -1).astype(np.uint8)
GREY = RGB[..., 0]
PATCHES = np.array([(220, 40, 40), (40, 200, 60), (128, 128, 128), (240, 240, 240)], dtype=np.uint8)
PATCHES = PATCHES.reshape(2, 2, 3).repeat(16, 0).repeat(16, 1)
# Linear RGB to XYZ with white D65, from the primaries of each colour space
TO_XYZ = {
    "srgb": [0.41239, 0.35758, 0.18048, 0.212639, 0.7151687, 0.0721923, 0.0193308, 0.1191948, 0.9505322],
    "p3": [0.4865709, 0.2656677, 0.1982173, 0.2289746, 0.6917385, 0.0792869, 0.0, 0.0451134, 1.0439444],
    "2020": [0.636958, 0.1446169, 0.168881, 0.2627002, 0.6779981, 0.0593017, 0.0, 0.0280727, 1.0609851],
    "adobe": [0.57673, 0.18555, 0.18819, 0.2973769, 0.6273491, 0.0752741, 0.0270343, 0.0706872, 0.9911085],
}  # fmt: skip


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def deep_png(values: np.ndarray, extra: bytes = b"") -> bytes:
    """A PNG of 16 bits from values in [0, 1], (H, W, 3)."""
    rows = b"".join(b"\0" + row.tobytes() for row in (values * 65535).round().astype(">u2"))
    return png(values.shape[1], values.shape[0], 16, 2, rows, extra=extra)


def linear(pixels: np.ndarray) -> np.ndarray:
    values = pixels / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def in_space(space: str) -> np.ndarray:
    """The patches as linear values of another colour space."""
    own, srgb = (np.reshape(TO_XYZ[name], (3, 3)) for name in (space, "srgb"))
    return linear(PATCHES) @ (np.linalg.inv(own) @ srgb).T


def srgb_curve(values: np.ndarray) -> np.ndarray:
    return np.where(values <= 0.0031308, 12.92 * values, 1.055 * values.clip(0) ** (1 / 2.4) - 0.055)


def exif(*entries: tuple[int, int, int, bytes], interoperability: bool = False) -> bytes:
    """EXIF with a directory of entries (tag, type, count, value) that the first one points to."""
    content = b"II*\0\x08\0\0\0" + struct.pack("<HHHIII", 1, 0x8769, 4, 1, 26, 0)
    content += struct.pack("<H", len(entries))
    for tag, kind, count, value in entries:
        content += struct.pack("<HHI", tag, kind, count) + value.ljust(4, b"\0")
    content += bytes(4)
    if interoperability:
        content += struct.pack("<HHHI4sI", 1, 1, 2, 4, b"R03\0", 0)
    return b"Exif\0\0" + content


def adobe_rgb_jpeg(with_interoperability: bool) -> bytes:
    pixels = (in_space("adobe").clip(0, 1) ** (256 / 563) * 255).round().astype(np.uint8)
    if with_interoperability:
        offset = struct.pack("<I", 26 + 2 + 24 + 4)
        block = exif((0xA001, 3, 1, b"\xff\xff"), (0xA005, 4, 1, offset), interoperability=True)
    else:
        block = exif((0xA001, 3, 1, b"\x02\0"))
    return encoded(Image.fromarray(pixels), "JPEG", quality=100, subsampling=0, exif=block)


def colored_avif(primaries: int, transfer: int, values: np.ndarray) -> bytes:
    whole = encoded(
        Image.fromarray((values * 255).round().astype(np.uint8)), "AVIF", quality=100, subsampling="4:4:4"
    )
    at = whole.index(b"colrnclx") + 8
    return whole[:at] + struct.pack(">HH", primaries, transfer) + whole[at + 4 :]


def cicp(primaries: int, transfer: int) -> bytes:
    return chunk(b"cICP", bytes([primaries, transfer, 0, 1]))


def chromaticities(*values: float) -> bytes:
    return chunk(b"cHRM", struct.pack(">8I", *(round(value * 100_000) for value in values)))


COLORS = {
    "cICP of sRGB": deep_png(PATCHES / 255, cicp(1, 13)),
    "cICP of Display P3": deep_png(srgb_curve(in_space("p3")).clip(0, 1), cicp(12, 13)),
    "cICP linear": deep_png(linear(PATCHES), cicp(1, 8)),
    "cICP beats gAMA": deep_png(PATCHES / 255, cicp(1, 13) + chunk(b"gAMA", struct.pack(">I", 100_000))),
    "gAMA linear": deep_png(linear(PATCHES), chunk(b"gAMA", struct.pack(">I", 100_000))),
    "gAMA 1.8": deep_png(linear(PATCHES) ** (1 / 1.8), chunk(b"gAMA", struct.pack(">I", 55_556))),
    "gAMA of sRGB": deep_png(PATCHES / 255, chunk(b"gAMA", struct.pack(">I", 45_455))),
    "sRGB beats gAMA": deep_png(
        PATCHES / 255, chunk(b"sRGB", b"\0") + chunk(b"gAMA", struct.pack(">I", 100_000))
    ),
    "gAMA and cHRM": deep_png(
        in_space("adobe").clip(0, 1) ** (256 / 563),
        chunk(b"gAMA", struct.pack(">I", 45_471))
        + chromaticities(0.3127, 0.329, 0.64, 0.33, 0.21, 0.71, 0.15, 0.06),
    ),
    "EXIF R03": adobe_rgb_jpeg(True),
    "EXIF ColorSpace 2": adobe_rgb_jpeg(False),
    "AVIF of Display P3": colored_avif(12, 13, srgb_curve(in_space("p3")).clip(0, 1)),
    "AVIF linear": colored_avif(1, 8, linear(PATCHES)),
    "AVIF of sRGB": colored_avif(1, 13, PATCHES / 255),
}


@pytest.mark.parametrize("name", COLORS)
def test_colours_are_right_whatever_tags_them(name):
    found = read_image_bytes(COLORS[name], "a").pixels.astype(int)
    # dark colours of a wider space are coarse in 8 bits; AVIF and JPEG are lossy
    limit = 6 if name.startswith(("AVIF", "EXIF")) else 4
    for row in (8, 24):
        for column in (8, 24):
            assert np.abs(found[row, column] - PATCHES[row, column]).max() <= limit, (name, row, column)


@pytest.mark.parametrize("transfer", [16, 18])
@pytest.mark.parametrize("kind", ["PNG", "AVIF"])
def test_high_dynamic_range_is_refused_by_name(kind, transfer):
    values = in_space("2020").clip(0, 1)
    content = deep_png(values, cicp(9, transfer)) if kind == "PNG" else colored_avif(9, transfer, values)
    for read in (read_image_bytes, lambda data, _: check_header(data, max_pixels=10**6, first_frame=False)):
        with pytest.raises(BadImageError) as caught:
            read(content, "a")
        assert caught.value.reason == "high_dynamic_range"


# ---- TIFF ------------------------------------------------------------------------------------------------


def tiff(pixels: np.ndarray, interpretation: str, **options: object) -> bytes:
    """What libvips writes of an array (H, W, bands)."""
    image = pyvips.Image.new_from_array(np.ascontiguousarray(pixels)).copy(interpretation=interpretation)
    return image.tiffsave_buffer(**options)


def pack_bits(row: np.ndarray, bits: int) -> bytes:
    """A row of samples, padded to whole bytes."""
    digits = "".join(f"{int(value):0{bits}b}" for value in row.reshape(-1))
    count = -(-len(digits) // 8)
    return int(digits.ljust(count * 8, "0"), 2).to_bytes(count, "big")


def raw_tiff(
    samples: np.ndarray, bits: int, photometric: int, *, planar: bool = False, kind: int = 1
) -> bytes:
    """An uncompressed TIFF of `samples` (H, W, bands): one strip, or one for each plane."""
    height, width, bands = samples.shape
    parts = [samples[..., band].tobytes() for band in range(bands)] if planar else [samples.tobytes()]
    if bits in (10, 12, 14):
        parts = [b"".join(map(partial(pack_bits, bits=bits), samples))]
    count = len(parts)
    entries = [
        (256, 4, [width]), (257, 4, [height]), (258, 3, [bits] * bands), (259, 3, [1]),
        (262, 3, [photometric]),
        (273, 4, [0] * count), (277, 3, [bands]), (278, 4, [height]), (279, 4, [len(part) for part in parts]),
        (284, 3, [2 if planar else 1]), (339, 3, [kind] * bands),
    ]  # fmt: skip
    base = 8 + 2 + 12 * len(entries) + 4
    extra = sum(len(v) * (2 if k == 3 else 4) for _, k, v in entries if len(v) * (2 if k == 3 else 4) > 4)
    position, starts = base + extra, []
    for part in parts:
        starts.append(position)
        position += len(part)
    directory, values_behind = struct.pack("<H", len(entries)), b""
    for tag, number, values in entries:
        values = starts if tag == 273 else values
        packed = struct.pack(f"<{len(values)}{'H' if number == 3 else 'I'}", *values)
        if len(packed) > 4:
            directory += struct.pack("<HHII", tag, number, len(values), base + len(values_behind))
            values_behind += packed
        else:
            directory += struct.pack("<HHI", tag, number, len(values)) + packed.ljust(4, b"\0")
    return b"II*\0\x08\0\0\0" + directory + bytes(4) + values_behind + b"".join(parts)


def lab_tiff(space: str) -> bytes:
    image = pyvips.Image.new_from_array(RGB).copy(interpretation="srgb")
    return image.colourspace(space).tiffsave_buffer()


DEEP = RGB.astype("<u2") * 257
INKS = np.concatenate([255 - RGB, np.zeros((HEIGHT, WIDTH, 1), np.uint8)], -1)
OPAQUE = np.full((HEIGHT, WIDTH, 1), 255, np.uint8)
TIFFS = {
    "float": (tiff((RGB / 255).astype(np.float32), "scrgb"), RGB),
    "float grey": (raw_tiff((GREY / 255).astype("<f4")[..., None], 32, 1, kind=3), GREY),
    "half": (raw_tiff((RGB / 255).astype("<f2"), 16, 2, kind=3), RGB),
    "16 bit": (raw_tiff(DEEP, 16, 2), RGB),
    "16 bit, planes": (raw_tiff(DEEP, 16, 2, planar=True), RGB),
    "8 bit, planes": (raw_tiff(RGB, 8, 2, planar=True), RGB),
    "16 bit grey": (raw_tiff(DEEP[..., :1], 16, 1), GREY),
    "16 bit grey, white is 0": (raw_tiff(65535 - DEEP[..., :1], 16, 0), GREY),
    "12 bit grey": (raw_tiff((GREY.astype(np.uint32) * 4095 // 255)[..., None], 12, 1), GREY),
    "big, tiles, deflate": (tiff(RGB, "srgb", bigtiff=True, tile=True, compression="deflate"), RGB),
    "lzw, predictor, 16 bit": (tiff(DEEP, "rgb16", compression="lzw", predictor="horizontal"), RGB),
    "CMYK and alpha": (tiff(np.concatenate([INKS, OPAQUE], -1), "cmyk"), None),
    "Lab": (lab_tiff("lab"), RGB),
    "Lab 16": (lab_tiff("labs"), RGB),
}  # fmt: skip


@pytest.mark.parametrize("name", TIFFS)
def test_pixels_of_a_tiff_of_other_programs(name):
    content, expected = TIFFS[name]
    image = read_image_bytes(content, "a.tif")
    assert image.pixels.shape == (HEIGHT, WIDTH, 3)
    if expected is None:  # without a profile, the colours of inks are a guess: libvips' own
        expected = pyvips.Image.new_from_buffer(content, "").flatten(background=255).numpy()
        assert "cmyk_without_profile" in image.flags
        return
    expected = expected[..., None] if expected.ndim == 2 else expected
    assert np.abs(image.pixels.astype(int) - expected).max() <= 2
    assert check_header(content, max_pixels=10**6, first_frame=False) == ("TIFF", (WIDTH, HEIGHT))


@pytest.mark.parametrize(
    ("samples", "bits", "kind", "reason"),
    [
        ((RGB.astype("<f4")), 32, 3, "float_pixels"),  # from 0 to 255
        (RGB / 255, 64, 3, "format_not_supported"),
        (np.where(RGB == 0, np.nan, RGB / 255).astype("<f4"), 32, 3, "float_pixels"),
        ((RGB.astype("<i2") * 100), 16, 2, "format_not_supported"),  # signed
    ],
)
def test_pixels_without_a_defined_white_are_refused_by_name(samples, bits, kind, reason):
    with pytest.raises(BadImageError) as caught:
        read_image_bytes(raw_tiff(samples, bits, 2, kind=kind), "a.tif")
    assert caught.value.reason == reason


# ---- PNG -------------------------------------------------------------------------------------------------


def packed_rows(samples: np.ndarray, bits: int) -> bytes:
    """Rows of a PNG of grey or indexed samples (H, W) below 8 bits, each with filter 0."""
    per_byte = 8 // bits
    padded = np.pad(samples, ((0, 0), (0, -samples.shape[1] % per_byte)))
    shifts = (8 - bits * (np.arange(per_byte) + 1)).astype(np.uint8)
    packed = (padded.reshape(len(samples), -1, per_byte) << shifts).sum(-1).astype(np.uint8)
    return b"".join(b"\0" + row.tobytes() for row in packed)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_the_transparent_grey_of_a_png(bits):
    most = 2**bits - 1
    samples = (np.arange(16)[None] * most // 15).repeat(8, 0).astype(np.uint32)
    if bits <= 4:
        rows = packed_rows(samples.astype(np.uint8), bits)
    else:
        kind = ">u2" if bits == 16 else np.uint8
        rows = b"".join(b"\0" + row.astype(kind).tobytes() for row in samples)
    key = int(samples[0, 0])
    whole = png(16, 8, bits, 0, rows, extra=chunk(b"tRNS", struct.pack(">H", key)))
    image = read_image_bytes(whole, "a.png", background="#ff0000")
    assert "alpha_flattened" in image.flags
    for column in range(16):
        value = round(int(samples[0, column]) * 255 / most)
        wanted = (255, 0, 0) if samples[0, column] == key else (value, value, value)
        assert np.abs(image.pixels[3, column].astype(int) - wanted).max() <= 1


@pytest.mark.parametrize("bits", [8, 16])
def test_the_transparent_colour_of_a_png(bits):
    kind = ">u2" if bits == 16 else np.uint8
    deep = RGB.astype(np.uint32) * (257 if bits == 16 else 1)
    if bits == 16:
        deep[0, 1] = deep[0, 0] + 1  # the same 8 bits, but another colour
    rows = b"".join(b"\0" + row.astype(kind).tobytes() for row in deep)
    key = chunk(b"tRNS", struct.pack(">3H", *deep[0, 0]))
    image = read_image_bytes(png(WIDTH, HEIGHT, bits, 2, rows, extra=key), "a.png", background="#00ff00")
    assert image.pixels[0, 0].tolist() == [0, 255, 0]
    if bits == 16:
        assert np.abs(image.pixels[0, 1].astype(int) - RGB[0, 0]).max() <= 1
    assert np.abs(image.pixels[1:].astype(int) - RGB[1:]).max() <= 1


def test_a_wrong_checksum_of_metadata_is_a_flag_and_of_pixels_damage():
    whole = encoded(Image.fromarray(RGB), "PNG")
    text = bytearray(chunk(b"tEXt", b"Comment\0hello"))
    text[-1] ^= 1
    image = read_image_bytes(whole[:33] + bytes(text) + whole[33:], "a.png")
    assert np.array_equal(image.pixels, RGB)
    assert image.flags == ("broken_metadata",)
    damaged = bytearray(whole)
    damaged[whole.index(b"IDAT") + 12] ^= 1
    with pytest.raises(BadImageError):
        read_image_bytes(bytes(damaged), "a.png")


@pytest.mark.parametrize(
    "segment", [b"\xff\xe1\x00\x02", b"\xff\xe1\x00\x04ab", b"\xff\xe2\x00\x05abc", b"\xff\xed\x00\x03a"]
)
def test_short_metadata_of_a_jpeg_is_harmless(segment):
    whole = encoded(detailed(3), "JPEG")
    image = read_image_bytes(whole[:2] + segment + whole[2:], "a.jpg")
    assert np.array_equal(image.pixels, read_image_bytes(whole, "a.jpg").pixels)


# ---- which way is up -------------------------------------------------------------------------------------


def oriented(orientation: int) -> bytes:
    block = Image.Exif()
    block[274] = orientation
    content = block.tobytes()
    return content if content.startswith(b"Exif") else b"Exif\0\0" + content


def raw_profile(kind: str, content: bytes) -> bytes:
    lines = content.hex().encode()
    parts = [lines[start : start + 72] for start in range(0, len(lines), 72)]
    text = b"\n".join([b"", kind.encode(), b"%8d" % len(content), *parts, b""])
    return chunk(b"zTXt", f"Raw profile type {kind}".encode() + b"\0\0" + zlib.compress(text))


def xmp(orientation: int) -> bytes:
    tag = f"xmlns:tiff='http://ns.adobe.com/tiff/1.0/' tiff:Orientation='{orientation}'"
    syntax = "xmlns:rdf='http://www.w3.org/1999/02/22-rdf-syntax-ns#'"
    rdf = f"<rdf:RDF {syntax}><rdf:Description {tag}/></rdf:RDF>"
    return f"<x:xmpmeta xmlns:x='adobe:ns:meta/'>{rdf}</x:xmpmeta>".encode()


def stored_files(orientation: int) -> dict[str, bytes]:
    """The same stored picture with its orientation in each place where programs put it."""
    stored = Image.fromarray(RGB)
    plain = encoded(stored, "PNG")
    packet = b"XML:com.adobe.xmp\0\0\0\0\0" + xmp(orientation)
    xmp_jpeg = b"http://ns.adobe.com/xap/1.0/\0" + xmp(orientation)
    jpeg = encoded(stored, "JPEG", quality=100, subsampling=0)
    block = oriented(orientation)
    return {
        "tiff": encoded(stored, "TIFF", tiffinfo={274: orientation}),
        "deep tiff, planes": _with_orientation(raw_tiff(DEEP, 16, 2, planar=True), orientation),
        "float tiff": tiff_with_orientation(orientation),
        "png, eXIf in front": encoded(stored, "PNG", exif=block),
        "png, eXIf behind": plain[:-12] + chunk(b"eXIf", block[6:]) + plain[-12:],
        "png, raw profile exif": plain[:33] + raw_profile("exif", block) + plain[33:],
        "png, raw profile APP1": plain[:33] + raw_profile("APP1", block) + plain[33:],
        "png, XMP": plain[:33] + chunk(b"iTXt", packet) + plain[33:],
        "png, XMP in other quotes": plain[:33] + chunk(b"iTXt", packet.replace(b"'", b'"')) + plain[33:],
        "png, XMP behind": plain[:-12] + chunk(b"iTXt", packet) + plain[-12:],
        "jpeg": encoded(stored, "JPEG", quality=100, subsampling=0, exif=block),
        "jpeg, XMP": jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(xmp_jpeg) + 2) + xmp_jpeg + jpeg[2:],
        "webp": encoded(stored, "WEBP", lossless=True, exif=block),
        "avif": encoded(stored, "AVIF", quality=100, subsampling="4:4:4", exif=block),
    }  # fmt: skip


def _with_orientation(content: bytes, orientation: int) -> bytes:
    """A TIFF with a second directory behind everything, which also has the orientation."""
    (start,) = struct.unpack_from("<I", content, 4)
    (count,) = struct.unpack_from("<H", content, start)
    entries = [content[start + 2 + 12 * i : start + 14 + 12 * i] for i in range(count)]
    entries.append(struct.pack("<HHIHH", 274, 3, 1, orientation, 0))
    entries.sort(key=lambda entry: struct.unpack_from("<H", entry)[0])
    moved = content[:4] + struct.pack("<I", len(content)) + content[8:]
    return moved + struct.pack("<H", count + 1) + b"".join(entries) + bytes(4)


def tiff_with_orientation(orientation: int) -> bytes:
    return _with_orientation(raw_tiff((RGB / 255).astype("<f4"), 32, 2, kind=3), orientation)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_part_agrees_which_way_is_up(orientation, tmp_path):
    upright = {
        1: RGB, 2: RGB[:, ::-1], 3: RGB[::-1, ::-1], 4: RGB[::-1], 5: RGB.transpose(1, 0, 2),
        6: np.rot90(RGB, -1), 7: np.rot90(RGB, 2).transpose(1, 0, 2), 8: np.rot90(RGB, 1),
    }[orientation]  # fmt: skip
    height, width = upright.shape[:2]
    for name, content in stored_files(orientation).items():
        image = read_image_bytes(content, "a")
        assert image.pixels.shape == upright.shape, name
        limit = 6 if name.startswith(("jpeg", "avif")) else 1
        assert np.abs(image.pixels.astype(int) - upright).max() <= limit, name
        assert check_header(content, max_pixels=10**6, first_frame=False)[1] == (width, height), name
        (tmp_path / "a").write_bytes(content)
        assert upright_size(tmp_path / "a") == (width, height), name
        assert ("rotated" in image.flags) == (orientation > 1), name
