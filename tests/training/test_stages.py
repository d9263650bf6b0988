"""Stages of new and resumed runs, rule by rule; --progressive equals the commands typed one by one."""

import dataclasses
import hashlib
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.harness.training_runs import assert_same, last_checkpoint, reproducible_records
from vae.config.options import Config, build
from vae.interop.checkpoint_file import Position, Stage
from vae.system.errors import UserError
from vae.training.run import train
from vae.training.run_folder import LOCK_NAME
from vae.training.stages import StageSteps, current_stage, first_stages, resumed_stages, shorten_stage

SMALL = {"channels": (8, 16, 16, 16), "norm_groups": 4}


def config(**given) -> Config:
    return build({**SMALL, **given})


def resumed(stages: list[Stage], position: Position, checkpoint: dict | None = None, **given):
    """Stages and position of a command that resumes with the `given` flags and these inherited values."""
    given = {"resume_from": "checkpoint_epoch_N.pt", **given}
    last = current_stage(stages, position.epoch) or stages[-1]
    inherited = {"image_size": last.image_size, "batch_size": last.batch_size, "num_epochs": last.num_epochs}
    return resumed_stages(stages, position, config(**{**inherited, **(checkpoint or {}), **given}), given)


FIRST = Stage(0, 25, 512, 32)
DONE = Position(epoch=25, step=100, images=3200)
STARTED = Position(epoch=10, images_in_epoch=64, step=42, images=1344)


def test_new_run_has_one_stage_or_those_of_progressive():
    assert first_stages(config(image_size=512, num_epochs=25, batch_size=32)) == [FIRST]
    listed = first_stages(config(progressive="512:25:32,1024:50:16,2048:25:4"))
    assert listed == [FIRST, Stage(25, 50, 1024, 16), Stage(75, 25, 2048, 4)]


def test_current_stage_is_the_first_with_epochs_left():
    listed = [FIRST, Stage(25, 50, 1024, 16)]
    found = [current_stage(listed, epoch) for epoch in (0, 24, 25, 74, 75)]
    assert found == [listed[0], listed[0], listed[1], listed[1], None]


def test_shortened_stage_moves_the_later_stages():
    stages = [FIRST, Stage(25, 50, 1024, 16), Stage(75, 25, 2048, 4)]
    short = Stage(25, 10, 1024, 16)
    assert shorten_stage(stages, stages[1], 35) == ([FIRST, short, Stage(35, 25, 2048, 4)], short)


# ---- optimizer steps of a stage -----------------------------------------------------------------------


def test_steps_count_images_of_all_processes_and_accumulated_batches():
    steps = StageSteps.of(Stage(2, 3, 32, 4), num_images=50, accumulation_steps=2, world_size=3)
    assert (steps.local_images, steps.images) == (8, 24)
    assert (steps.per_epoch, steps.total) == (2, 6)  # the last 2 images of an epoch are not used
    assert (steps.first_epoch, steps.num_epochs) == (2, 3)


def test_steps_done_start_at_zero_in_each_stage():
    steps = StageSteps.of(Stage(2, 3, 32, 4), num_images=50, accumulation_steps=2, world_size=3)
    assert steps.done(Position(epoch=2, images_in_epoch=0, step=99)) == 0
    assert steps.done(Position(epoch=2, images_in_epoch=24)) == 1
    assert steps.done(Position(epoch=4, images_in_epoch=24)) == 5
    assert steps.done(Position(epoch=5)) == steps.total


def test_epoch_is_done_after_its_last_full_step():
    steps = StageSteps.of(Stage(0, 1, 32, 4), num_images=18, accumulation_steps=1, world_size=1)
    found = [steps.epoch_is_done(Position(images_in_epoch=images)) for images in (0, 12, 16, 18)]
    assert found == [False, False, True, True]  # 4 steps; the position may come from smaller batches


def test_set_smaller_than_a_step_has_no_steps():
    steps = StageSteps.of(Stage(0, 5, 32, 4), num_images=7, accumulation_steps=2, world_size=1)
    assert (steps.per_epoch, steps.total) == (0, 0)


# ---- stages of a resumed run --------------------------------------------------------------------------


NEXT, LAST = Stage(25, 50, 1024, 16), Stage(75, 25, 2048, 4)
SKIPPED = dataclasses.replace(STARTED, epoch=11, images_in_epoch=0)  # the rest of an epoch
LATEST: dict[str, Any] = {"resume_from": "latest"}
NEW_STAGE = {**LATEST, "new_stage": True, "num_epochs": 5}


@pytest.mark.parametrize(
    ("stages", "position", "given", "expected", "at"),
    [
        # an unfinished stage is finished
        ([FIRST], STARTED, {}, [FIRST], STARTED),
        ([FIRST], STARTED, {"image_size": 512}, [FIRST], STARTED),
        ([FIRST], STARTED, {"profile": "standard"}, [FIRST], STARTED),  # its image size is not a flag
        ([FIRST], STARTED, LATEST, [FIRST], STARTED),
        ([FIRST], STARTED, {"num_epochs": 40}, [Stage(0, 40, 512, 32)], STARTED),
        ([FIRST], STARTED, {"num_epochs": 11}, [Stage(0, 11, 512, 32)], STARTED),
        ([FIRST], STARTED, {"batch_size": 8}, [Stage(0, 25, 512, 8)], STARTED),
        (
            *([FIRST, NEXT, LAST], STARTED, {"num_epochs": 30}),  # later stages move
            *([Stage(0, 30, 512, 32), Stage(30, 50, 1024, 16), Stage(80, 25, 2048, 4)], STARTED),
        ),
        # a finished one is followed by another
        ([FIRST], DONE, {"num_epochs": 50}, [FIRST, Stage(25, 50, 512, 32)], DONE),
        ([FIRST], DONE, {"image_size": 1024, "batch_size": 16, "num_epochs": 50}, [FIRST, NEXT], DONE),
        (
            *([FIRST, NEXT], Position(epoch=75), {"image_size": 2048, "batch_size": 4, "num_epochs": 25}),
            *([FIRST, NEXT, LAST], Position(epoch=75)),
        ),
        # another image size begins a stage in any case, instead of the later ones
        (
            *([FIRST], STARTED, {"image_size": 1024, "num_epochs": 50}),
            *([Stage(0, 11, 512, 32), Stage(11, 50, 1024, 32)], SKIPPED),
        ),
        (
            *([FIRST], Position(), {"image_size": 1024, "num_epochs": 50}),
            *([Stage(0, 50, 1024, 32)], Position()),
        ),
        (
            *([FIRST, NEXT], Position(epoch=20), {"image_size": 256, "num_epochs": 3}),
            *([Stage(0, 20, 512, 32), Stage(20, 3, 256, 32)], Position(epoch=20)),
        ),
        # latest begins a stage only with --new_stage
        ([FIRST], DONE, {**LATEST, "num_epochs": 25, "image_size": 512}, [FIRST], DONE),
        ([FIRST], DONE, NEW_STAGE, [FIRST, Stage(25, 5, 512, 32)], DONE),
        ([FIRST], DONE, {**NEW_STAGE, "image_size": 1024}, [FIRST, Stage(25, 5, 1024, 32)], DONE),
        (
            *([FIRST], STARTED, {**NEW_STAGE, "image_size": 1024}),
            *([Stage(0, 11, 512, 32), Stage(11, 5, 1024, 32)], SKIPPED),
        ),
        ([FIRST], STARTED, {**NEW_STAGE, "num_epochs": 25}, [FIRST], STARTED),
    ],
)
def test_stages_of_a_resumed_run(stages, position, given, expected, at):
    assert resumed(stages, position, **given) == (expected, at)


@pytest.mark.parametrize("position", [STARTED, DONE])
def test_latest_with_another_image_size_is_an_error(position):
    with pytest.raises(UserError, match=r"--image_size 1024 .* 512.*--new_stage"):
        resumed([FIRST], position, **LATEST, image_size=1024)


def test_fewer_epochs_than_started_is_an_error():
    with pytest.raises(UserError, match=r"--num_epochs 10 .* 11 epochs .*raise it"):
        resumed([FIRST], STARTED, num_epochs=10)
    assert resumed([FIRST], Position(epoch=10, step=40), num_epochs=10)[0] == [Stage(0, 10, 512, 32)]


PLAN = "512:25:32,1024:50:16"


def test_repeated_progressive_list_resumes_at_the_position():
    listed = [FIRST, Stage(25, 50, 1024, 16)]
    for position in (Position(), STARTED, DONE, Position(epoch=30, images_in_epoch=16)):
        assert resumed(listed, position, progressive=PLAN, resume_from="latest") == (listed, position)


def test_progressive_list_may_follow_a_plain_run_and_change_later_stages():
    assert resumed([FIRST], DONE, progressive=PLAN)[0] == [FIRST, Stage(25, 50, 1024, 16)]
    stages, _ = resumed([FIRST, Stage(25, 50, 1024, 16)], DONE, progressive="512:25:32,768:10:8")
    assert stages == [FIRST, Stage(25, 10, 768, 8)]


@pytest.mark.parametrize("listed", ["512:20:32,1024:50:16", "256:25:32", "512:25:16,1024:50:16"])
def test_progressive_list_that_contradicts_trained_stages_is_an_error(listed):
    with pytest.raises(UserError, match=rf"--progressive .*{listed.split(',')[0]}.* 512:25:32.*repeat"):
        resumed([FIRST], DONE, progressive=listed)


def test_progressive_list_without_a_started_stage_is_an_error():
    with pytest.raises(UserError, match=r"--progressive .*fewer stages.*repeat the whole list"):
        resumed([FIRST, Stage(25, 50, 1024, 16)], Position(epoch=26), progressive="512:25:32")


def test_progressive_list_resumes_after_a_stage_that_stopped_early():
    stopped = [Stage(0, 12, 512, 32), Stage(12, 50, 1024, 16)]
    position = Position(epoch=15, step=60)
    given = {"progressive": PLAN, "resume_from": "latest"}
    assert resumed(stopped, position, early_stopping=3, **given) == (stopped, position)
    with pytest.raises(UserError, match=r"--progressive .*repeat the list"):
        resumed(stopped, position, **given)


# ---- real runs ----------------------------------------------------------------------------------------


STATE = ("model", "ema", "optimizers", "update", "position", "history", "stages")


@pytest.fixture
def in_folder(tiny, tmp_path):
    """A function that gives the options of a run into a folder of this name."""
    return lambda name: {**tiny, "output_dir": str(tmp_path / name), "log_freq": 1}


@pytest.mark.slow
def test_progressive_equals_the_commands_typed_one_by_one(in_folder, tmp_path):
    """Three stages: 2 epochs, 3 more, 1 more."""
    assert train({**in_folder("one"), "progressive": "16:2:4,32:3:3,40:1:2"}) == 0
    typed, folder = in_folder("typed"), tmp_path / "typed"
    for size, batch, epochs, resume in ((16, 4, 2, None), (32, 3, 3, 2), (40, 2, 1, 5)):
        given = {**typed, "image_size": size, "batch_size": batch, "num_epochs": epochs}
        if resume:
            given["resume_from"] = str(folder / f"checkpoint_epoch_{resume}.pt")
            del given["output_dir"]  # the checkpoint implies it
        assert train(given) == 0
    one, two = (last_checkpoint(tmp_path / name) for name in ("one", "typed"))
    assert one["position"]["epoch"] == 6
    assert_same({name: one[name] for name in STATE}, {name: two[name] for name in STATE}, "state")
    found, expected = (
        reproducible_records(tmp_path / name, "train", "validation") for name in ("typed", "one")
    )
    assert_same(found, expected, "records")
    kept = {path.name for path in folder.glob("*.pt")}
    assert kept >= {f"checkpoint_epoch_{n}.pt" for n in (2, 5, 6)}
    weights = [tmp_path / name / "vae" / "diffusion_pytorch_model.safetensors" for name in ("one", "typed")]
    assert_same(load_file(weights[0]), load_file(weights[1]), "weights")  # the metadata name the run


def files(folder):
    """Hash and modification time of every file, except the lock: it names the command that ran last."""
    return {
        path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in folder.rglob("*.*")
        if path.name != LOCK_NAME
    }


@pytest.mark.slow
def test_resuming_a_finished_run_changes_no_file(in_folder, tmp_path, capsys):
    given, folder = {**in_folder("run"), "num_epochs": 1}, tmp_path / "run"
    assert train({**given, "resume_from": "latest"}) == 0  # no folder yet: a new run
    assert "contains no checkpoint yet" in capsys.readouterr().out
    before = files(folder)
    assert train({**given, "resume_from": "latest"}) == 0
    assert "the run is finished (1 epochs); nothing to do" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"--image_size 16 .*--new_stage"):
        train({**given, "resume_from": "latest", "image_size": 16})
    with pytest.raises(UserError, match=r"--output_dir .*run contains another run.*--resume_from latest"):
        train(given)
    assert files(folder) == before
    assert train({**given, "resume_from": "latest", "new_stage": True, "image_size": 16}) == 0
    stages = last_checkpoint(folder)["stages"]
    assert [(s["first_epoch"], s["image_size"]) for s in stages] == [(0, 32), (1, 16)]
    capsys.readouterr()
    assert train({**given, "resume_from": str(folder / "checkpoint_epoch_1.pt"), "max_steps": 4}) == 0
    assert "1 newer or unreadable checkpoints (checkpoint_epoch_2.pt) are moved to" in capsys.readouterr().out


@pytest.mark.slow
def test_early_stopping_ends_the_stage_and_the_next_one_starts(in_folder, tmp_path):
    """With a learning rate of 0, no validation is better than that of the start."""
    given = {**in_folder("run"), "learning_rate": 0.0, "early_stopping": 2, "progressive": "32:9:4,16:9:4"}
    assert train(given) == 0
    stages = last_checkpoint(tmp_path / "run")["stages"]
    assert [(s["first_epoch"], s["num_epochs"]) for s in stages] == [(0, 2), (2, 2)]
    assert train({**given, "resume_from": "latest"}) == 0
