"""A missing or mistyped mode, value or flag of prepare_data.py is named with its remedy."""

import pytest

from vae.config.prepare_flags import parse_prepare_flags
from vae.system.errors import EXIT_USAGE, UsageError

FOLDERS = ["--input_dir", "a", "--output_dir", "b"]


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        (["--mode", "proprocess"], ("--mode proprocess", "did you mean preprocess?", "analyze")),
        (["--mode=validat"], ("--mode validat", "did you mean validate?")),
        (["--mode", "preprocess"], ("--input_dir, --output_dir are missing", "--help")),
        (["--mode", "split"], ("--input_dir is missing",)),
        (["--mode", "analyze", "--mode", "split"], ("--mode analyze and --mode split", "one mode")),
        (
            ["--mode", "xyz"],
            ("--mode xyz", "choose one of preprocess, validate, shard, analyze, split, demo"),
        ),
        (["--mod", "preprocess"], ("--mod:", "did you mean --mode?")),
        (["--targetsize", "512"], ("--targetsize", "did you mean --target_size?")),
        (["--mode", "preprocess", "--targetsize", "512"], ("--targetsize", "did you mean --target_size?")),
        (["--mode", "preprocess", "--inputdir", "a"], ("--inputdir", "did you mean --input_dir?")),
        (["--mode", "validate", "--no-csw"], ("--no-csw", "did you mean --no-csv?")),
        (
            ["--mode", "validate", "--targetsize", "512"],
            ("--targetsize", "did you mean --target_size?", "--mode preprocess and demo"),
        ),
        (
            ["--mode", "preprocess", *FOLDERS, "--resize_mode", "covr"],
            ("--resize_mode covr", "did you mean cover?", "stretch"),
        ),
    ],
)
def test_mistake_names_the_remedy(words, tokens):
    with pytest.raises(UsageError) as caught:
        parse_prepare_flags(words)
    message = str(caught.value)
    assert all(token in message for token in tokens), message
    assert "\n" not in message
    assert caught.value.exit_code == EXIT_USAGE


def test_flags_of_a_mode_are_not_suggestions_if_they_are_right():
    config = parse_prepare_flags(["--mode", "validate", "--input_dir", "a", "--no-csv", "--min_size=8"])
    assert (config.csv, config.min_size) == (False, 8)
