"""A run that is killed at any moment is resumed as if nothing had happened, bit for bit."""

import pytest

from tests.harness.faults import KILLED, SAVE_POINTS, Fault, run_forked
from tests.harness.training_runs import assert_same_result

pytestmark = pytest.mark.slow
# 18 steps of 2 images with a save after each, so that every command makes progress before it is killed.
RECIPE = {"batch_size": 2, "num_epochs": 3, "checkpoint_steps": 1, "keep_checkpoints": 2, "log_freq": 1}
# Once per save, but each of its parts is written; a save removes its own record, then the one of the oldest.
NTH = {"save.write": 150, "save.remove_old_record": 3, "save.prune": 1}


def test_run_that_is_killed_at_every_point_of_a_save_equals_an_undisturbed_one(tiny, tmp_path):
    log = tmp_path / "output.txt"
    given = {**tiny, **RECIPE}
    assert run_forked({**given, "output_dir": str(tmp_path / "undisturbed")}, log=log) == [0], log.read_text()
    given["resume_from"] = "latest"
    for point in SAVE_POINTS:
        fault = Fault("kill", point, nth=NTH.get(point, 2))
        assert run_forked(given, fault, log=log) == [KILLED], log.read_text()
    assert run_forked(given, log=log) == [0], log.read_text()
    assert_same_result(tmp_path / "run", tmp_path / "undisturbed")
    assert not [*(tmp_path / "run").glob(".vae-scratch-*")]
