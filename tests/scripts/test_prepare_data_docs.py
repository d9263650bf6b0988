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


def test_help_without_a_mode_lists_the_flags_of_every_mode(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_prepare_flags(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for mode, config in CONFIG_OF.items():
        text = printed[printed.index(f"usage: prepare_data.py --mode {mode} ") :]
        assert all(f"--{item.name}" in text.split("\n\nusage:")[0] for item in fields(config))
