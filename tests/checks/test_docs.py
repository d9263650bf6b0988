"""docs/check_compatibility.md describes every check and every flag."""

import re
from dataclasses import fields

from tests.harness.machines import DESKTOP
from tests.harness.runs import ROOT
from vae.checks.cuda_builds import BLACKWELL_DRIVER, FIRST_DRIVER
from vae.checks.judge import judge
from vae.checks.system import CHECKPOINT_BYTES, CHECKPOINTS
from vae.config.check_flags import CheckConfig
from vae.system.host import GIB

PAGE = (ROOT / "docs/check_compatibility.md").read_text(encoding="utf-8")


def test_every_check_is_described():
    table = PAGE.split("## What is checked")[1].split("## Which driver")[0]
    described = set()
    for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        names = re.findall(r"`([\w.*]+)`", row)
        group = names[0].split(".")[0]
        described |= {f"{group}{name}" if name.startswith(".") else name for name in names}
    ids = {"software.*" if check.id.startswith("software.") else check.id for check in judge(DESKTOP)}
    assert described == ids


def test_every_flag_is_described():
    assert {f"--{item.name}" for item in fields(CheckConfig)} <= set(re.findall(r"--\w+", PAGE))


def test_figures_match_the_code():
    assert f"{CHECKPOINTS} x {CHECKPOINT_BYTES / GIB:.2f} GiB" in PAGE
    for branch in (FIRST_DRIVER[12], FIRST_DRIVER[13], BLACKWELL_DRIVER):
        assert f"| {branch} or newer |" in PAGE
