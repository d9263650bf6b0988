"""The header of a JPEG is what its decoder reads; files that cannot be read have their reason."""

import os
import struct
import sys

import pytest
from PIL import Image

from tests.harness.image_kinds import detailed, encoded
from vae.images.decoding import check_header, decode_bytes, read_content, read_image_bytes
from vae.images.formats import BadImageError, plain_jpeg_size
from vae.images.metadata import ORIENTATION


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"exif": 6}, {"icc_profile": b"x" * 70_000}])
def test_header_of_a_jpeg_has_the_size_of_its_decoded_image(options):
    if "exif" in options:
        exif = Image.Exif()
        exif[ORIENTATION] = options["exif"]
        options = {"exif": exif}
    data = encoded(detailed(0, 40, 60), "JPEG", **options)
    height, width = decode_bytes(data).shape[:2]
    assert check_header(data, max_pixels=10_000, first_frame=False) == ("JPEG", (width, height))
    for bad, max_pixels, reason in ((data, 100, "too_many_pixels"), (data[:-9], 10_000, "truncated")):
        with pytest.raises(BadImageError, match=reason):
            check_header(bad, max_pixels=max_pixels, first_frame=False)


SOF_LENGTH = 19  # bytes of the frame header of three components, with its marker


@pytest.mark.parametrize("change", ["exif behind the frame header", "two frames", "seven components"])
def test_header_of_an_unusual_jpeg_is_what_pillow_reads(change):
    data = encoded(detailed(0, 40, 60), "JPEG")
    start = data.index(b"\xff\xc0")
    end = start + SOF_LENGTH
    if change == "two frames":
        small = data[start : start + 5] + struct.pack(">HH", 20, 30) + data[start + 9 : end]
        odd = data[:end] + small + data[end:]
    elif change == "seven components":
        odd = data[: start + 9] + b"\x07" + data[start + 10 :]
    else:
        exif = Image.Exif()
        exif[ORIENTATION] = 6
        content = b"Exif\0\0" + exif.tobytes().removeprefix(b"Exif\0\0")
        odd = data[:end] + b"\xff\xe1" + struct.pack(">H", len(content) + 2) + content + data[end:]
    assert plain_jpeg_size(data) == (60, 40)
    assert plain_jpeg_size(odd) is None
    if change == "exif behind the frame header":
        height, width = decode_bytes(odd).shape[:2]
        assert (width, height) == (40, 60)
        assert check_header(odd, max_pixels=10_000, first_frame=False) == ("JPEG", (40, 60))


def test_jpeg_that_ends_in_a_frame_header_is_truncated():
    data = encoded(detailed(0, 40, 60), "JPEG")
    with pytest.raises(BadImageError, match="truncated"):
        check_header(data[:-2] + b"\xff\xc5\x00\x10", max_pixels=10_000, first_frame=False)


@pytest.mark.skipif(sys.platform == "win32", reason="needs permissions of Unix")
def test_file_without_permission_is_rejected(tmp_path):
    path = tmp_path / "a.png"
    detailed(0).save(path)
    path.chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        with pytest.raises(BadImageError) as caught:
            read_image_bytes(read_content(path), path.name)
    finally:
        if root:
            os.seteuid(0)
    assert caught.value.reason == "no_permission"
