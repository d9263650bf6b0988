"""`latest` follows the run that began last, not the furthest checkpoint of a branch that was abandoned."""

import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tests.harness.runs import TINY
from tests.harness.steps import before_steps
from tests.harness.training_runs import SHORT, records
from vae.interop.checkpoint_file import load_checkpoint
from vae.interop.run_files import RUN_NAME
from vae.training.checkpoints.store import load_newest
from vae.training.provenance import Lineage, read_last_run
from vae.training.run import train


def test_line_is_the_run_and_its_ancestors_up_to_where_they_were_left():
    first = Lineage.new()
    second = first.continued(9)
    third = second.continued(12)
    assert len({first.id, second.id, third.id}) == 3
    assert third.ancestors == ((first.id, 9), (second.id, 12))
    assert third.contains(first.id, 9)
    assert not third.contains(first.id, 10)
    assert third.contains(second.id, 12)
    assert not third.contains(second.id, 13)
    assert third.contains(third.id, 1000)
    assert Lineage.from_plain(asdict(third)) == third


# ---- real runs: 4 steps per epoch, a checkpoint after each step ------------------------------------------

RECIPE = {**TINY, **SHORT, "num_epochs": 2, "checkpoint_steps": 1, "keep_checkpoints": 20}


@pytest.fixture
def given(image_folder, tmp_path) -> dict:
    return {**RECIPE, "data_path": str(image_folder), "output_dir": str(tmp_path / "run")}


@pytest.fixture(scope="module")
def trained(image_folder, tmp_path_factory) -> Path:
    """The folder of a run that reached step 6, was resumed from step 2, and is at step 3 now."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("lineage") / "run"
    given = {**RECIPE, "data_path": str(image_folder), "output_dir": str(folder)}
    assert train({**given, "max_steps": 6}) == 0
    checkpoint = str(folder / "checkpoint_step_2.pt")
    assert train({**given, "resume_from": checkpoint, "max_steps": 3}) == 0
    return folder


@pytest.fixture
def abandoned(trained, tmp_path) -> Path:
    """A copy of `trained`."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.mark.slow
def test_latest_follows_the_run_that_was_resumed_last(given, abandoned, capsys):
    first, second = (
        load_checkpoint(abandoned / f"checkpoint_step_{step}.pt")["run"]["id"] for step in (2, 3)
    )
    assert load_newest(abandoned)[0].name == "checkpoint_step_3.pt"
    capsys.readouterr()
    assert train({**given, "resume_from": "latest", "max_steps": 5}) == 0
    assert f"from {abandoned / 'checkpoint_step_3.pt'}, step 3" in capsys.readouterr().out
    saved = load_checkpoint(abandoned / "checkpoint_step_5.pt")["run"]
    assert [list(one) for one in saved["ancestors"]] == [[first, 2], [second, 3]]
    runs = [(r["step"], r["id"], r["parent"]) for r in records(abandoned, "run")]
    assert runs == [(0, first, ""), (2, second, first), (3, saved["id"], second)]
    assert [r["step"] for r in records(abandoned, "train")] == [1, 2, 3, 4, 5]


def test_run_that_was_killed_before_its_first_checkpoint_is_the_last_one(given, abandoned):
    def kill(*_arguments):
        raise KeyboardInterrupt

    with before_steps(kill), pytest.raises(KeyboardInterrupt):
        train({**given, "resume_from": str(abandoned / "checkpoint_step_1.pt")})
    assert load_newest(abandoned)[0].name == "checkpoint_step_1.pt"


def test_abandoned_checkpoint_is_taken_only_if_no_other_is_left(given, abandoned, capsys):
    for step in (1, 2, 3):
        (abandoned / f"checkpoint_step_{step}.pt").unlink()
    assert load_newest(abandoned)[0].name == "checkpoint_step_6.pt"
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"WARNING: no checkpoint of the last run in {abandoned} is left")
    assert "checkpoint_step_6.pt" in line


@pytest.mark.parametrize("content", [None, b"", b"\0", b"7", b'{"id": "a"}', b"[" * 100_000])
def test_without_the_last_run_the_furthest_checkpoint_is_taken(abandoned, content):
    (abandoned / RUN_NAME).unlink()
    if content is not None:
        (abandoned / RUN_NAME).write_bytes(content)
    assert read_last_run(abandoned) == (None, None)
    assert load_newest(abandoned)[0].name == "checkpoint_step_6.pt"
