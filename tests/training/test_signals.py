"""Real signals: finish the step, save, exit 75 and go on bit for bit; save and go on; leave at once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.harness.runs import ROOT, as_flags
from vae.config.errors import EXIT_SAVED_RESUMABLE
from vae.interop.checkpoint_file import load_checkpoint
from vae.training import loop
from vae.training.run import train
from vae.training.signals import StopSignals

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows sends no signals to other processes")
PATIENCE = 120  # seconds: a loaded machine is no failure


@pytest.fixture
def long(tiny) -> dict:
    """A run of 60 steps that records each."""
    return {
        **tiny,
        "num_epochs": 20,
        "log_freq": 1,
        "val_freq": 20,
        "checkpoint_freq": 20,
        "keep_checkpoints": 50,
    }


def assert_same_weights(one: Path, other: Path) -> None:
    contents = [load_checkpoint(folder / "checkpoint_epoch_20.pt") for folder in (one, other)]
    assert contents[0]["position"] == contents[1]["position"]
    for part in ("model", "ema"):
        for name, value in contents[0][part].items():
            assert torch.equal(value, contents[1][part][name]), name


def steps(folder: Path) -> list[int]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record["step"] for record in found if record["kind"] == "train"]


# ---- in this process: the signal comes at a known step ---------------------------------------------------


def send_at(monkeypatch, wanted: dict[int, int]) -> None:
    """Send this process the signal `wanted[n]` in the middle of optimizer step n (from 1)."""
    apply_update, made = loop.apply_update, []

    def update(*arguments):
        made.append(1)
        if len(made) in wanted:
            os.kill(os.getpid(), wanted[len(made)])
        return apply_update(*arguments)

    monkeypatch.setattr(loop, "apply_update", update)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "step"),
    [(signal.SIGTERM, 1), (signal.SIGINT, 4), (signal.SIGTERM, 6)],
    ids=["first_step", "within_an_epoch", "at_an_epoch_end"],
)
def test_a_stop_is_saved_and_gone_on_from(tiny, tmp_path, monkeypatch, capsys, number, step):
    """The loop asks at the start of a step: the one after that in which the signal comes is the last."""
    folder, before = tmp_path / "run", signal.getsignal(number)
    send_at(monkeypatch, {step: number})
    assert train({**tiny, "num_epochs": 4}) == EXIT_SAVED_RESUMABLE
    assert (
        f"go on with: python train_vae.py --output_dir {folder} --resume_from latest\n"
        in capsys.readouterr().out
    )
    saved = [load_checkpoint(path)["position"]["step"] for path in folder.glob("*.pt")]
    assert max(saved) == step + 1
    assert not (folder / "vae").exists()
    assert signal.getsignal(number) is before
    assert train({**tiny, "num_epochs": 4, "resume_from": "latest"}) == 0
    assert load_checkpoint(folder / "checkpoint_epoch_4.pt")["position"]["step"] == 12


def test_a_save_is_made_and_training_goes_on(tiny, tmp_path, monkeypatch):
    send_at(monkeypatch, {1: signal.SIGUSR1, 4: signal.SIGUSR1})
    assert train({**tiny, "num_epochs": 3, "checkpoint_freq": 3}) == 0
    saved = {path.name: load_checkpoint(path)["position"] for path in (tmp_path / "run").glob("*.pt")}
    assert set(saved) == {"checkpoint_step_2.pt", "checkpoint_step_5.pt", "checkpoint_epoch_3.pt"}
    assert saved["checkpoint_step_5.pt"] == {"epoch": 1, "images_in_epoch": 8, "step": 5, "images": 20}


@pytest.mark.slow
def test_a_stop_in_the_very_last_step_still_ships_when_gone_on_from(tiny, tmp_path, monkeypatch):
    send_at(monkeypatch, {5: signal.SIGTERM})
    assert train(tiny) == EXIT_SAVED_RESUMABLE
    assert train({**tiny, "resume_from": "latest"}) == 0
    assert (tmp_path / "run" / "vae" / "config.json").exists()


def test_handlers_are_there_only_while_entered():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (signals.save, signals.stop) == (True, False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.stop
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before


# ---- in a process of its own: the signal comes at any moment ---------------------------------------------


class Trainer:
    """train_vae.py running, its console in a file."""

    def __init__(self, given: dict, console: Path):
        self.folder = Path(given["output_dir"])
        self.console = console
        with console.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "train_vae.py", *as_flags(given)],
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            )

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_exception) -> None:
        self.process.kill()
        self.process.wait()

    def wait_for(self, condition) -> None:
        """Until `condition()`; a process that ended before is a failure."""
        until = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, self.console.read_text()
            assert time.monotonic() < until, self.console.read_text()
            time.sleep(0.005)

    def wait(self) -> int:
        return self.process.wait(PATIENCE)


@pytest.fixture
def undisturbed(long, tmp_path) -> Path:
    assert train({**long, "output_dir": str(tmp_path / "undisturbed")}) == 0
    return tmp_path / "undisturbed"


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_stopped_process_saves_and_goes_on_bit_for_bit(long, undisturbed, tmp_path, number, workers):
    folder = tmp_path / "run"
    with Trainer({**long, "num_workers": workers}, tmp_path / "console") as trainer:
        trainer.wait_for(lambda: len(steps(folder)) >= 4)
        trainer.process.send_signal(number)
        assert trainer.wait() == EXIT_SAVED_RESUMABLE
    said = (tmp_path / "console").read_text()
    assert "stopped and saved at step" in said
    assert "Traceback" not in said
    (saved,) = folder.glob("*.pt")
    assert 4 <= load_checkpoint(saved)["position"]["step"] < 60
    assert train({**long, "resume_from": "latest"}) == 0
    assert steps(folder) == list(range(1, 61))
    assert_same_weights(folder, undisturbed)


@pytest.mark.slow
def test_a_process_asked_to_save_saves_and_goes_on(long, undisturbed, tmp_path):
    folder = tmp_path / "run"
    with Trainer(long, tmp_path / "console") as trainer:
        trainer.wait_for(lambda: len(steps(folder)) >= 2)
        trainer.process.send_signal(signal.SIGUSR1)
        trainer.wait_for(lambda: list(folder.glob("checkpoint_*.sha256")))
        assert trainer.wait() == 0
    assert len(list(folder.glob("checkpoint_step_*.pt"))) == 1
    assert_same_weights(folder, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"]
)
def test_a_second_signal_leaves_at_once(long, tmp_path, number, code):
    """With steps of seconds the second signal comes long before the first one's step has ended."""
    slow = {**long, "image_size": 96, "upscale": True, "batch_size": 12}
    folder = tmp_path / "run"
    with Trainer(slow, tmp_path / "console") as trainer:
        trainer.wait_for(lambda: len(steps(folder)) >= 1)
        trainer.process.send_signal(number)
        time.sleep(0.6)  # within half a second they would be one: schedulers and torchrun both send
        trainer.process.send_signal(number)
        assert trainer.wait() == code
    assert list(folder.glob("checkpoint_*")) == []
    assert "Traceback" not in (tmp_path / "console").read_text()
