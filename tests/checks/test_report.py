"""The report: complete and ordered text, valid JSON."""

import json

import pytest

from tests.harness.machines import DESKTOP, NO_CARD, WITHOUT_TORCH, changed, folder
from vae.checks.report import SCHEMA_VERSION, as_json, as_text, exit_code
from vae.checks.table import GROUPS, PASS, Result, judge


@pytest.mark.parametrize("facts", [DESKTOP, NO_CARD, WITHOUT_TORCH])
def test_every_check_and_group_is_in_the_text(facts):
    checks = judge(facts)
    text = as_text(checks)
    for group in GROUPS.values():
        assert f"\n{group}\n" in text
    for check in checks:
        assert check.title in text
        if check.status not in ("pass", "skip"):
            assert check.remedy in text  # on one line, to be copied
    assert text.isascii()


def test_remedies_of_failures_come_first_and_once():
    lines = as_text(judge(WITHOUT_TORCH)).splitlines()
    assert lines[:3] == ["To do first:", "    ./setup.sh", ""]
    assert "failed" in lines[-1]


def test_summary_counts():
    assert "0 failed, 0 warnings" in as_text(judge(DESKTOP))
    assert "1 warnings" in as_text(judge(NO_CARD))


def test_long_texts_are_wrapped():
    check = Result("torch.loads", "PyTorch loads", PASS, "word " * 60)
    assert all(len(line) <= 100 for line in as_text([check]).splitlines())


def test_json():
    checks = judge(NO_CARD)
    content = json.loads(as_json(NO_CARD, checks, exit_code(checks, strict=True)))
    assert content["schema_version"] == SCHEMA_VERSION == 2
    assert (content["ok"], content["exit_code"]) == (True, 3)
    assert [check["id"] for check in content["checks"]] == [check.id for check in checks]
    assert set(content["checks"][0]) == {"id", "group", "title", "status", "found", "expected", "remedy"}
    assert content["environment"]["torch_files"]["version"] == "2.14.0+cu130"


def test_json_of_a_file_name_that_is_not_utf8():
    odd = folder("--output_dir", "./a b'ü\udcff")
    facts = changed(DESKTOP, folders=(odd, DESKTOP.folders[1]))
    text = as_json(facts, judge(facts), 0)
    assert text.isascii()
    assert json.loads(text)["environment"]["folders"][0]["path"] == "./a b'ü\udcff"
