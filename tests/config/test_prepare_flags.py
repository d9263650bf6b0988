"""A missing or mistyped mode, value or flag of prepare_data.py is named with its remedy."""

from dataclasses import fields

import pytest

from vae.config.prepare_flags import CONFIG_OF, parse_prepare_flags
from vae.system.errors import EXIT_USAGE, UsageError

FOLDERS = ["--input_dir", "a", "--output_dir", "b"]


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        (["--mode", "proprocess"], ("--mode", "'proprocess'", "preprocess", "analyze")),
        (["--mode", "preprocess"], ("required: --input_dir, --output_dir",)),
        (["--mod", "preprocess"], ("--mode is missing", "preprocess")),
        (["--mode", "preprocess", "--targetsize", "512"], ("--targetsize", "did you mean --target_size?")),
        (["--mode", "validate", "--target_size", "512"], ("unknown flag --target_size",)),
        (["--mode", "preprocess", *FOLDERS, "--resize_mode", "covr"], ("--resize_mode", "'covr'", "stretch")),
    ],
)
def test_mistake_names_the_remedy(words, tokens):
    with pytest.raises(UsageError) as caught:
        parse_prepare_flags(words)
    message = str(caught.value)
    assert all(token in message for token in tokens), message
    assert "\n" not in message
    assert caught.value.exit_code == EXIT_USAGE


def help_of(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_prepare_flags(argv)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_describes_the_modes_and_help_all_lists_their_flags(capsys):
    short, everything = help_of(["--help"], capsys), help_of(["--help_all"], capsys)
    assert "--mode MODE --help" in short
    for mode, config in CONFIG_OF.items():
        assert f"  {mode} " in short
        text = everything[everything.index(f"usage: prepare_data.py --mode {mode} ") :]
        assert all(item.name in text.split("\nusage:")[0] for item in fields(config))


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        (["--mode", "validate", "--input_dir", "a", "--part", "0/2"], ("--part 0/2", "--rows_dir")),
        (["--mode", "shard", *FOLDERS, "--join_on", "url"], ("--join_on url", "--join")),
        (["--mode", "shard", *FOLDERS, "--part", "2/2"], ("--part 2/2", "15/16")),
        (["--mode", "shard", *FOLDERS, "--part", "0/2", "--limit", "5"], ("--limit 5", "--part")),
        (["--mode", "index", "--input", "a", "--output_dir", "b", "--val_split", "1"], ("--val_split 1",)),
    ],
)
def test_flags_that_do_not_fit_together_are_one_line(words, tokens):
    with pytest.raises(UsageError) as caught:
        parse_prepare_flags(words)
    assert all(token in str(caught.value) for token in tokens), caught.value
