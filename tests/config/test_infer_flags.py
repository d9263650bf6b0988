"""Flags of infer_vae.py that have no effect are refused; unusual file names are not."""

import pytest

from vae.config.infer_flags import parse_infer_flags
from vae.system.errors import UsageError, UserError

WORDS = ["--vae", "vae", "--mode", "reconstruct", "--output_dir", "out", "--input"]


def test_input_files_may_have_the_names_of_flags():
    assert parse_infer_flags([*WORDS, "steps", "tile_size"]).input == ("steps", "tile_size")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps=9"], "--steps .*--mode interpolate, not reconstruct: remove"),
        (["--tiles=off", "--tile_size=64"], "--tile_size 64 has no effect with --tiles off: remove"),
    ],
)
def test_flag_without_effect_is_refused(flags, message):
    with pytest.raises(UserError, match=f"^{message}"):
        parse_infer_flags([*WORDS, "image.png", *flags])


def test_file_name_that_starts_with_a_minus_can_be_given():
    with pytest.raises(UsageError, match="--input: expected at least one argument"):
        parse_infer_flags([*WORDS, "-rf.jpg"])
    assert parse_infer_flags([*WORDS[:-1], "--input=-rf.jpg"]).input == ("-rf.jpg",)
