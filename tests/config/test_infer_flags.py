"""Options of infer_vae.py that say nothing about the others are mistakes."""

import pytest

from vae.config.errors import UserError
from vae.config.infer_flags import parse_infer_flags

WORDS = ["--vae", "vae", "--mode", "reconstruct", "--output_dir", "out", "--input"]


def test_files_may_be_called_like_flags():
    assert parse_infer_flags([*WORDS, "steps", "tile_size"]).input == ("steps", "tile_size")


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--steps=9", "--steps belongs to --mode interpolate, not to --mode reconstruct"),
        ("--tile_size=64", "--tile_size 64 says nothing without --tile"),
    ],
)
def test_a_flag_that_says_nothing(flag, said):
    with pytest.raises(UserError, match=f"^{said}"):
        parse_infer_flags([*WORDS, "image.png", flag])
