"""The report: complete and ordered text, colour only on request, valid JSON."""

import io
import json

import pytest

from tests.harness.machines import DESKTOP, NO_CARD, WITHOUT_TORCH, changed, folder
from vae.checks.judge import GROUPS, judge
from vae.checks.report import SCHEMA_VERSION, as_json, as_text, wants_colour
from vae.checks.table import PASS, Result, exit_code


@pytest.mark.parametrize("facts", [DESKTOP, NO_CARD, WITHOUT_TORCH])
def test_every_check_and_group_is_in_the_text(facts):
    checks = judge(facts)
    text = as_text(checks, colour=False)
    for group in GROUPS.values():
        assert f"\n{group}\n" in text
    for check in checks:
        assert check.title in text
        if check.status not in ("pass", "skip"):
            assert check.remedy in text  # on one line, to be copied
    assert "\033" not in text
    assert text.isascii()


def test_remedies_of_failures_come_first_and_once():
    lines = as_text(judge(WITHOUT_TORCH), colour=False).splitlines()
    assert lines[:3] == ["To do first:", "    ./setup.sh", ""]
    assert "failed" in lines[-1]


def test_summary_counts():
    assert "0 failed, 0 warnings" in as_text(judge(DESKTOP), colour=False)
    assert "1 warnings" in as_text(judge(NO_CARD), colour=False)


def test_long_texts_are_wrapped():
    check = Result("torch.loads", "PyTorch loads", PASS, "word " * 60)
    assert all(len(line) <= 100 for line in as_text([check], colour=False).splitlines())


def test_colour_changes_no_text():
    checks = judge(NO_CARD)
    coloured = as_text(checks, colour=True)
    assert "\033[33mWARN\033[0m" in coloured
    for code in ("\033[31m", "\033[32m", "\033[33m", "\033[2m", "\033[0m"):
        coloured = coloured.replace(code, "")
    assert coloured == as_text(checks, colour=False)


def test_colour_depends_on_terminal_and_environment(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert wants_colour(Terminal())
    assert not wants_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_colour(Terminal())
    monkeypatch.setenv("NO_COLOR", "")
    assert wants_colour(Terminal())  # empty means unset: no-color.org
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_colour(Terminal())


def test_json():
    checks = judge(NO_CARD)
    content = json.loads(as_json(NO_CARD, checks, exit_code(checks, strict=True)))
    assert content["schema_version"] == SCHEMA_VERSION == 1
    assert (content["ok"], content["exit_code"]) == (True, 3)
    assert [check["id"] for check in content["checks"]] == [check.id for check in checks]
    assert set(content["checks"][0]) == {"id", "group", "title", "status", "found", "expected", "remedy"}
    assert content["environment"]["torch_files"]["version"] == "2.14.0+cu130"


def test_json_of_a_file_name_that_is_not_utf8():
    odd = folder("the runs", "--output_dir", "./a b'ü\udcff")
    facts = changed(DESKTOP, folders=(odd, *DESKTOP.folders[1:]))
    text = as_json(facts, judge(facts), 0)
    assert text.isascii()
    assert json.loads(text)["environment"]["folders"][0]["path"] == "./a b'ü\udcff"
