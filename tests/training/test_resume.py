"""A run stopped and taken up again is the undisturbed run, bit for bit (CPU, fp32, one thread)."""

import json
import os
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.harness.runs import TINY
from vae.config.resolve import PER_COMMAND
from vae.interop.checkpoint_file import load_checkpoint
from vae.training import loop
from vae.training.run import train

# Two stages of 2 epochs of 10 steps; the discriminator begins at step 3.
RECIPE = {
    **TINY,
    "progressive": "32:2:2,16:2:2",
    "batch_size": 2,
    "val_split": 0.1,
    "log_freq": 1,
    "adversarial_weight": 0.5,
    "disc_channels": 8,
    "disc_layers": 1,
    "disc_start": 3,
    "disc_ramp": 10,
    "keep_checkpoints": 100,
}
MEASURED = ("images_per_second", "data_wait_share", "memory_peak_gib")  # of the machine, not of the training


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> dict:
    """RECIPE on 22 images, 20 of them to train on."""
    folder = tmp_path_factory.mktemp("twenty_two")
    random = np.random.default_rng(1)
    for index in range(22):
        coarse = Image.fromarray(random.integers(0, 256, (5, 6, 3), dtype=np.uint8))
        coarse.resize((48, 40), Image.Resampling.BICUBIC).save(folder / f"{index:02d}.png")
    return {**RECIPE, "data_path": str(folder)}


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory) -> Path:
    """The folder of the run that nothing stops: 40 steps."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert train({**recipe, "output_dir": str(folder)}) == 0
    assert last(folder)["position"]["step"] == 40
    return folder


def last(folder: Path) -> dict:
    return load_checkpoint(folder / "checkpoint_epoch_4.pt")


def assert_same(one, other, where: str) -> None:
    """Equal to the last bit, all the way down."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    else:
        assert one == other, where


def assert_same_checkpoint(one: dict, other: dict) -> None:
    """Everything but what each command says of itself, with every part there."""
    for content in (one, other):
        content["config"] = {k: v for k, v in content["config"].items() if k not in PER_COMMAND}
    assert one["discriminator"]
    assert one["ema"]
    assert [len(optimizer["state"]) > 0 for optimizer in one["optimizers"]] == [True, True]
    assert one["running_sq_norms"].gt(0).all()
    assert_same(one, other, "checkpoint")


def records(folder: Path, *kinds: str) -> list[dict]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k not in MEASURED} for line in lines if line["kind"] in kinds]


def assert_same_run(folder: Path, undisturbed: Path, stops: Iterable[int] = ()) -> None:
    """The same checkpoint and records; each of the `stops` by --max_steps has measured what it shipped."""
    assert_same_checkpoint(last(folder), last(undisturbed))
    assert_same(records(folder, "train"), records(undisturbed, "train"), "train")
    expected, found = records(undisturbed, "validation"), records(folder, "validation")
    steps = {record["step"] for record in expected}
    assert {record["step"] for record in found} == steps | set(stops)
    assert_same([record for record in found if record["step"] in steps], expected, "validation")


def run_in_parts(recipe: dict, folder: Path, stops: list[int]) -> None:
    given = {**recipe, "output_dir": str(folder)}
    for index, stop in enumerate([*stops, None]):
        part = {"resume_from": "latest"} if index else {}
        assert train({**given, **part, **({"max_steps": stop} if stop else {})}) == 0
        if stop:
            newest = max(folder.glob("checkpoint_*.pt"), key=lambda path: path.stat().st_mtime_ns)
            assert load_checkpoint(newest)["position"]["step"] == stop


@pytest.mark.slow
@pytest.mark.parametrize(
    "stops",
    [
        pytest.param([13, 27], id="within_epochs"),
        pytest.param([10], id="at_an_epoch_end", marks=pytest.mark.slow),
        pytest.param([20], id="at_the_stage_border"),
    ],
)
def test_resumed_run_is_the_undisturbed_run(recipe, undisturbed, tmp_path, stops):
    run_in_parts(recipe, tmp_path / "run", stops)
    assert_same_run(tmp_path / "run", undisturbed, stops)


@pytest.mark.slow
@pytest.mark.parametrize("persistent_workers", [True, False])
def test_decoding_processes_change_nothing(recipe, undisturbed, tmp_path, persistent_workers):
    recipe = {**recipe, "num_workers": "2", "persistent_workers": persistent_workers}
    run_in_parts(recipe, tmp_path / "run", [13, 27])
    whole = {k: v for k, v in last(undisturbed)["config"].items() if k != "persistent_workers"}
    content = last(tmp_path / "run")
    content["config"] = {k: v for k, v in content["config"].items() if k != "persistent_workers"}
    assert_same_checkpoint(content, {**last(undisturbed), "config": whole})
    assert_same(records(tmp_path / "run", "train"), records(undisturbed, "train"), "train")


@pytest.mark.slow
def test_many_stops(recipe, undisturbed, tmp_path):
    """Around the discriminator's first step, the end of an epoch, and the end of the run."""
    stops = [1, 2, 3, 4, 9, 11, 39]
    run_in_parts(recipe, tmp_path / "run", stops)
    assert_same_run(tmp_path / "run", undisturbed, stops)


def test_records_after_the_resumed_step_are_cut_off(recipe, undisturbed, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "run")
    given = {**recipe, "output_dir": str(tmp_path / "run")}
    del given["progressive"]
    checkpoint = str(tmp_path / "run" / "checkpoint_epoch_3.pt")
    assert (
        train({**given, "image_size": 16, "resume_from": checkpoint, "max_steps": 32, "num_epochs": 2}) == 0
    )
    steps = [record["step"] for record in records(tmp_path / "run", "train")]
    assert steps == list(range(1, 33))


@pytest.mark.slow
def test_saved_at_the_last_step_of_an_epoch(recipe, undisturbed, tmp_path, monkeypatch):
    """A save asked for in an epoch's last step holds the epoch's end still to come."""
    updates = []

    def update(*arguments):
        updates.append(1)
        if len(updates) == 9:  # read at the start of the next step
            os.kill(os.getpid(), signal.SIGUSR1)
        if len(updates) == 11:
            raise KeyboardInterrupt  # the process is killed before anything newer is saved
        return apply_update(*arguments)

    apply_update = loop.apply_update
    monkeypatch.setattr(loop, "apply_update", update)
    given = {**recipe, "output_dir": str(tmp_path / "run"), "checkpoint_freq": 2}
    with pytest.raises(KeyboardInterrupt):
        train(given)
    monkeypatch.setattr(loop, "apply_update", apply_update)
    assert [path.name for path in (tmp_path / "run").glob("*.pt")] == ["checkpoint_step_10.pt"]
    assert train({**given, "resume_from": "latest"}) == 0
    assert_same(last(tmp_path / "run")["model"], last(undisturbed)["model"], "model")


@pytest.mark.slow
def test_larger_batches_than_what_is_left_of_the_epoch(recipe, tmp_path):
    """18 of 20 images are done and a batch takes 16: the epoch ends, the next begins."""
    given = {**recipe, "output_dir": str(tmp_path / "run")}
    del given["progressive"]
    assert train({**given, "num_epochs": 2, "max_steps": 9}) == 0
    assert train({**given, "num_epochs": 2, "resume_from": "latest", "batch_size": 16}) == 0
    content = load_checkpoint(tmp_path / "run" / "checkpoint_epoch_2.pt")
    assert content["position"] == {"epoch": 2, "images_in_epoch": 0, "step": 10, "images": 34}


def test_max_steps_reached_stays_reached(recipe, tmp_path, capsys):
    given = {**recipe, "output_dir": str(tmp_path / "run"), "max_steps": 4}
    assert train(given) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert train({**given, "resume_from": "latest"}) == 0
    assert "--max_steps 4 allows: raise it to go on" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_run_killed_before_its_first_save_begins_again(recipe, tmp_path):
    folder = tmp_path / "run"
    given = {**recipe, "output_dir": str(folder), "max_steps": 2}
    assert train(given) == 0
    for path in folder.glob("checkpoint_*"):
        path.unlink()
    assert train({**given, "resume_from": "latest"}) == 0
    assert [record["step"] for record in records(folder, "train")] == [1, 2]


def test_a_run_killed_before_it_shipped_ships(recipe, undisturbed, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "run")
    weights = (tmp_path / "run" / "vae" / "diffusion_pytorch_model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "run" / "vae")
    assert train({**recipe, "output_dir": str(tmp_path / "run"), "resume_from": "latest"}) == 0
    assert (tmp_path / "run" / "vae" / "diffusion_pytorch_model.safetensors").read_bytes() == weights
    assert_same_run(tmp_path / "run", undisturbed)
