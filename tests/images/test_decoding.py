"""Real image files of each kind decode to the expected pixels or are rejected with the expected reason."""

import io
import os
import struct
import warnings

import numpy as np
import pytest
from PIL import Image, ImageCms

from tests.harness.image_bytes import (
    ADOBE_RGB_TO_XYZ_D50,
    SRGB_TO_XYZ_D50,
    adobe_rgb_profile,
    cmyk_profile,
    png,
    png_chunk,
    smooth,
)
from vae.images.decoding import decode_image, read_image_bytes
from vae.images.formats import BadImageError

RED, GREEN, BLUE, WHITE, BLACK = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0)


def corners():
    """16x24, each quarter in another colour, so that a rotation is visible."""
    pixels = np.zeros((16, 24, 3), dtype=np.uint8)
    pixels[:8, :12], pixels[:8, 12:], pixels[8:, :12], pixels[8:, 12:] = RED, GREEN, BLUE, WHITE
    return pixels


def reason_of(path, **options):
    with pytest.raises(BadImageError) as caught:
        decode_image(path, **options)
    assert caught.value.detail
    return caught.value.reason


@pytest.mark.parametrize(
    ("name", "options", "tolerance"),
    [
        ("a.png", {}, 0),
        ("a.bmp", {}, 0),
        ("a.tif", {}, 0),
        ("b.tiff", {"compression": "tiff_lzw"}, 0),
        ("a.webp", {"lossless": True}, 0),
        ("b.webp", {"quality": 95}, 12),
        ("a.jpg", {"quality": 95}, 12),
        ("b.jpeg", {"quality": 95, "progressive": True}, 12),
        ("a.avif", {"quality": 95}, 12),
    ],
)
def test_each_format_is_decoded(tmp_path, name, options, tolerance):
    Image.fromarray(smooth()).save(tmp_path / name, **options)
    decoded = decode_image(tmp_path / name)
    assert decoded.dtype == np.uint8
    assert decoded.flags.writeable
    assert np.abs(decoded.astype(int) - smooth()).max() <= tolerance


def test_broken_exif_is_ignored(tmp_path):
    Image.fromarray(smooth()).save(tmp_path / "a.jpg", quality=95, exif=b"Exif\0\0MM\0*\xff\xff\xff\xff\0\1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.abs(decode_image(tmp_path / "a.jpg").astype(int) - smooth()).max() <= 12


def test_wide_gamut_profile_is_converted_to_srgb(tmp_path):
    colors = np.array([[[120, 130, 110], [200, 180, 160], [64, 64, 64], [90, 140, 150]]], dtype=np.uint8)
    Image.fromarray(colors).save(tmp_path / "a.png", icc_profile=adobe_rgb_profile())
    linear = (colors / 255.0) ** (563 / 256) @ ADOBE_RGB_TO_XYZ_D50.T @ np.linalg.inv(SRGB_TO_XYZ_D50).T
    srgb = np.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear.clip(0) ** (1 / 2.4) - 0.055) * 255
    decoded = decode_image(tmp_path / "a.png").astype(float)
    assert np.abs(srgb - colors).max() > 5  # the profile matters for these colours
    assert np.abs(decoded - srgb).max() <= 1.5


def test_srgb_profile_changes_nothing(tmp_path):
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for name in ("a.png", "a.tif"):
        Image.fromarray(smooth()).save(tmp_path / name, icc_profile=profile)
        assert np.array_equal(decode_image(tmp_path / name), smooth())


def test_broken_profile_is_ignored(tmp_path):
    Image.fromarray(smooth()).save(tmp_path / "a.png", icc_profile=b"not a profile" * 20)
    assert np.array_equal(decode_image(tmp_path / "a.png"), smooth())


def test_cmyk_without_profile(tmp_path):
    inks = np.zeros((8, 8, 4), dtype=np.uint8)
    inks[:4, :, 0] = 255  # cyan above, black ink below
    inks[4:, :, 3] = 255
    Image.fromarray(inks, "CMYK").save(tmp_path / "a.tif")
    decoded = decode_image(tmp_path / "a.tif")
    assert decoded[0, 0].tolist() == [0, 255, 255]
    assert decoded[7, 0].tolist() == [0, 0, 0]
    Image.fromarray(inks, "CMYK").save(tmp_path / "a.jpg", quality=100)
    assert np.abs(decode_image(tmp_path / "a.jpg")[7, 0].astype(int)).max() <= 8


def test_cmyk_with_profile(tmp_path):
    inks = np.zeros((8, 8, 4), dtype=np.uint8)
    inks[:4, :, 0] = 255
    inks[4:, :, 1] = 255  # magenta, which prints nothing on this press
    Image.fromarray(inks, "CMYK").save(tmp_path / "a.tif", icc_profile=cmyk_profile())
    decoded = decode_image(tmp_path / "a.tif").astype(int)
    assert np.ptp(decoded[0, 0]) <= 2  # grey
    assert 60 < decoded[0, 0, 0] < 180
    assert decoded[7, 0].min() >= 253  # paper


def test_alpha_is_composited_over_background(tmp_path):
    pixels = np.zeros((4, 4, 4), dtype=np.uint8)
    pixels[..., 0] = 200  # hidden red must not appear if alpha is 0
    pixels[:2, :, 3], pixels[3, :, 3] = 255, 128
    for name in ("a.png", "a.webp", "a.tif"):
        Image.fromarray(pixels).save(tmp_path / name, **({"lossless": True} if name == "a.webp" else {}))
        white = decode_image(tmp_path / name)
        assert white[0, 0].tolist() == [200, 0, 0]
        assert white[3, 0].tolist() == [227, 127, 127]  # 200 * 128/255 + 255 * 127/255
        if name != "a.webp":  # lossless WebP drops the colours of transparent pixels
            assert white[2, 0].tolist() == [255, 255, 255]
        assert decode_image(tmp_path / name, background="#102030")[2, 0].tolist() == [16, 32, 48]


def test_palette_with_and_without_transparency(tmp_path):
    image = Image.new("P", (6, 4))
    image.putpalette([255, 0, 0, 0, 0, 255] + [0] * 762)
    image.paste(1, (3, 0, 6, 4))
    image.save(tmp_path / "plain.png")
    image.save(tmp_path / "clear.png", transparency=0)
    assert decode_image(tmp_path / "plain.png")[0, [0, 5]].tolist() == [[255, 0, 0], [0, 0, 255]]
    clear = decode_image(tmp_path / "clear.png", background="black")
    assert clear[0, [0, 5]].tolist() == [[0, 0, 0], [0, 0, 255]]


def test_grey_one_bit_and_grey_with_alpha(tmp_path):
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    Image.fromarray(grey).save(tmp_path / "grey.png")
    assert np.array_equal(decode_image(tmp_path / "grey.png"), grey[..., None].repeat(3, -1))
    Image.fromarray(grey > 100).save(tmp_path / "bit.png")
    assert np.array_equal(decode_image(tmp_path / "bit.png")[..., 1], np.where(grey > 100, 255, 0))
    Image.fromarray(np.stack([grey, 255 - grey], -1), "LA").save(tmp_path / "la.png")
    assert decode_image(tmp_path / "la.png", background="black")[0, 0].tolist() == [0, 0, 0]


def test_truncated_files_are_rejected(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    for name in ("a.jpg", "a.png", "a.webp", "a.bmp", "a.tif", "a.avif"):
        path = tmp_path / name
        Image.fromarray(noise).save(path)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        assert reason_of(path) in ("truncated", "damaged"), name
    Image.fromarray(noise).save(tmp_path / "a.jpg")
    whole = (tmp_path / "a.jpg").read_bytes()
    for cut in (whole[:-2], whole[:-300] + bytes(300), whole[:-2] + bytes(2)):
        (tmp_path / "cut.jpg").write_bytes(cut)
        assert reason_of(tmp_path / "cut.jpg") == "truncated"
    (tmp_path / "tail.jpg").write_bytes(whole + b"garbage after the end is harmless")
    decode_image(tmp_path / "tail.jpg")


def test_thumbnail_does_not_hide_missing_end_marker(tmp_path):
    thumbnail = io.BytesIO()
    Image.fromarray(corners()).save(thumbnail, "JPEG")
    Image.fromarray(smooth()).save(tmp_path / "a.jpg", exif=b"Exif\0\0" + thumbnail.getvalue())
    whole = (tmp_path / "a.jpg").read_bytes()
    decode_image(tmp_path / "a.jpg")
    (tmp_path / "a.jpg").write_bytes(whole[:-2])
    assert reason_of(tmp_path / "a.jpg") == "truncated"


def test_other_content_is_rejected_with_its_reason(tmp_path):
    """tests/harness/image_kinds.py has more kinds, which are read in tests/prepare/test_validate.py."""
    noise = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    contents = {
        "zeros.jpg": (bytes(500), "not_an_image"),
        "film.jpg": (b"\0\0\0\x18ftypisom\0\0\0\0isommp42" + bytes(50), "not_an_image"),
        "header.bmp": (b"BM", "damaged"),
        "zeros.png": ((tmp_path / "a.png").read_bytes()[:-200] + bytes(200), "damaged"),
    }
    for name, (content, reason) in contents.items():
        (tmp_path / name).write_bytes(content)
        assert reason_of(tmp_path / name) == reason, name
    assert reason_of(tmp_path / "missing.png") == "unreadable"
    assert reason_of(tmp_path) == ("no_permission" if os.name == "nt" else "unreadable")
    Image.fromarray(np.ones((8, 8), dtype=np.int32)).save(tmp_path / "long.tif")
    assert reason_of(tmp_path / "long.tif") == "format_not_supported"


def test_animations_and_pages_are_rejected(tmp_path):
    frames = [Image.fromarray(corners()), Image.fromarray(255 - corners())]
    for name in ("a.png", "a.webp", "a.gif", "a.tif", "a.avif"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
        assert reason_of(tmp_path / name) == "animated", name
    with pytest.raises(BadImageError, match="--mode preprocess --first_frame"):
        decode_image(tmp_path / "a.gif")  # the trainer itself has no --first_frame
    frames[0].save(tmp_path / "stereo.jpg", format="MPO", save_all=True, append_images=frames[1:])
    assert decode_image(tmp_path / "stereo.jpg")[2, 2, 0] > 200  # frame 0 is red there, frame 1 is not


@pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.png", "a.tif"])
def test_single_frame_of_an_animation_format_is_an_ordinary_image(tmp_path, name):
    options = {"lossless": True} if name == "a.webp" else {}
    Image.fromarray(corners()).save(tmp_path / name, save_all=True, **options)
    if name == "a.png":  # an APNG with a single frame, which Pillow writes as a plain PNG
        whole = (tmp_path / name).read_bytes()
        extra = png_chunk(b"acTL", struct.pack(">II", 1, 0))
        extra += png_chunk(b"fcTL", struct.pack(">IIIIIHHBB", 0, 24, 16, 0, 0, 1, 10, 0, 0))
        at = whole.index(b"IDAT") - 4
        (tmp_path / name).write_bytes(whole[:at] + extra + whole[at:])
    content = (tmp_path / name).read_bytes()
    found = read_image_bytes(content, name)
    assert (found.pixels == corners()).all()
    assert found.flags == ()
    assert (
        read_image_bytes((tmp_path / name).read_bytes(), name, first_frame=True).pixels == corners()
    ).all()


def test_tiff_preview_pages_do_not_count(tmp_path):
    page, preview = Image.fromarray(corners()), Image.fromarray(corners()[::2, ::2].copy())
    preview.encoderinfo = {"tiffinfo": {254: 1}}
    page.save(tmp_path / "a.tif", save_all=True, append_images=[preview])
    assert np.array_equal(decode_image(tmp_path / "a.tif"), corners())


def test_pixel_limit_is_checked_before_decoding(tmp_path):
    huge = png(65000, 65000, 8, 2, b"")
    (tmp_path / "claims.png").write_bytes(huge)
    assert reason_of(tmp_path / "claims.png") == "too_many_pixels"
    Image.fromarray(smooth()).save(tmp_path / "a.png")
    assert reason_of(tmp_path / "a.png", max_pixels=40 * 56 - 1) == "too_many_pixels"
    limit = Image.MAX_IMAGE_PIXELS
    decode_image(tmp_path / "a.png", max_pixels=40 * 56)
    assert limit == Image.MAX_IMAGE_PIXELS
