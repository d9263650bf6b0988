"""Writes real files of every kind that occurs in image folders, with the expected result for each."""

import io
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.harness.image_bytes import adobe_rgb_profile, cmyk_profile, png, smooth

# By name: status, then reason or flag, of `validate --max_pixels 1000000 --min_size 16 --max_aspect 8`.
Expected = dict[str, tuple[str, str]]


def detailed(seed: int = 0, height: int = 64, width: int = 64) -> Image.Image:
    """An image without equal neighbouring pixels; every seed gives a different image."""
    noise = np.random.default_rng(seed).integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def write_noise(folder: Path, count: int, height: int, width: int) -> list[Path]:
    """A new folder of PNG files of random pixels, in the order of their names."""
    folder.mkdir()
    pixels = np.random.default_rng(0)
    paths = [folder / f"{index:02d}.png" for index in range(count)]
    for path in paths:
        Image.fromarray(pixels.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)
    return paths


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """The image as a file of a Pillow format."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def flipped_scan(whole: bytes) -> bytes:
    """A JPEG with one changed byte in its scan: libjpeg reports damage, but Pillow still returns an image."""
    import simplejpeg

    start = whole.index(b"\xff\xda") + 20
    for at in range(start, len(whole) - 100):
        damaged = whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :]
        try:
            simplejpeg.decode_jpeg(damaged)
        except ValueError:
            Image.open(io.BytesIO(damaged)).load()
            return damaged
    raise AssertionError("no byte of the scan has this effect")


def recoded(whole: bytes, marker: int, bits: int = 8) -> bytes:
    """A JPEG whose frame header names another coding."""
    at = whole.index(b"\xff\xc0")
    return whole[: at + 1] + bytes([marker]) + whole[at + 2 : at + 4] + bytes([bits]) + whole[at + 5 :]


def _rejected(folder: Path) -> Expected:
    jpeg, png_file = encoded(detailed(1), "JPEG", quality=95), encoded(detailed(2), "PNG")
    frames = [detailed(3), detailed(4)]
    animated = {"save_all": True, "append_images": frames[1:]}
    film_gif = encoded(frames[0], "GIF", **animated)
    bad_crc = bytearray(png_file)
    bad_crc[len(bad_crc) // 2] ^= 1
    float_pixels = np.full((32, 32), np.nan, dtype=np.float32)
    files = {
        "zero_bytes.jpg": (b"", "empty"),
        "text.jpg": (b"just a note", "not_an_image"),
        "html.jpg": (b"<!doctype html><html>404</html>", "not_an_image"),
        "half.jpg": (jpeg[: len(jpeg) // 2], "truncated"),
        "no_end.jpg": (jpeg[:-2], "truncated"),
        "zero_tail.jpg": (jpeg[:-400] + bytes(400), "truncated"),
        "scan_damage.jpg": (flipped_scan(jpeg), "damaged"),
        "half.png": (png_file[: len(png_file) // 2], "truncated"),
        "bad_crc.png": (bytes(bad_crc), "damaged"),
        "large.png": (encoded(Image.new("1", (1200, 1200)), "PNG"), "too_many_pixels"),
        "claims.png": (png(65000, 65000, 8, 2, b""), "too_many_pixels"),
        "drawing.png": (b"<?xml version='1.0'?><svg xmlns='x'></svg>", "format_not_supported"),
        "paper.jpg": (b"%PDF-1.7 and so on", "format_not_supported"),
        "film.gif": (film_gif, "animated"),
        "film.webp": (encoded(frames[0], "WEBP", **animated), "animated"),
        "film.png": (encoded(frames[0], "PNG", **animated), "animated"),
        "pages.tif": (encoded(frames[0], "TIFF", **animated), "animated"),
        "float.tif": (encoded(Image.fromarray(np.full((32, 32), 255, np.float32)), "TIFF"), "float_pixels"),
        "nan.tif": (encoded(Image.fromarray(float_pixels), "TIFF"), "float_pixels"),
        "small.png": (encoded(detailed(5, 8, 40), "PNG"), "too_small"),
        "panorama.png": (encoded(detailed(6, 16, 160), "PNG"), "aspect"),
        "clear.png": (encoded(Image.new("RGBA", (32, 32), (9, 9, 9, 0)), "PNG"), "transparent"),
        "phone.heic": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(50), "plugin_missing"),
        "new.jxl": (b"\xff\x0a" + bytes(50), "plugin_missing"),
        "deep.jpg": (recoded(jpeg, 0xC1, bits=12), "jpeg_coding_not_supported"),
        "arithmetic.jpg": (recoded(jpeg, 0xC9), "jpeg_coding_not_supported"),
        "lossless.jpg": (recoded(jpeg, 0xC3), "jpeg_coding_not_supported"),
    }
    for name, (content, _) in files.items():
        (folder / name).write_bytes(content)
    (folder / "broken_link.png").symlink_to(folder / "nowhere.png")
    return {name: ("rejected", reason) for name, (_, reason) in files.items()} | {
        "broken_link.png": ("rejected", "broken_link")
    }


def _corrected(folder: Path) -> Expected:
    expected = {}
    for orientation in range(2, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        detailed(10 + orientation).save(folder / f"exif_{orientation}.jpg", exif=exif)
        expected[f"exif_{orientation}.jpg"] = ("accepted", "rotated")
    detailed(20).save(folder / "wide_gamut.png", icc_profile=adobe_rgb_profile())
    inks = Image.fromarray(np.array(detailed(21).convert("CMYK")))
    Image.frombytes("CMYK", (64, 64), inks.tobytes()).save(folder / "press.tif", icc_profile=cmyk_profile())
    deep = np.random.default_rng(0).integers(0, 65536, (32, 32)).astype(np.uint16)
    Image.fromarray(deep).save(folder / "deep.png")
    wide = np.random.default_rng(1).integers(0, 256, 32 * (1 + 32 * 6), dtype=np.uint8)
    wide[:: 1 + 32 * 6] = 0
    (folder / "deep_rgb.png").write_bytes(png(32, 32, 16, 2, wide.tobytes()))
    see_through = detailed(22).convert("RGBA")
    see_through.putalpha(detailed(23).convert("L"))
    see_through.save(folder / "alpha.png")
    detailed(24).quantize(16).save(folder / "palette.png", transparency=3)
    return expected | {
        "wide_gamut.png": ("accepted", "profile_converted"),
        "press.tif": ("accepted", "profile_converted"),
        "deep.png": ("accepted", "scaled_to_8_bits"),
        "deep_rgb.png": ("accepted", "scaled_to_8_bits"),
        "alpha.png": ("accepted", "alpha_flattened"),
        "palette.png": ("accepted", "alpha_flattened"),
    }


def _flagged(folder: Path) -> Expected:
    jpeg = encoded(detailed(30), "JPEG")
    (folder / "tail.jpg").write_bytes(jpeg + b"garbage")
    (folder / "tail.png").write_bytes(encoded(detailed(31), "PNG") + b"garbage")
    (folder / "wrong.jpg").write_bytes(encoded(detailed(32), "PNG"))
    (folder / "without").write_bytes(encoded(detailed(33), "JPEG"))
    stereo = {"save_all": True, "append_images": [detailed(35)]}
    (folder / "stereo.jpg").write_bytes(encoded(detailed(34), "MPO", **stereo))
    detailed(36).save(folder / "exif.jpg", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff\0\1" + bytes(20))
    detailed(37).save(folder / "profile.png", icc_profile=b"not a profile" * 20)
    Image.frombytes("CMYK", (64, 64), detailed(38).convert("CMYK").tobytes()).save(folder / "inks.jpg")
    detailed(39).convert("1").save(folder / "bits.png")
    detailed(41).save(folder / "still.gif")
    detailed(40).convert("L").save(folder / "grey.jpg")
    Image.new("RGB", (32, 32), (90, 20, 30)).save(folder / "constant.png")
    blank = np.full((64, 64, 3), 250, dtype=np.uint8)
    blank[10, 10] = 253
    Image.fromarray(blank).save(folder / "blank.png")
    flags = {
        "tail.jpg": "trailing_bytes",
        "tail.png": "trailing_bytes",
        "wrong.jpg": "wrong_extension",
        "without": "no_extension",
        "stereo.jpg": "mpo",
        "exif.jpg": "broken_exif",
        "profile.png": "broken_profile",
        "inks.jpg": "cmyk_without_profile",
        "bits.png": "one_bit",
        "still.gif": "",
        "grey.jpg": "grey",
        "constant.png": "constant",
        "blank.png": "near_blank",
    }
    return {name: ("accepted", flag) for name, flag in flags.items()}


def _skipped(folder: Path) -> Expected:
    twin = encoded(detailed(50), "PNG")
    (folder / "twin_a.png").write_bytes(twin)
    (folder / "twin_b.png").write_bytes(twin)
    (folder / "folder.jpg").mkdir()
    detailed(51).save(folder / "folder.jpg" / "inside.png")
    os.mkfifo(folder / "pipe.jpg")
    with socket.socket(socket.AF_UNIX) as plug:
        here = os.getcwd()
        os.chdir(folder)  # the path of a socket is limited to 108 bytes
        plug.bind("socket.png")
        os.chdir(here)
    for name in ("._a.jpg", "Thumbs.db", ".DS_Store"):
        (folder / name).write_bytes(b"x")
    (folder / "notes.txt").write_text("x")
    (folder / "loop").symlink_to(folder)
    return {
        "twin_a.png": ("accepted", ""),
        "twin_b.png": ("duplicate", "exact_duplicate"),
        "folder.jpg/inside.png": ("accepted", ""),
    }


SKIPPED = {
    "folder_named_like_image": 1,
    "special_file": 2,
    "system": 1,
    "system_file": 2,
    "other_file": 1,
    "link_loop": 1,
}


def _unusual_names(folder: Path) -> Expected:
    names = [b"caf\xe9.png", "😀 emoji.png".encode(), b"line\nbreak.png", b"x" * 251 + b".png", b"-rf.png"]
    for seed, name in enumerate(names):
        with open(os.path.join(os.fsencode(folder), name), "wb") as file:
            file.write(encoded(detailed(60 + seed), "PNG"))
    return {os.fsdecode(name): ("accepted", "") for name in names}


def write_all(folder: Path) -> Expected:
    """Write every kind of file and return the expected results; SKIPPED counts the skipped entries."""
    folder.mkdir()
    Image.fromarray(smooth()).save(folder / "plain.png")
    expected = {"plain.png": ("accepted", "")}
    for write in (_rejected, _corrected, _flagged, _skipped, _unusual_names):
        expected |= write(folder)
    return expected
