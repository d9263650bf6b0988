"""Stages: what a command goes on with, rule by rule; --progressive is the commands typed one by one."""

import dataclasses

import pytest

from tests.training.test_resume import assert_same, records
from vae.config.errors import UserError
from vae.config.options import Config, build
from vae.interop.checkpoint_file import load_checkpoint
from vae.training.run import train
from vae.training.stages import Position, Stage, current_stage, first_stages, resumed_stages

SMALL = {"channels": (8, 16, 16, 16), "norm_groups": 4}


def config(**given) -> Config:
    return build({**SMALL, **given})


def resumed(stages: list[Stage], position: Position, checkpoint: dict | None = None, **given):
    """What a command with the `given` flags goes on with; `checkpoint` holds inherited values."""
    given = {"resume_from": "checkpoint_epoch_N.pt", **given}
    last = current_stage(stages, position.epoch) or stages[-1]
    inherited = {"image_size": last.image_size, "batch_size": last.batch_size, "num_epochs": last.num_epochs}
    return resumed_stages(stages, position, config(**{**inherited, **(checkpoint or {}), **given}), given)


FIRST = Stage(0, 25, 512, 32)
DONE = Position(epoch=25, step=100, images=3200)
BEGUN = Position(epoch=10, images_in_epoch=64, step=42, images=1344)


def test_a_new_run_has_one_stage_or_the_listed_ones():
    assert first_stages(config(image_size=512, num_epochs=25, batch_size=32)) == [FIRST]
    listed = first_stages(config(progressive="512:25:32,1024:50:16,2048:25:4"))
    assert listed == [FIRST, Stage(25, 50, 1024, 16), Stage(75, 25, 2048, 4)]


def test_the_current_stage_is_the_one_with_epochs_left():
    listed = [FIRST, Stage(25, 50, 1024, 16)]
    assert [current_stage(listed, epoch) for epoch in (0, 24, 25, 74, 75)] == [
        *[listed[0]] * 2,
        *[listed[1]] * 2,
        None,
    ]


def test_an_unfinished_stage_is_finished():
    assert resumed([FIRST], BEGUN) == ([FIRST], BEGUN)
    assert resumed([FIRST], BEGUN, image_size=512) == ([FIRST], BEGUN)


def test_num_epochs_extends_or_shortens_an_unfinished_stage():
    assert resumed([FIRST], BEGUN, num_epochs=40)[0] == [Stage(0, 40, 512, 32)]
    assert resumed([FIRST], BEGUN, num_epochs=11)[0] == [Stage(0, 11, 512, 32)]
    later = [FIRST, Stage(25, 50, 1024, 16), Stage(75, 5, 2048, 4)]
    moved = [Stage(0, 30, 512, 32), Stage(30, 50, 1024, 16), Stage(80, 5, 2048, 4)]
    assert resumed(later, BEGUN, num_epochs=30) == (moved, BEGUN)


def test_fewer_epochs_than_begun_is_an_error():
    with pytest.raises(UserError, match="--num_epochs 10 is less than the 11 epochs this stage has begun"):
        resumed([FIRST], BEGUN, num_epochs=10)
    assert resumed([FIRST], Position(epoch=10, step=40), num_epochs=10)[0] == [Stage(0, 10, 512, 32)]


def test_a_batch_size_changes_the_unfinished_stage():
    assert resumed([FIRST], BEGUN, batch_size=8)[0] == [Stage(0, 25, 512, 8)]


def test_a_finished_stage_is_followed_by_another():
    stages, position = resumed([FIRST], DONE, num_epochs=50)
    assert stages == [FIRST, Stage(25, 50, 512, 32)]
    assert position == DONE


def test_another_image_size_begins_a_stage():
    stages, position = resumed([FIRST], DONE, image_size=1024, batch_size=16, num_epochs=50)
    assert (stages, position) == ([FIRST, Stage(25, 50, 1024, 16)], DONE)
    after = Position(epoch=75, step=300)
    stages, _ = resumed(stages, after, image_size=2048, batch_size=4, num_epochs=25)
    assert stages == [FIRST, Stage(25, 50, 1024, 16), Stage(75, 25, 2048, 4)]


def test_another_image_size_within_an_epoch_leaves_out_what_is_left_of_it():
    stages, position = resumed([FIRST], BEGUN, image_size=1024, num_epochs=50)
    assert stages == [Stage(0, 11, 512, 32), Stage(11, 50, 1024, 32)]
    assert position == dataclasses.replace(BEGUN, epoch=11, images_in_epoch=0)


def test_another_image_size_before_the_first_step_replaces_the_stage():
    stages, _ = resumed([FIRST], Position(), image_size=1024, num_epochs=50)
    assert stages == [Stage(0, 50, 1024, 32)]


def test_another_image_size_leaves_out_the_stages_to_come():
    stages, _ = resumed([FIRST, Stage(25, 50, 1024, 16)], Position(epoch=20), image_size=256, num_epochs=3)
    assert stages == [Stage(0, 20, 512, 32), Stage(20, 3, 256, 32)]


def test_a_profile_begins_no_stage():
    """Its image size is no explicit flag: the checkpoint's beats it."""
    assert resumed([FIRST], BEGUN, profile="standard") == ([FIRST], BEGUN)


def test_latest_goes_on_or_is_done_but_begins_nothing():
    assert resumed([FIRST], BEGUN, resume_from="latest") == ([FIRST], BEGUN)
    stages, position = resumed([FIRST], DONE, resume_from="latest", num_epochs=25, image_size=512)
    assert current_stage(stages, position.epoch) is None
    for position in (BEGUN, DONE):
        with pytest.raises(
            UserError, match=r"--image_size 1024 is not the 512 of the run.*only with --new_stage"
        ):
            resumed([FIRST], position, resume_from="latest", image_size=1024)


def test_latest_with_new_stage_begins_one():
    given = {"resume_from": "latest", "new_stage": True, "num_epochs": 5}
    assert resumed([FIRST], DONE, **given)[0] == [FIRST, Stage(25, 5, 512, 32)]
    assert resumed([FIRST], DONE, **given, image_size=1024)[0] == [FIRST, Stage(25, 5, 1024, 32)]
    assert resumed([FIRST], BEGUN, **given, image_size=1024)[0] == [
        Stage(0, 11, 512, 32),
        Stage(11, 5, 1024, 32),
    ]
    assert resumed([FIRST], BEGUN, **{**given, "num_epochs": 25})[0] == [FIRST]


PLAN = "512:25:32,1024:50:16"


def test_a_repeated_list_goes_on_where_it_was():
    listed = [FIRST, Stage(25, 50, 1024, 16)]
    for position in (Position(), BEGUN, DONE, Position(epoch=30, images_in_epoch=16)):
        assert resumed(listed, position, progressive=PLAN, resume_from="latest") == (listed, position)


def test_a_list_may_go_on_from_a_plain_run_and_change_what_is_to_come():
    assert resumed([FIRST], DONE, progressive=PLAN)[0] == [FIRST, Stage(25, 50, 1024, 16)]
    stages, _ = resumed([FIRST, Stage(25, 50, 1024, 16)], DONE, progressive="512:25:32,768:10:8")
    assert stages == [FIRST, Stage(25, 10, 768, 8)]


@pytest.mark.parametrize("listed", ["512:20:32,1024:50:16", "256:25:32", "512:25:16,1024:50:16"])
def test_a_list_that_contradicts_what_was_trained_is_an_error(listed):
    with pytest.raises(UserError, match=r"--progressive says \S+ where the checkpoint has trained 512:25:32"):
        resumed([FIRST], DONE, progressive=listed)


def test_a_list_without_a_stage_that_was_begun_is_an_error():
    with pytest.raises(UserError, match="--progressive names fewer stages"):
        resumed([FIRST, Stage(25, 50, 1024, 16)], Position(epoch=26), progressive="512:25:32")


def test_a_list_goes_on_after_a_stage_that_stopped_early():
    stopped = [Stage(0, 12, 512, 32), Stage(12, 50, 1024, 16)]
    position = Position(epoch=15, step=60)
    given = {"progressive": PLAN, "resume_from": "latest"}
    assert resumed(stopped, position, early_stopping=3, **given) == (stopped, position)
    with pytest.raises(UserError, match="repeat the list"):
        resumed(stopped, position, **given)


# ---- the same with real runs --------------------------------------------------------------------------


def checkpoint(folder, name: str) -> dict:
    return load_checkpoint(folder / name)


def state(content: dict) -> dict:
    return {name: content[name] for name in ("model", "ema", "optimizers", "update", "position", "history")}


@pytest.fixture
def in_folder(tiny, tmp_path):
    """Options of a run in a folder of the given name."""
    return lambda name: {**tiny, "output_dir": str(tmp_path / name), "log_freq": 1}


@pytest.mark.slow
def test_progressive_is_the_commands_typed_one_by_one(in_folder, tmp_path):
    """The guide's three stages, scaled down: 2 epochs, 3 more, 1 more."""
    assert train({**in_folder("one"), "progressive": "16:2:4,32:3:3,40:1:2"}) == 0
    typed, folder = in_folder("typed"), tmp_path / "typed"
    for size, batch, epochs, resume in ((16, 4, 2, None), (32, 3, 3, 2), (40, 2, 1, 5)):
        given = {**typed, "image_size": size, "batch_size": batch, "num_epochs": epochs}
        if resume:
            given["resume_from"] = str(folder / f"checkpoint_epoch_{resume}.pt")
            del given["output_dir"]  # it is the checkpoint's
        assert train(given) == 0
    one, two = (checkpoint(tmp_path / name, "checkpoint_epoch_6.pt") for name in ("one", "typed"))
    assert one["stages"] == two["stages"]
    assert_same(state(one), state(two), "state")
    assert records(tmp_path / "one", "train", "validation") == records(folder, "train", "validation")
    kept = {path.name for path in folder.glob("*.pt")}
    assert kept >= {f"checkpoint_epoch_{n}.pt" for n in (2, 5, 6)}
    weights = [tmp_path / name / "vae" / "diffusion_pytorch_model.safetensors" for name in ("one", "typed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.slow
def test_a_finished_run_says_so_and_nothing_changes(in_folder, tmp_path, capsys):
    given, folder = {**in_folder("run"), "num_epochs": 1}, tmp_path / "run"
    assert train({**given, "resume_from": "latest"}) == 0  # an empty folder: a new run
    assert "holds no checkpoint yet, so a new run begins" in capsys.readouterr().out
    before = {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()
    }
    assert train({**given, "resume_from": "latest"}) == 0
    assert "the run is finished (1 epochs); nothing to do" in capsys.readouterr().out
    with pytest.raises(UserError, match="only with --new_stage"):
        train({**given, "resume_from": "latest", "image_size": 16})
    with pytest.raises(UserError, match="holds another run"):
        train(given)
    after = {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()
    }
    assert after == before
    assert train({**given, "resume_from": "latest", "new_stage": True, "image_size": 16}) == 0
    stages = checkpoint(folder, "checkpoint_epoch_2.pt")["stages"]
    assert [(s["first_epoch"], s["image_size"]) for s in stages] == [(0, 32), (1, 16)]
    capsys.readouterr()
    assert train({**given, "resume_from": str(folder / "checkpoint_epoch_1.pt"), "max_steps": 4}) == 0
    assert "holds newer checkpoints of this run: checkpoint_epoch_2.pt" in capsys.readouterr().out


@pytest.mark.slow
def test_a_folder_of_another_run_is_left_alone(in_folder, tmp_path):
    assert train({**in_folder("one"), "max_steps": 1}) == 0
    assert train({**in_folder("two"), "max_steps": 1}) == 0
    source = str(tmp_path / "one" / "checkpoint_step_1.pt")
    with pytest.raises(UserError, match=r"--output_dir .*two holds another run"):
        train({**in_folder("two"), "resume_from": source})
    assert train({**in_folder("three"), "resume_from": source, "max_steps": 2}) == 0
    assert (tmp_path / "three" / "checkpoint_step_2.pt").exists()


@pytest.mark.slow
def test_early_stopping_ends_the_stage_and_the_next_begins(in_folder, tmp_path):
    """With a learning rate of 0 no validation is better than the first."""
    given = {**in_folder("run"), "learning_rate": 0.0, "early_stopping": 2, "progressive": "32:9:4,16:9:4"}
    assert train(given) == 0
    stages = checkpoint(tmp_path / "run", "checkpoint_epoch_6.pt")["stages"]
    assert [(s["first_epoch"], s["num_epochs"]) for s in stages] == [(0, 3), (3, 3)]
    assert train({**given, "resume_from": "latest"}) == 0
