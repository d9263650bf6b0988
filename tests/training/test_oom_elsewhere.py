"""Memory that runs out outside of a step: in set-up, validation, sample grids and export."""

from pathlib import Path

import pytest
import torch

from tests.harness.faults import Fault, injected
from tests.harness.runs import TINY
from tests.harness.training_runs import assert_same_result, last_checkpoint, records, reproducible_records
from vae.system.errors import UserError
from vae.training import run, setup
from vae.training.run import train
from vae.training.stages import Position

pytestmark = pytest.mark.slow


@pytest.fixture
def given(tiny) -> dict:
    """6 steps; validations of one batch of 4 images before them and after the 3rd and the 6th."""
    return {**tiny, "log_freq": 1}


@pytest.fixture(scope="module")
def undisturbed(image_folder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    torch.set_num_threads(1)
    assert train({**TINY, "log_freq": 1, "data_path": str(image_folder), "output_dir": str(folder)}) == 0
    return folder


def test_validation_is_repeated_with_smaller_batches(given, undisturbed, tmp_path, capsys):
    capsys.readouterr()
    with injected(Fault("fail", "eval_pass", nth=2)):  # the validation after step 3
        assert train(given) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "out of memory" in line]
    assert "validation batch lowered to 2" in line
    folders = tmp_path / "run", undisturbed
    pair = [[line["psnr"] for line in records(folder, "validation")] for folder in folders]
    assert pair[0] == pytest.approx(pair[1], rel=1e-5)


def test_validation_without_memory_saves_and_is_one_line(given, undisturbed, tmp_path):
    with (
        injected(Fault("fail", "eval_pass", nth=2, times=1000)),
        pytest.raises(UserError, match="out of memory in a validation") as caught,
    ):
        train(given)
    for token in ("--image_size", "--resume_from latest"):
        assert token in str(caught.value)
    assert "\n" not in str(caught.value)
    assert Position(**last_checkpoint(tmp_path / "run")["position"]) == Position(0, 12, 3, 12)
    assert train({**given, "resume_from": "latest"}) == 0  # the validation is repeated
    assert_same_result(tmp_path / "run", undisturbed)


def test_sample_grid_without_memory_is_left_out(given, undisturbed, tmp_path, capsys):
    with injected(Fault("fail", "eval_pass", nth=2, times=1)):  # the first image of the grid after step 2
        assert train({**given, "save_samples_freq": 2}) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "out of memory" in line]
    assert "no sample grid of step 2" in line
    assert len(list((tmp_path / "run" / "samples").iterdir())) == 2  # after steps 4 and 6
    assert reproducible_records(tmp_path / "run", "train") == reproducible_records(undisturbed, "train")


def without_memory(*_arguments, **_options):
    raise torch.OutOfMemoryError("injected\nwith more lines")


@pytest.mark.parametrize(
    ("module", "function", "steps"), [(setup, "begin_state", 0), (run, "write_export", 6)]
)
def test_set_up_and_export_without_memory_are_one_line(given, tmp_path, monkeypatch, module, function, steps):
    monkeypatch.setattr(module, function, without_memory)
    with pytest.raises(UserError, match=r"out of memory outside of a step \(injected\)") as caught:
        train(given)
    assert "\n" not in str(caught.value)
    assert ("--resume_from latest" in str(caught.value)) == bool(steps)
    if steps:
        assert last_checkpoint(tmp_path / "run")["position"]["step"] == steps
    monkeypatch.undo()
    assert train({**given, "resume_from": "latest"}) == 0
