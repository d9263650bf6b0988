"""Randomly damaged and malicious files give an image or a reason, in bounded time and memory."""

import json
import sys
from functools import partial

import pytest

from benchmarks.fuzz_decoding import fuzz
from tests.harness.image_bytes import png
from tests.harness.image_kinds import detailed, encoded
from tests.harness.runs import run_script
from vae.config.prepare_flags import ReadingConfig
from vae.prepare.check_file import check_file
from vae.prepare.pool import Failure, Limits, run_each


def test_random_damage_gives_an_image_or_a_reason(tmp_path):
    figures = fuzz(180, seed=1, num_workers=1, folder=tmp_path)
    assert sum(figures["outcomes"].values()) == 180
    assert not {"crashed", "hung", "out_of_memory"} & set(figures["outcomes"])
    assert figures["outcomes"]["accepted"] < 120
    assert {"damaged", "truncated"} <= set(figures["outcomes"])


@pytest.mark.slow
def test_two_thousand_damaged_files_stay_within_memory():
    """Runs in its own process, because the largest child of this process may belong to another test."""
    figures = json.loads(run_script("benchmarks/fuzz_decoding.py", "--count", "2000").stdout)
    assert sum(figures["outcomes"].values()) == 2000
    assert not {"crashed", "hung", "out_of_memory"} & set(figures["outcomes"])
    assert figures["largest_process_mib"] < 1000


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no memory limit per process")
def test_bomb_reaches_the_memory_limit_and_the_next_image_is_read(tmp_path):
    """150 MB of pixels from a file of 150 kB, within --max_pixels, in a process limited to 128 MiB."""
    (tmp_path / "bomb.png").write_bytes(png(7000, 7000, 8, 2, bytes(7000 * (1 + 7000 * 3))))
    detailed(0).save(tmp_path / "good.png")
    check = partial(check_file, ReadingConfig(input_dir=str(tmp_path)))
    names = ["bomb.png", "good.png", "bomb.png", "good.png"]
    results = list(run_each(check, names, num_workers=1, limits=Limits(30, 0.125)))
    reasons = [result.reason for _, result in results]
    assert reasons == ["out_of_memory", "", "out_of_memory", ""]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no memory limit per process")
def test_slow_image_reaches_the_time_limit(tmp_path):
    """A JPEG with nearly the largest allowed product of scans and pixels; each scan takes some 10 ms."""
    whole = encoded(detailed(7, 2400, 2400), "JPEG", progressive=True)
    last = whole.rindex(b"\xff\xda")
    (tmp_path / "slow.jpg").write_bytes(whole[:last] + whole[last:-2] * 480 + b"\xff\xd9")
    detailed(0).save(tmp_path / "good.png")
    check = partial(check_file, ReadingConfig(input_dir=str(tmp_path)))
    found = dict(run_each(check, ["slow.jpg", "good.png"], num_workers=1, limits=Limits(1.0, None)))
    assert isinstance(found["slow.jpg"], Failure)
    assert found["slow.jpg"].reason == "hung"
    assert found["good.png"].reason == ""
