"""The checkpoints of a run: finding the newest, pruning, and what remains after a failed save."""

import errno
import os
import re
from pathlib import Path

import pytest
import torch

from tests.harness.checkpoints import checkpoint
from tests.harness.faults import run_forked
from tests.harness.training_runs import train_short
from vae.interop.checkpoint_file import load_checkpoint, record_path, save_checkpoint
from vae.system.errors import UserError
from vae.training import saver
from vae.training.checkpoints import abandon_newer, list_checkpoints, load_newest, prune, stage_ends
from vae.training.run import train
from vae.training.stages import Position, Stage


def put(folder: Path, name: str, step: int) -> Path:
    save_checkpoint(folder / name, checkpoint(step))
    return folder / name


def remaining(folder: Path) -> set[str]:
    """Names of the checkpoints in a folder that contains only checkpoints with their SHA-256 files."""
    found = {path.name for path in folder.glob("*.pt")}
    assert {path.name for path in folder.iterdir()} == found | {f"{name}.sha256" for name in found}
    return found


@pytest.fixture
def three(tmp_path) -> list[Path]:
    """Checkpoints of steps 10, 20 and 25; neither their names nor their file times are in that order."""
    paths = [put(tmp_path, "checkpoint_step_25.pt", 25), put(tmp_path, "checkpoint_epoch_2.pt", 20)]
    return [put(tmp_path, "checkpoint_epoch_1.pt", 10), *reversed(paths)]


def test_newest_checkpoint_has_the_most_steps(three, tmp_path, capsys):
    (tmp_path / "checkpoint_epoch_nine.pt").write_bytes(b"another file")
    assert list_checkpoints(tmp_path) == three[::-1]
    assert load_newest(tmp_path)[0] == three[2]
    assert capsys.readouterr().out == ""


def test_no_valid_checkpoint_is_an_error(three, tmp_path, capsys):
    for path in three:
        os.truncate(path, 100)
    with pytest.raises(UserError, match=r"--resume_from latest: none of the 3 checkpoints .* valid: restore"):
        load_newest(tmp_path)
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize("damage", ["truncated", "record"])
def test_damaged_newest_checkpoint_is_skipped_and_replaced(three, tmp_path, monkeypatch, capsys, damage):
    """Also with a bad sector under it or its SHA-256: the next older one is taken."""
    bad = three[2] if damage == "truncated" else record_path(three[2])
    plain_open = open

    def refuse(path, *arguments, **settings):
        if str(path) == str(bad):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return plain_open(path, *arguments, **settings)

    if damage == "truncated":
        os.truncate(bad, 700)
    else:
        monkeypatch.setattr("builtins.open", refuse)
    reason = f"{bad} is damaged" if damage == "truncated" else f"{bad} cannot be read: Input/output error"
    path, content = load_newest(tmp_path)
    assert (path, content["position"]["step"]) == (three[1], 20)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"skipped: {reason}")


STAGES = [Stage(0, 3, 32, 2), Stage(3, 5, 64, 2)]


def test_prune_keeps_the_best_the_last_of_each_stage_and_the_newest(tmp_path):
    for epoch in range(1, 8):
        put(tmp_path, f"checkpoint_epoch_{epoch}.pt", 10 * epoch)
    put(tmp_path, "checkpoint_step_65.pt", 65)
    apart = stage_ends(STAGES, Position(epoch=7, step=70)) | {"checkpoint_epoch_1.pt"}
    needed = {"checkpoint_epoch_4.pt", "checkpoint_epoch_7.pt"}
    removed = prune(tmp_path, 2, apart=apart, needed=needed)
    assert {path.name for path in removed} == {f"checkpoint_epoch_{n}.pt" for n in (2, 5, 6)}
    assert remaining(tmp_path) == {
        "checkpoint_epoch_1.pt",  # the best
        "checkpoint_epoch_4.pt",  # needed; the other needed one is among the newest
        "checkpoint_epoch_3.pt",  # the last of the first stage
        "checkpoint_step_65.pt",
        "checkpoint_epoch_7.pt",
    }


def test_prune_leaves_and_does_not_count_what_it_cannot_read(three, tmp_path):
    three[0].write_bytes(b"notes of a user")
    assert prune(tmp_path, 2, apart=set(), needed=set()) == []
    assert prune(tmp_path, 1, apart=set(), needed=set()) == [three[1]]
    assert three[0].read_bytes() == b"notes of a user"


def test_prune_removes_the_sha256_of_a_checkpoint_whose_removal_was_interrupted(tmp_path):
    put(tmp_path, "checkpoint_step_10.pt", 10)
    put(tmp_path, "checkpoint_step_20.pt", 20)
    (tmp_path / "checkpoint_step_10.pt").unlink()
    assert prune(tmp_path, 1, apart=set(), needed=set()) == []
    assert remaining(tmp_path) == {"checkpoint_step_20.pt"}


def test_newer_checkpoints_are_moved_out_of_the_way(tmp_path, capsys):
    for step in (10, 20, 30, 40):
        put(tmp_path, f"checkpoint_step_{step}.pt", step)
    record_path(tmp_path / "checkpoint_step_40.pt").unlink()
    (tmp_path / "checkpoint_step_50.pt").write_bytes(b"damaged")  # its step is not known
    abandon_newer(tmp_path, 20)
    assert {path.name for path in tmp_path.glob("*.pt")} == {f"checkpoint_step_{n}.pt" for n in (10, 20)}
    moved = {"checkpoint_step_30.pt", "checkpoint_step_30.pt.sha256", "checkpoint_step_40.pt"}
    moved.add("checkpoint_step_50.pt")
    assert {path.name for path in (tmp_path / "abandoned").iterdir()} == moved
    assert "3 newer or unreadable checkpoints (checkpoint_step_40.pt, " in capsys.readouterr().out
    abandon_newer(tmp_path, 20)
    assert capsys.readouterr().out == ""
    put(tmp_path, "checkpoint_step_30.pt", 30)
    abandon_newer(tmp_path, 20)
    moved |= {"checkpoint_step_30_again.pt", "checkpoint_step_30_again.pt.sha256"}
    assert {path.name for path in (tmp_path / "abandoned").iterdir()} == moved


# ---- real runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("minutes", "options", "expected"),
    [
        (10, {}, [6]),  # the run takes a second
        (0, {}, [1, 2, 3, 4, 5, 6]),
        (10, {"checkpoint_freq": 2}, [2, 4, 6]),
        (10, {"checkpoint_steps": 3}, [3, 6]),  # epochs have one step
    ],
)
def test_epochs_are_saved_as_asked_or_every_few_minutes(tiny, monkeypatch, minutes, options, expected):
    monkeypatch.setattr(saver, "CHECKPOINT_MINUTES", minutes)
    given = {**tiny, "val_split": 0.0, "batch_size": 16, "num_epochs": 6, "keep_checkpoints": 9}
    assert train({**given, "checkpoint_freq": None, **options}) == 0
    names = {path.name for path in Path(tiny["output_dir"]).glob("*.pt")}
    assert names == {f"checkpoint_epoch_{epoch}.pt" for epoch in expected}


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="processes are forks")
def test_all_processes_resume_from_the_choice_of_the_main_one(tiny, tmp_path):
    """The newest checkpoint is damaged; if none is valid, all end with one line."""
    given = {**tiny, "num_epochs": 1, "init": "default", "max_steps": 2, "val_split": 0.0}
    given |= {"checkpoint_steps": 1}
    assert run_forked(given, processes=2, log=tmp_path / "log") == [0, 0]
    damage(tmp_path / "run" / "checkpoint_epoch_1.pt")
    given |= {"resume_from": "latest"}
    assert run_forked(given, processes=2, log=tmp_path / "log") == [0, 0]
    begun = {name: value for name, value in given.items() if name not in ("resume_from", "init")}
    begun |= {"init_from": str(tmp_path / "run/checkpoint_epoch_1.pt"), "output_dir": str(tmp_path / "begun")}
    assert run_forked(begun, processes=2, log=tmp_path / "log") == [0, 0]
    for path in (tmp_path / "run").glob("checkpoint_*.pt"):
        damage(path)
    log = tmp_path / "damaged"
    assert run_forked(given, processes=2, log=log) == [UserError.exit_code] * 2
    (line,) = [line for line in log.read_text().splitlines() if "--resume_from latest" in line]
    assert "checkpoints in" in line


def damage(path: Path) -> None:
    """Cut the end of a file."""
    path.write_bytes(path.read_bytes()[:-1000])


def test_a_checkpoint_whose_weights_do_not_fit_is_one_line(tiny, tmp_path):
    train_short(tiny, tmp_path / "run")
    content = load_checkpoint(list_checkpoints(tmp_path / "run")[0])
    path = tmp_path / "changed.pt"
    content["model"]["decoder.conv_out.weight"] = torch.zeros(3)
    save_checkpoint(path, content)
    with pytest.raises(
        UserError, match=rf"^--resume_from {re.escape(str(path))} does not fit .*decoder\.conv_out\.weight"
    ):
        train({"resume_from": str(path), "output_dir": str(tmp_path / "next"), "num_epochs": 9})
