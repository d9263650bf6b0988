"""All checks on whole machines: a good machine passes, and every machine gets the same checks."""

from dataclasses import asdict

import pytest

from tests.harness.machines import DESKTOP, NO_CARD, WINDOWS, WITHOUT_TORCH, changed, statuses
from vae.checks.judge.all_checks import GROUPS, judge
from vae.checks.results import FAIL, WARN, exit_code


@pytest.mark.parametrize("facts", [DESKTOP, WINDOWS], ids=["linux", "windows"])
def test_good_machine_passes_without_remedies(facts):
    assert statuses(facts, FAIL) == statuses(facts, WARN) == set()
    assert exit_code(judge(facts), strict=True) == 0
    assert not any(check.remedy for check in judge(facts))


@pytest.mark.parametrize("facts", [DESKTOP, WINDOWS, NO_CARD, WITHOUT_TORCH])
def test_every_machine_gets_the_same_checks(facts):
    ids = [check.id for check in judge(facts)]
    assert ids == [check.id for check in judge(DESKTOP)]
    assert len(set(ids)) == len(ids)
    assert {check.group for check in judge(facts)} == set(GROUPS)


@pytest.mark.parametrize("facts", [DESKTOP, WINDOWS, NO_CARD, WITHOUT_TORCH])
def test_judge_is_a_pure_function_of_the_facts(facts):
    before = asdict(facts)
    assert judge(facts) == judge(facts)
    assert asdict(facts) == before


def test_failures_and_warnings_have_found_and_expected():
    for facts in (NO_CARD, WITHOUT_TORCH, changed(DESKTOP, smi={"driver": "550.54.14"})):
        for check in judge(facts):
            if check.status in (FAIL, WARN):
                assert check.expected, check.id
                assert check.found, check.id
