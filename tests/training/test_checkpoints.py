"""The checkpoints of a run: which is newest, which may go, and what a failing save leaves."""

import os
from pathlib import Path

import pytest
import torch

from vae.config.errors import UserError
from vae.interop.checkpoint_file import load_checkpoint, record_path, save_checkpoint
from vae.training.checkpoints import list_checkpoints, load_named, load_newest, prune, saved_step
from vae.training.run import train
from vae.training.stages import Position, Stage


def put(folder: Path, name: str, step: int) -> Path:
    save_checkpoint(folder / name, {"position": {"step": step}, "weights": torch.full((50,), float(step))})
    return folder / name


def left(folder: Path) -> set[str]:
    """Names of the checkpoints, each of which has its record, with nothing beside them."""
    found = {path.name for path in folder.glob("*.pt")}
    assert {path.name for path in folder.iterdir()} == found | {f"{name}.sha256" for name in found}
    return found


@pytest.fixture
def three(tmp_path) -> list[Path]:
    """Checkpoints of steps 10, 20 and 25; neither names nor times of files are in that order."""
    paths = [put(tmp_path, "checkpoint_step_25.pt", 25), put(tmp_path, "checkpoint_epoch_2.pt", 20)]
    return [put(tmp_path, "checkpoint_epoch_1.pt", 10), *reversed(paths)]


def test_newest_is_the_furthest_position(three, tmp_path):
    (tmp_path / "checkpoint_epoch_9.pt.tmp").write_bytes(b"torn")
    (tmp_path / "checkpoint_epoch_nine.pt").write_bytes(b"not ours")
    assert list_checkpoints(tmp_path) == three[::-1]
    assert load_newest(tmp_path, pytest.fail)[0] == three[2]


def test_a_damaged_newest_is_skipped_loudly(three, tmp_path):
    said = []
    os.truncate(three[2], 700)
    path, content = load_newest(tmp_path, said.append)
    assert path == three[1]
    assert content["position"]["step"] == 20
    assert len(said) == 1
    assert "skipped" in said[0]
    assert str(three[2]) in said[0]


def test_where_all_are_damaged_nothing_begins_anew(three, tmp_path):
    for path in three:
        os.truncate(path, 100)
    said = []
    with pytest.raises(UserError, match=r"none of the 3 checkpoints in .* is valid"):
        load_newest(tmp_path, said.append)
    assert len(said) == 3


def test_an_empty_folder_has_none(tmp_path):
    assert load_newest(tmp_path, pytest.fail) is None


def test_a_damaged_named_one_gives_way_to_the_newest_beside_it_loudly(three, tmp_path):
    said = []
    data = bytearray(three[1].read_bytes())
    data[len(data) // 2] ^= 4
    three[1].write_bytes(data)
    path, content = load_named(three[1], said.append)
    assert (path, content["position"]["step"]) == (three[2], 25)
    assert said == [
        f"WARNING: {three[1]} is damaged: its SHA-256 is not the one in {three[1].name}.sha256; "
        f"going on from {three[2]}, the newest valid checkpoint beside it"
    ]


def test_a_damaged_one_alone_is_an_error(tmp_path):
    path = put(tmp_path, "checkpoint_epoch_1.pt", 1)
    os.truncate(path, 0)
    with pytest.raises(UserError, match=r"checkpoint_epoch_1\.pt is empty"):
        load_named(path, pytest.fail)


def test_newer_ones_are_pointed_out(three, tmp_path):
    said = []
    assert load_named(three[0], said.append)[0] == three[0]
    assert "newer checkpoints of this run: checkpoint_step_25.pt, checkpoint_epoch_2.pt" in said[0]
    load_named(three[2], pytest.fail)


def test_the_step_is_read_without_the_tensors(three):
    assert [saved_step(path) for path in three] == [10, 20, 25]
    three[0].write_bytes(b"")
    assert saved_step(three[0]) == -1


STAGES = [Stage(0, 3, 32, 2), Stage(3, 5, 64, 2)]


def test_the_best_and_each_stages_last_stay_and_keep_bounds_the_others(tmp_path):
    for epoch in range(1, 8):
        put(tmp_path, f"checkpoint_epoch_{epoch}.pt", 10 * epoch)
    put(tmp_path, "checkpoint_step_65.pt", 65)
    removed = prune(tmp_path, 2, STAGES, Position(epoch=7, step=70), "checkpoint_epoch_1.pt")
    assert {path.name for path in removed} == {f"checkpoint_epoch_{n}.pt" for n in (2, 4, 5, 6)}
    assert left(tmp_path) == {
        "checkpoint_epoch_1.pt",  # the best
        "checkpoint_epoch_3.pt",  # the first stage's last
        "checkpoint_step_65.pt",
        "checkpoint_epoch_7.pt",
    }


def test_ones_further_on_neither_go_nor_count(tmp_path):
    """A run that was taken up again from epoch 1 has the first course's 5 to 8 still beside it."""
    for epoch in (1, 2, 3, 4, 6, 7, 8):
        put(tmp_path, f"checkpoint_epoch_{epoch}.pt", 10 * epoch)
    prune(tmp_path, 2, [Stage(0, 20, 32, 2)], Position(epoch=4, step=40), None)
    assert left(tmp_path) == {f"checkpoint_epoch_{n}.pt" for n in (3, 4, 6, 7, 8)}


def test_what_a_killed_save_left_goes(tmp_path):
    put(tmp_path, "checkpoint_epoch_1.pt", 10)
    (tmp_path / "checkpoint_step_7.pt.tmp").write_bytes(b"torn")
    (tmp_path / "checkpoint_step_7.pt.sha256.tmp").write_bytes(b"torn")
    prune(tmp_path, 2, STAGES, Position(epoch=1, step=10), None)
    assert left(tmp_path) == {"checkpoint_epoch_1.pt"}


# ---- the same with real runs --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_keeps_what_it_should(tiny, tmp_path):
    given = {**tiny, "num_epochs": 5, "checkpoint_steps": 2, "keep_checkpoints": 2}
    assert train(given) == 0
    folder = tmp_path / "run"
    kept = {path.name for path in folder.glob("*.pt")}
    best = load_checkpoint(folder / "checkpoint_epoch_5.pt")["history"]["best_checkpoint"]
    assert len(kept - {best, "checkpoint_epoch_5.pt"}) == 2
    assert {best, "checkpoint_epoch_5.pt"} <= kept
    assert all(record_path(folder / name).exists() for name in kept)


@pytest.mark.slow
def test_a_full_disk_is_said_and_training_goes_on_to_the_last_save(tiny, tmp_path, capsys):
    """No file of this process may grow beyond what a record needs and a checkpoint exceeds."""
    given, folder = {**tiny, "num_epochs": 3}, tmp_path / "run"
    assert train({**given, "num_epochs": 1}) == 0
    before = {path: path.read_bytes() for path in folder.glob("checkpoint_*")}
    size = (folder / "checkpoint_epoch_1.pt").stat().st_size
    resource = pytest.importorskip("resource")  # Windows has no such limits
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, hard))
    try:
        with pytest.raises(UserError, match="the last checkpoint could not be written"):
            train(
                {**given, "resume_from": "latest", "new_stage": True, "num_epochs": 2, "keep_checkpoints": 2}
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().out
    assert said.count("is not saved:") == 2  # epoch 2 is said and training goes on; epoch 3 is the run's last
    assert "checkpoint_epoch_2.pt is not saved: [Errno 27] File too large; older" in said
    assert {path: path.read_bytes() for path in folder.glob("checkpoint_*")} == before


def test_a_last_save_that_fails_is_an_error(tiny, tmp_path, monkeypatch):
    def full(*_arguments, **_settings):
        raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0\nmore lines")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        UserError, match=r"--output_dir .*: the last checkpoint could not be written: .*unexpected"
    ):
        train({**tiny, "max_steps": 2})
    assert list((tmp_path / "run").glob("checkpoint_*")) == []


@pytest.mark.slow
def test_a_run_goes_on_from_the_newest_valid_one(tiny, tmp_path, capsys):
    given, folder = {**tiny, "log_freq": 1}, tmp_path / "run"
    assert train({**given, "num_epochs": 2, "checkpoint_steps": 2, "keep_checkpoints": 9}) == 0
    good = load_checkpoint(folder / "checkpoint_epoch_2.pt")
    (folder / "checkpoint_epoch_2.pt").write_bytes(b"\0" * 4000)
    capsys.readouterr()
    assert train({**given, "num_epochs": 2, "resume_from": "latest"}) == 0
    said = capsys.readouterr().out
    assert "skipped" in said
    assert "checkpoint_epoch_2.pt is damaged" in said
    assert f"from {folder / 'checkpoint_step_4.pt'}, step 4" in said
    again = load_checkpoint(folder / "checkpoint_epoch_2.pt")
    assert all(torch.equal(good["model"][name], again["model"][name]) for name in good["model"])
