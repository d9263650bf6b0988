"""Runs with --optimizer muon: exact after a stop, the same on two processes."""

from typing import Any

import pytest

from tests.harness.training_runs import SHORT, assert_same_result, assert_weights_close, last_checkpoint
from vae.system.errors import UserError
from vae.training.run import train


@pytest.fixture
def given(tiny, tmp_path) -> dict[str, Any]:
    return {**tiny, **SHORT, "optimizer": "muon", "output_dir": str(tmp_path / "run")}


def momenta(content: dict[str, Any]) -> dict[str, Any]:
    states = content["optimizers"][0]["state"]
    return {str(n): state["momentum_buffer"] for n, state in states.items() if "momentum_buffer" in state}


@pytest.mark.slow
def test_stopped_and_resumed_run_equals_the_uninterrupted_one(given, tmp_path):
    given |= {"adversarial_weight": 0.5, "disc_channels": 8, "disc_layers": 1, "disc_start": 1}
    given |= {"channels_last": True, "num_epochs": 2}
    assert train(given) == 0
    stopped = {**given, "output_dir": str(tmp_path / "stopped")}
    assert train({**stopped, "max_steps": 3}) == 0
    of_folder = {"output_dir": stopped["output_dir"], "resume_from": "latest"}  # the optimizer is in the file
    assert train({"device": "cpu", "num_workers": "0", **of_folder, "max_steps": 5}) == 0
    assert train({**stopped, "resume_from": "latest"}) == 0
    assert_same_result(tmp_path / "stopped", tmp_path / "run")
    found = last_checkpoint(tmp_path / "run")
    assert (found["config"]["optimizer"], len(momenta(found)) > 0) == ("muon", True)
    assert [len(optimizer["param_groups"]) for optimizer in found["optimizers"]] == [3, 1]


@pytest.mark.parametrize(("before", "after"), [("adamw", "muon"), ("muon", "adamw")])
def test_resuming_with_another_optimizer_is_an_error(given, before, after):
    assert train({**given, "optimizer": before, "max_steps": 1}) == 0
    with pytest.raises(
        UserError, match=f"--optimizer {after} contradicts .* {before}: .*--init_from"
    ) as caught:
        train({**given, "optimizer": after, "resume_from": "latest"})
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_layout_may_change_when_a_run_is_resumed(given, tmp_path):
    for layout in (True, False):
        folder = {**given, "output_dir": str(tmp_path / f"{layout}"), "num_epochs": 2}
        assert train({**folder, "max_steps": 2}) == 0
        assert train({**folder, "resume_from": "latest", "channels_last": layout}) == 0
    assert_weights_close(*(last_checkpoint(tmp_path / name) for name in ("True", "False")))
