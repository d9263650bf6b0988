"""Flags of infer_vae.py that have no effect are refused."""

import pytest

from vae.config.errors import UserError
from vae.config.infer_flags import parse_infer_flags

WORDS = ["--vae", "vae", "--mode", "reconstruct", "--output_dir", "out", "--input"]


def test_input_files_may_have_the_names_of_flags():
    assert parse_infer_flags([*WORDS, "steps", "tile_size"]).input == ("steps", "tile_size")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--steps=9", "--steps .*--mode interpolate, not .*--mode reconstruct: remove"),
        ("--tile_size=64", "--tile_size 64 .*without --tile: add --tile"),
    ],
)
def test_flag_without_effect_is_refused(flag, message):
    with pytest.raises(UserError, match=f"^{message}"):
        parse_infer_flags([*WORDS, "image.png", flag])
