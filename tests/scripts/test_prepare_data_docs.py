"""docs/prepare_data.md lists exactly the flags of every mode, with their defaults."""

import re
from dataclasses import MISSING, fields

import pytest

from tests.harness.runs import ROOT
from vae.config.flags import default_text
from vae.config.prepare_flags import CONFIG_OF, ReadingConfig, parse_prepare_flags

TEXT = (ROOT / "docs" / "prepare_data.md").read_text(encoding="utf-8")


def section(title):
    return re.search(rf"^## {re.escape(title)}.*?(?=^## |\Z)", TEXT, re.S | re.M).group()


def documented(mode):
    """The last column of each row of the mode's tables, by flag."""
    text = section(f"--mode {mode}")
    if issubclass(CONFIG_OF[mode], ReadingConfig):
        text += section("Flags of every mode")
    return dict(re.findall(r"^\| `--(\w+)[^|]*(?:\\\|[^|]*)*\|.*\| (.*?) \|$", text, re.M))


@pytest.mark.parametrize("mode", CONFIG_OF)
def test_page_lists_every_flag_with_its_default(mode):
    rows = documented(mode)
    options = {item.name: item for item in fields(CONFIG_OF[mode])}
    assert set(rows) == set(options)
    for name, item in options.items():
        assert item.metadata["help"]
        if item.default is not MISSING and item.default is not None:
            assert rows[name].split(";")[0] == default_text(item), name


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
