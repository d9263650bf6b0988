"""docs/prepare_data.md names every flag of every mode, with its default, and no other."""

import re

import pytest

from tests.harness.runs import ROOT
from vae.config.prepare_flags import FLAGS_OF, parser_of

TEXT = (ROOT / "docs" / "prepare_data.md").read_text(encoding="utf-8")
READING = ("preprocess", "validate", "analyze")


def section(title):
    return re.search(rf"^## {re.escape(title)}.*?(?=^## |\Z)", TEXT, re.S | re.M).group()


def documented(mode):
    """Flag: the last column of its row."""
    text = section(f"--mode {mode}") + (section("Flags of every mode") if mode in READING else "")
    rows = re.findall(r"^\| `(--\w+)[^|]*(?:\\\|[^|]*)*\|.*\| (.*?) \|$", text, re.M)
    return dict(rows)


@pytest.mark.parametrize("mode", FLAGS_OF)
def test_every_flag_stands_there_with_its_default(mode):
    rows = documented(mode)
    actions = {
        flag: action
        for flag, action in parser_of(mode)._option_string_actions.items()
        if flag.startswith("--") and not flag.startswith("--no-") and flag != "--help"
    }
    assert set(rows) == set(actions)
    for flag, action in actions.items():
        default = action.default
        if action.required or default is None:
            continue
        if isinstance(default, list):
            default = " ".join(map(str, default))
        if isinstance(default, bool):
            default = "on" if default else "off"
        assert rows[flag].split(";")[0] == str(default), flag
    for action in actions.values():
        assert action.help
