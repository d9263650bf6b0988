"""Flags of infer_vae.py and export_vae.py that have no effect are refused; unusual file names are not."""

import pytest

from vae.config.trained_vae_flags import parse_export_flags, parse_infer_flags
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


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--average_by score", "--average_by score needs several VAEs"),
        ("--scores 1", "--scores needs --average_by score"),
        ("--vae a b --average_by score --scores 1", "--scores has 1 value for 2 --vae"),
        ("--shift_factor 0.1", "--shift_factor needs --scaling_factor"),
        ("--scaling_factor -1", "--scaling_factor -1.0 is not a scaling"),
        ("--scaling_factor nan", "--scaling_factor nan is not a finite number"),
        ("--fold_scaling sd", "--fold_scaling needs --data_path"),
        ("--fold_scaling sd --data_path d --scaling_factor 1", "omit --scaling_factor"),
        ("--per_channel", "--per_channel needs --fold_scaling"),
        ("--output=", "--output has no value"),
        ("--vae=", "--vae has no value"),
        ("--image_size 4", "--image_size 4 is too small: give for example 256"),
    ],
)
def test_contradictions_are_named(more, said):
    with pytest.raises(UserError) as caught:
        parse_export_flags(["--vae", "a", "--output", "c", *more.split()])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
