"""Short training runs: train with one or two processes, read the files of a run, compare two runs."""

import json
import subprocess
import textwrap
from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.harness.faults import start_forked, wait_for
from tests.harness.toy_networks import relative_difference
from vae.config.flags import command_words, parse_flags
from vae.config.resolve import PER_COMMAND
from vae.interop.checkpoint_file import load_checkpoint
from vae.training.checkpoints import list_checkpoints
from vae.training.distributed import Distributed
from vae.training.liveness import Liveness, StopSignals, Watchdog
from vae.training.logbook import Logbook
from vae.training.loop import TrainingLoop
from vae.training.run import train
from vae.training.saver import CheckpointWriter, Saver
from vae.training.setup import PreparedRun, begin_stability

ONE_PROCESS = Distributed(0, 1, torch.device("cpu"))
SHORT = {"init": "default", "val_split": 0.0, "num_epochs": 1, "log_freq": 1}  # 4 steps of 4 images
# The gradients of these parameters are only rounding, and Adam makes steps of full size from it: the bias of
# the keys cancels in the softmax, and the last bias of the discriminator in the difference of two logits.
ROUNDING_ONLY = {"model": "to_k.bias", "ema": "to_k.bias", "discriminator": "conv_out.bias"}
# They differ between equal runs; the last two are ids of runs.
MACHINE_VALUES = ("images_per_second", "data_wait_share", "memory_peak_gib", "id", "parent")


def alive_of(run: PreparedRun) -> Liveness:
    """For parts of a prepared run that a test uses alone."""
    return Liveness(Watchdog(0, run.command.resume_command), StopSignals())


def loop_of(run: PreparedRun) -> TrainingLoop:
    """The loop of the first stage of a prepared run. It writes no records."""
    run.output_dir.mkdir()
    plan, schedule = run.plan(run.state.stage), run.schedule(run.state.stage)
    writer, logbook = CheckpointWriter(background=False), Logbook(run.output_dir, 0, active=False)
    resume = run.command.resume_command
    saver = Saver(run.config, run.state, run.provenance, begin_stability(run), writer, run.dist, resume)
    return run.loop(plan, schedule, saver, logbook, alive_of(run))


def train_short(given: dict[str, Any], folder: Path, **changes: Any) -> dict[str, Any]:
    """Train 4 steps into `folder`, with these changes to the options; returns the last checkpoint."""
    assert train({**given, **SHORT, "output_dir": str(folder), **changes}) == 0
    return last_checkpoint(folder)


def train_on_two_processes(
    given: dict[str, Any], before: str = "", fails: bool = False
) -> subprocess.CompletedProcess:
    """A run of two gloo processes, which are forks; each process runs the Python code `before` first."""
    given = parse_flags(command_words(given))
    with TemporaryDirectory() as folder:
        logs = [Path(folder) / "out", Path(folder) / "err"]
        options = {"log": logs[0], "error_log": logs[1], "before": textwrap.dedent(before)}
        codes = wait_for(start_forked(given, processes=2, **options))
        found = subprocess.CompletedProcess(
            ["train"], max(map(abs, codes)), *(log.read_text() for log in logs)
        )
    assert (found.returncode != 0) == fails, found.stderr[-3000:]
    return found


def records(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """The records in metrics.jsonl, of all kinds or of these."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if not kinds or line["kind"] in kinds]


def reproducible_records(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """The records without the values that differ between equal runs; `data` and `trainer` are such values."""
    found = [line for line in records(folder, *kinds) if line["kind"] not in ("data", "trainer")]
    return [{k: v for k, v in line.items() if k not in MACHINE_VALUES} for line in found]


def last_checkpoint(folder: Path) -> dict[str, Any]:
    """The checkpoint with the most steps."""
    return load_checkpoint(list_checkpoints(folder)[0])


def first_moments(checkpoint: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The first moments of the autoencoder's AdamW; after one step, a tenth of the gradients."""
    states = checkpoint["optimizers"][0]["state"]
    return {str(key): state["exp_avg"] for key, state in states.items()}


def assert_weights_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Two checkpoints have the same weights, except for rounding."""
    for network, noise in ROUNDING_ONLY.items():
        if expected[network] is None:
            assert found[network] is None
            continue
        names = [name for name in expected[network] if not name.endswith(noise)]
        pair = [{name: content[network][name] for name in names} for content in (found, expected)]
        # fp32 sums in another order and a few Adam steps: far below the learning rate of 1e-4 per step
        assert relative_difference(*pair) < 2e-5, network


def trained_result(folder: Path, apart: Collection[str] = ()) -> list[Any]:
    """What training has changed, and the records of its steps; without the options `apart`."""
    content = last_checkpoint(folder)
    del content["run"], content["provenance"]  # random ids: see test_provenance.py
    content["config"] = {k: v for k, v in content["config"].items() if k not in {*PER_COMMAND, *apart}}
    return [content, reproducible_records(folder, "train")]


def assert_same_result(found: Path, expected: Path) -> None:
    """Two runs have changed the same, and have the same records of their steps, bit for bit."""
    assert_same(trained_result(found), trained_result(expected), "result")


def assert_same(found: object, expected: object, where: str) -> None:
    """Nested data and tensors are equal, bit for bit."""
    assert type(found) is type(expected), where
    if isinstance(found, torch.Tensor):
        assert isinstance(expected, torch.Tensor)
        assert found.dtype == expected.dtype, where
        assert torch.equal(found, expected), where
    elif isinstance(found, dict):
        assert isinstance(expected, dict)
        assert list(found) == list(expected), where
        for key in found:
            assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(found, list):
        assert isinstance(expected, list)
        assert len(found) == len(expected), where
        for index, pair in enumerate(zip(found, expected, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    else:
        assert found == expected, where
