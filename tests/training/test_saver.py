"""Saving without waiting: the file has the state at the save, one at a time, and failures are reported."""

import os
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.checkpoints import WITH_DISCRIMINATOR, checkpoint
from tests.harness.faults import Fault, injected, run_forked
from tests.harness.steps import before_steps
from tests.harness.training_runs import ONE_PROCESS, assert_same, loop_of, records
from vae.config.options import build
from vae.interop.checkpoint_file import load_checkpoint
from vae.memory.plan import checkpoint_bytes, reserve_bytes
from vae.system.errors import EXIT_CONFIG
from vae.training import saver
from vae.training.early_checks import Command
from vae.training.run import train
from vae.training.saver import CheckpointWriter, SaveReason, host_copy
from vae.training.setup import prepare_run

SECONDS = 60  # a busy machine is no failure
WEIGHT = "decoder.conv_out.weight"


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "checkpoint_epoch_1.pt"


@pytest.fixture
def gate(monkeypatch) -> threading.Event:
    """Files are written only after this event is set."""
    opened, save_checkpoint = threading.Event(), saver.save_checkpoint

    def gated(path: Path, content: dict[str, Any]) -> None:
        assert opened.wait(SECONDS)
        save_checkpoint(path, content)

    monkeypatch.setattr(saver, "save_checkpoint", gated)
    return opened


def test_file_has_the_values_of_the_moment_of_the_save(path, gate):
    writer, content, expected = CheckpointWriter(background=True), checkpoint(), checkpoint()
    writer.save(path, content, list)
    content["model"][WEIGHT].zero_()  # as the next step would
    content["optimizers"][0]["state"][0]["exp_avg"].zero_()
    content["position"]["step"] += 1
    assert not path.exists()
    gate.set()
    assert writer.finish() is None
    loaded = load_checkpoint(path)
    assert_same({key: loaded[key] for key in expected}, expected, "content")


def test_next_save_waits_and_old_checkpoints_go_after_the_new_one_is_on_disk(tmp_path, gate):
    writer, pruned = CheckpointWriter(background=True), []
    paths = [tmp_path / f"checkpoint_step_{step}.pt" for step in (1, 2)]
    writer.save(paths[0], checkpoint(1), lambda: pruned.append([path.exists() for path in paths]))
    timer = threading.Timer(0.1, gate.set)
    timer.start()
    writer.save(paths[1], checkpoint(2), lambda: pruned.append([path.exists() for path in paths]))
    assert gate.is_set()
    assert writer.finish() is None
    assert pruned == [[True, False], [True, True]]


@pytest.mark.slow
def test_a_best_checkpoint_that_could_not_be_written_is_forgotten(tiny):
    """The one before it stays the best one, so pruning keeps it."""
    loop = loop_of(prepare_run(Command(tiny), ONE_PROCESS))
    history, folder = loop.state.history, loop.saver.folder
    for step, (loss, best) in enumerate([(0.3, 1), (0.1, 2), (0.4, 1), (0.2, 4)], start=1):
        faults = injected(Fault("fail", "save.open")) if step == 2 else nullcontext()
        with faults:
            loop.state.advance(4)
            loop.saver.save(SaveReason.DUE, {"image_size": 32, "loss": loss})
        assert history.best_checkpoint == f"checkpoint_step_{best}.pt"
    assert (folder / "checkpoint_step_1.pt").is_file()
    assert not (folder / "checkpoint_step_2.pt").exists()


@pytest.mark.slow
def test_a_state_is_saved_once(tiny):
    """The position and the stage are compared, not the step: an epoch and a stage may end after a save."""
    loop = loop_of(prepare_run(Command(tiny), ONE_PROCESS))
    state, saver, written = loop.state, loop.saver, []
    saver.content = lambda: written.append(state.position.step) or checkpoint()
    changes = (
        lambda: state.advance(4),
        lambda: vars(state.position).update(epoch=1, images_in_epoch=0),
        lambda: setattr(state, "stage", replace(state.stage, num_epochs=1)),
    )
    for count, change in enumerate(changes, start=1):
        change()
        for reason in (SaveReason.REQUESTED, SaveReason.DUE, SaveReason.STOP):
            saver.save(reason)
        assert written == [1] * count
    assert (saver.folder / "checkpoint_epoch_1.pt").is_file()


@pytest.mark.parametrize("background", [True, False])
def test_failed_save_is_reported_and_the_next_one_tries_again(tmp_path, capsys, background):
    """Nothing is pruned before the file exists."""
    writer, pruned = CheckpointWriter(background), []
    paths = [tmp_path / f"checkpoint_step_{step}.pt" for step in (1, 2)]
    with injected(Fault("fail", "save.open")):
        writer.save(paths[0], checkpoint(1), lambda: pruned.append(1))
        assert "No space left on device" in writer.finish()
    writer.save(paths[1], checkpoint(2), lambda: pruned.append(2))
    assert writer.finish() is None
    assert [path.exists() for path in paths] == [False, True]
    assert pruned == [2]
    (line,) = capsys.readouterr().out.splitlines()
    assert f"WARNING: {paths[0]} is not saved: [Errno 28] No space left on device" in line
    assert "the next save tries again" in line


def test_too_little_memory_for_the_copy_makes_training_wait(path, monkeypatch, capsys):
    def no_memory(*_arguments):
        raise RuntimeError(
            "[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"
        )

    monkeypatch.setattr(saver, "host_copy", no_memory)
    writer = CheckpointWriter(background=True)
    for step in (1, 2):
        writer.save(path, checkpoint(step), list)
        assert load_checkpoint(path)["position"]["step"] == step  # without finish
    assert capsys.readouterr().out.count("--background_save") == 1


def test_error_in_the_thread_ends_the_run(path):
    writer = CheckpointWriter(background=True)
    writer.save(path, checkpoint(), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        writer.finish()


def test_copies_keep_values_and_layouts():
    image = torch.ones(2, 8, 4, 4).to(memory_format=torch.channels_last)
    content = {"a": [torch.ones(2, 3), (image, "x")], "none": None}
    copy = host_copy(content)
    content["a"][0].zero_()
    assert torch.equal(copy["a"][0], torch.ones(2, 3))
    assert copy["a"][1][0].is_contiguous(memory_format=torch.channels_last)
    assert copy["a"][1][1:] == ("x",)
    assert copy["none"] is None


def test_plan_counts_the_copy():
    content = checkpoint(**WITH_DISCRIMINATOR)
    networks = [content[name] for name in ("model", "ema", "discriminator")]
    moments = [state for saved in content["optimizers"] for state in saved["state"].values()]
    tensors = [value for part in (*networks, *moments) for value in part.values() if value.dim()]
    config = build(content["config"])
    assert checkpoint_bytes(config) == sum(value.nbytes for value in tensors)
    assert reserve_bytes(config, is_gpu=False) == checkpoint_bytes(config)
    without = replace(config, run=replace(config.run, background_save=False))
    assert reserve_bytes(without, is_gpu=False) == 0


@pytest.mark.gpu
def test_copy_of_a_gpu_tensor_is_pinned_and_complete():
    value = torch.randn(1000, 1000, device="cuda")
    copy = host_copy({"a": value * 2})["a"]
    assert copy.is_pinned()
    assert torch.equal(copy, (value * 2).cpu())


# ---- real runs -------------------------------------------------------------------------------------------


def test_training_goes_on_while_a_checkpoint_is_written(tiny, gate):
    """The checkpoint after step 3 is written only when step 5 begins."""
    folder = Path(tiny["output_dir"])

    def open_gate(loop, _batch):
        if loop.state.position.step == 4:
            assert not list(folder.glob("checkpoint_*.pt"))
            gate.set()

    with before_steps(open_gate):
        assert train(tiny) == 0
    found = {path.name for path in folder.glob("*.pt")}
    assert found == {"checkpoint_epoch_1.pt", "checkpoint_epoch_2.pt"}


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="the processes are forks")
def test_two_processes_end_together_if_the_last_save_fails(tiny, tmp_path):
    given = {**tiny, "batch_size": 2, "checkpoint_steps": 1, "log_freq": 1}
    log = tmp_path / "output.txt"
    codes = run_forked(given, Fault("fail", "save.open", times=99), processes=2, log=log)
    assert EXIT_CONFIG in codes, log.read_text()
    assert "the last checkpoint could not be written: " in log.read_text()
    assert len(records(tmp_path / "run", "train")) == 6  # all others could fail
