"""Stages of new and resumed runs, rule by rule; --progressive equals the commands typed one by one."""

import dataclasses
import hashlib
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.harness.training_runs import assert_same, last_checkpoint, reproducible_records
from vae.config.options import Config, build
from vae.system.errors import UserError
from vae.training.checkpoints import stage_ends
from vae.training.run import train
from vae.training.run_folder import LOCK_NAME
from vae.training.stages import (
    Position,
    Stage,
    StageSteps,
    current_stage,
    end_stage,
    first_stages,
    is_started,
    resumed_stages,
)

SMALL = {"channels": (8, 16, 16, 16), "norm_groups": 4}


def config(**given) -> Config:
    return build({**SMALL, **given})


def resumed(stages: list[Stage], position: Position, checkpoint: dict | None = None, **given):
    """Stages and position of a command that resumes with the `given` flags and these inherited values."""
    given = {"resume_from": "checkpoint_epoch_N.pt", **given}
    last = current_stage(stages, position) or stages[-1]
    inherited = {"image_size": last.image_size, "batch_size": last.batch_size, **last.length}
    if "num_epochs" in given or "num_steps" in given:
        del inherited["num_epochs"], inherited["num_steps"]  # as vae.config.resolve does
    return resumed_stages(stages, position, config(**{**inherited, **(checkpoint or {}), **given}), given)


FIRST = Stage(0, 25, 512, 32)
DONE = Position(epoch=25, step=100, images=3200)
IN_STEPS = Stage(0, None, 512, 32, num_steps=900)
STARTED = Position(epoch=10, images_in_epoch=64, step=42, images=1344)


def test_new_run_has_one_stage_or_those_of_progressive():
    assert first_stages(config(image_size=512, num_epochs=25, batch_size=32)) == [FIRST]
    listed = first_stages(config(progressive="512:25:32,1024:50:16,2048:25:4"))
    assert listed == [FIRST, Stage(25, 50, 1024, 16), Stage(75, 25, 2048, 4)]
    assert first_stages(config(image_size=512, num_steps=900, batch_size=32)) == [IN_STEPS]
    listed = first_stages(config(progressive="512:900steps:32,1024:50:16"))
    assert listed == [IN_STEPS, Stage(0, 50, 1024, 16)]  # where it begins is not known


def test_current_stage_is_the_first_with_epochs_left():
    listed = [FIRST, Stage(25, 50, 1024, 16)]
    found = [current_stage(listed, Position(epoch)) for epoch in (0, 24, 25, 74, 75)]
    assert found == [listed[0], listed[0], listed[1], listed[1], None]


def test_later_stages_begin_where_a_stage_ends():
    """Early, within an epoch or after its last step: the rest of an epoch is skipped."""
    stages = [FIRST, Stage(25, 50, 1024, 16), Stage(75, 25, 2048, 4)]
    short, later = Stage(25, 10, 1024, 16), Stage(35, 25, 2048, 4, first_step=700)
    assert end_stage(stages, stages[1], Position(epoch=35, step=700)) == ([FIRST, short, later], short)
    ended, later = Stage(0, 11, 512, 32, num_steps=42), Stage(11, 50, 1024, 16, first_step=42)
    for stage in (FIRST, IN_STEPS):
        assert end_stage([stage, NEXT], stage, STARTED) == ([ended, later], ended)
    assert ended.is_done(STARTED)
    assert not IN_STEPS.is_done(STARTED)
    assert not is_started(later, STARTED)
    assert current_stage([ended, later], STARTED) == later
    assert stage_ends([ended, later], STARTED) >= {"checkpoint_step_42.pt"}


# ---- optimizer steps of a stage -----------------------------------------------------------------------


def test_steps_count_images_of_all_processes_and_accumulated_batches():
    steps = StageSteps.of(Stage(2, 3, 32, 4), num_images=50, accumulation_steps=2, world_size=3)
    assert (steps.local_images, steps.images) == (8, 24)
    assert (steps.per_epoch, steps.total) == (2, 6)  # the last 2 images of an epoch are not used


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


def test_steps_of_a_stage_in_steps_do_not_depend_on_the_number_of_images():
    """Its epochs may be longer than the stage, or change when a run is resumed with another batch size."""
    stage = Stage(2, None, 32, 4, num_steps=30, first_step=100)
    for images in (8, 4000):
        steps = StageSteps.of(stage, images, accumulation_steps=1, world_size=1)
        assert steps.total == 30
        found = [steps.done(Position(2, *at)) for at in ((0, 100), (4, 101), (8, 130))]
        assert found == [0, 1, 30]
        assert [steps.are_done(Position(2, 8, step)) for step in (129, 130)] == [False, True]
    assert steps.done(Position(1, 12, step=100)) == 0  # the stage before has ended within an epoch


def due(stage: Stage, num_images: int, val_images: int, val_freq: int | None = None) -> list[int]:
    """The steps of a stage from step 0 on after which a validation is due."""
    steps = StageSteps.of(stage, num_images, accumulation_steps=1, world_size=1)
    found, position = [], Position()
    for step in range(steps.total):
        position = Position(position.epoch, position.images_in_epoch + steps.images, step + 1)
        if steps.validation_is_due(position, val_freq, val_images):
            found.append(step + 1)
        if steps.epoch_is_done(position):
            position = Position(position.epoch + 1, 0, step + 1)
    return found


def test_validations_take_about_a_tenth_of_the_time():
    """A step of 16 images costs 32 forward passes: a validation of 160 is due after 50 of them at least."""
    epochs = Stage(0, 10, 32, 16)
    assert due(epochs, 16 * 17, 30) == [17 * epoch for epoch in range(1, 11)]  # as with --val_freq 1
    assert due(epochs, 16 * 17, 160) == [51, 102, 153, 170]
    assert due(epochs, 16 * 17, 160, val_freq=2) == [34, 68, 102, 136, 170]
    assert due(epochs, 16 * 17, 16_000) == [170]  # only the end
    steps = Stage(0, None, 32, 16, num_steps=100)
    assert due(steps, 16 * 17, 160) == [51, 100]
    assert due(steps, 16 * 17, 160, val_freq=1) == [17, 34, 51, 68, 85, 100]
    assert due(steps, 16, 30) == [*range(10, 101, 10)]  # epochs of one step
    assert due(steps, 16_000, 30) == [*range(10, 101, 10)]  # an epoch has 1000 steps
    assert due(steps, 16_000, 160) == [50, 100]
    assert due(steps, 16_000, 160, val_freq=1) == [100]
    short = Stage(0, None, 32, 16, num_steps=3)
    assert due(short, 16_000, 0) == [1, 2, 3]  # without validation images
    assert due(short, 16_000, 160) == [3]


# ---- stages of a resumed run --------------------------------------------------------------------------


NEXT, LAST = Stage(25, 50, 1024, 16), Stage(75, 25, 2048, 4)
ENDED = Stage(0, 11, 512, 32, num_steps=42)  # within an epoch
SKIPPED = dataclasses.replace(STARTED, epoch=11, images_in_epoch=0)  # the rest of an epoch
LATEST: dict[str, Any] = {"resume_from": "latest"}
NEW_STAGE = {**LATEST, "new_stage": True, "num_epochs": 5}


@pytest.mark.parametrize(
    ("stages", "position", "given", "expected", "at"),
    [
        # an unfinished stage is finished
        ([FIRST], STARTED, {}, [FIRST], STARTED),
        ([FIRST], STARTED, {"profile": "standard"}, [FIRST], STARTED),  # its image size is not a flag
        ([FIRST], STARTED, LATEST, [FIRST], STARTED),
        ([FIRST], STARTED, {"num_epochs": 40}, [Stage(0, 40, 512, 32)], STARTED),
        ([FIRST], STARTED, {"batch_size": 8}, [Stage(0, 25, 512, 8)], STARTED),
        (
            *([FIRST, NEXT, LAST], STARTED, {"num_epochs": 30}),  # later stages move
            *([Stage(0, 30, 512, 32), Stage(30, 50, 1024, 16), Stage(80, 25, 2048, 4)], STARTED),
        ),
        # a finished one is followed by another
        ([FIRST], DONE, {"num_epochs": 50}, [FIRST, Stage(25, 50, 512, 32, first_step=100)], DONE),
        (
            *([FIRST], DONE, {"image_size": 1024, "batch_size": 16, "num_epochs": 50}),
            *([FIRST, Stage(25, 50, 1024, 16, first_step=100)], DONE),
        ),
        # in steps
        ([IN_STEPS], STARTED, {}, [IN_STEPS], STARTED),
        ([IN_STEPS], STARTED, {"num_steps": 42}, [Stage(0, None, 512, 32, 42)], STARTED),
        ([FIRST], STARTED, {"num_steps": 50}, [Stage(0, None, 512, 32, 50)], STARTED),
        ([FIRST], DONE, {"num_steps": 50}, [FIRST, Stage(25, None, 512, 32, 50, 100)], DONE),
        ([ENDED], STARTED, {"num_steps": 50}, [ENDED, Stage(11, None, 512, 32, 50, 42)], SKIPPED),
        ([ENDED], STARTED, {**LATEST, "num_steps": 50}, [ENDED], STARTED),
        # another image size begins a stage in any case, instead of the later ones
        (
            *([FIRST], STARTED, {"image_size": 1024, "num_epochs": 50}),
            *([ENDED, Stage(11, 50, 1024, 32, first_step=42)], SKIPPED),
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
        ([FIRST], DONE, NEW_STAGE, [FIRST, Stage(25, 5, 512, 32, first_step=100)], DONE),
        (
            *([FIRST], DONE, {**NEW_STAGE, "image_size": 1024}),
            *([FIRST, Stage(25, 5, 1024, 32, first_step=100)], DONE),
        ),
        (
            *([FIRST], STARTED, {**NEW_STAGE, "image_size": 1024}),
            *([ENDED, Stage(11, 5, 1024, 32, first_step=42)], SKIPPED),
        ),
    ],
)
def test_stages_of_a_resumed_run(stages, position, given, expected, at):
    assert resumed(stages, position, **given) == (expected, at)


@pytest.mark.parametrize("position", [STARTED, DONE])
def test_latest_with_another_image_size_is_an_error(position):
    with pytest.raises(UserError, match=r"--image_size 1024 .* 512.*--new_stage"):
        resumed([FIRST], position, **LATEST, image_size=1024)


def test_a_shorter_stage_than_was_trained_is_an_error():
    with pytest.raises(UserError, match=r"--num_steps 41 .*42 steps .*raise it"):
        resumed([IN_STEPS], STARTED, num_steps=41)
    with pytest.raises(UserError, match=r"--num_epochs 10 .* 11 epochs .*raise it"):
        resumed([FIRST], STARTED, num_epochs=10)
    assert resumed([FIRST], Position(epoch=10, step=40), num_epochs=10)[0] == [Stage(0, 10, 512, 32)]


PLAN = "512:25:32,1024:50:16"


def test_repeated_progressive_list_resumes_at_the_position():
    listed = [FIRST, Stage(25, 50, 1024, 16)]
    for position in (Position(), STARTED, Position(epoch=25), Position(epoch=30, images_in_epoch=16)):
        assert resumed(listed, position, progressive=PLAN, resume_from="latest") == (listed, position)
    plan = "512:42steps:32,1024:50:16"
    listed = [ENDED, Stage(11, 50, 1024, 16, first_step=42)]
    for position in (STARTED, Position(11, 16, 43)):
        assert resumed(listed, position, progressive=plan, resume_from="latest") == (listed, position)
    listed = [Stage(0, None, 512, 32, 900), Stage(0, 50, 1024, 16)]
    assert resumed(listed, STARTED, progressive=plan.replace("42", "900")) == (listed, STARTED)


def test_progressive_list_may_follow_a_plain_run_and_change_later_stages():
    assert resumed([FIRST], DONE, progressive=PLAN)[0] == [FIRST, Stage(25, 50, 1024, 16, first_step=100)]
    stages, _ = resumed([FIRST, Stage(25, 50, 1024, 16)], DONE, progressive="512:25:32,768:10:8")
    assert stages == [FIRST, Stage(25, 10, 768, 8, first_step=100)]


@pytest.mark.parametrize(
    "listed", ["512:20:32,1024:50:16", "256:25:32", "512:25:16,1024:50:16", "512:25steps:32"]
)
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
@pytest.mark.parametrize(
    ("listed", "ends", "kept"),
    [
        ("16:2:4,32:3:3,40:1:2", (2, 5, 6), ("epoch_2", "epoch_5", "epoch_6")),
        # 3 and 4 steps per epoch: two stages end within one, and the third is shorter than one
        ("16:5steps:4,32:7steps:3,40:4steps:2", (1, 3, 4), ("step_5", "step_12", "step_16")),
    ],
)
def test_progressive_equals_the_commands_typed_one_by_one(in_folder, tmp_path, listed, ends, kept):
    assert train({**in_folder("one"), "progressive": listed}) == 0
    typed, folder = in_folder("typed"), tmp_path / "typed"
    del typed["num_epochs"]
    for number, part in enumerate(listed.split(",")):
        size, length, batch = part.split(":")
        name = "num_steps" if "steps" in length else "num_epochs"
        given = {
            **typed,
            "image_size": int(size),
            "batch_size": int(batch),
            name: int(length.removesuffix("steps")),
        }
        if number:
            given["resume_from"] = str(folder / f"checkpoint_{kept[number - 1]}.pt")
            del given["output_dir"]  # the checkpoint implies it
        assert train(given) == 0
    one, two = (last_checkpoint(tmp_path / name) for name in ("one", "typed"))
    assert one["position"]["epoch"] == ends[-1]
    assert_same({name: one[name] for name in STATE}, {name: two[name] for name in STATE}, "state")
    found, expected = (
        reproducible_records(tmp_path / name, "train", "validation") for name in ("typed", "one")
    )
    assert_same(found, expected, "records")
    assert {path.name for path in folder.glob("*.pt")} >= {f"checkpoint_{name}.pt" for name in kept}
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
def test_an_older_checkpoint_without_a_step_to_make_is_refused_and_nothing_is_moved(in_folder, tmp_path):
    folder = tmp_path / "run"
    assert train({**in_folder("run"), "num_epochs": 1, "checkpoint_steps": 1}) == 0
    before = files(folder)
    older = {"resume_from": str(folder / "checkpoint_step_2.pt"), "max_steps": 1}
    with pytest.raises(UserError, match=r"--max_steps 1 .*is newer.*export_vae"):
        train({**older, "output_dir": str(folder)})
    assert files(folder) == before


@pytest.mark.slow
def test_resuming_a_finished_run_changes_no_file(in_folder, tmp_path, capsys):
    given, folder = {**in_folder("run"), "num_epochs": 1}, tmp_path / "run"
    assert train({**given, "resume_from": "latest"}) == 0  # no folder yet: a new run
    assert "contains no checkpoint yet" in capsys.readouterr().out
    before = files(folder)
    assert train({**given, "resume_from": "latest"}) == 0
    line = capsys.readouterr().out
    assert "the run is finished (1 epochs); nothing to do" in line
    assert "--new_stage" in line
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
