"""Runs that take seconds: options of a tiny training run, and scripts in their own processes."""

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from vae.system.script import exit_code

ROOT = Path(__file__).resolve().parent.parent.parent

# A model of two levels and a recipe that trains in about a second on one core. No weights are downloaded.
TINY = {
    "channels": [8, 16],
    "layers_per_block": 1,
    "norm_groups": 4,
    "z_channels": 4,
    "image_size": 32,
    "batch_size": 4,
    "num_epochs": 2,
    "checkpoint_freq": 1,
    "learning_rate": 1e-4,
    "init": "default",  # the warm start takes as long as the rest of such a run
    "perceptual_weight": 0.0,
    "num_workers": "0",
    "val_split": 0.25,
    "val_freq": 1,
    "save_samples_freq": 0,
    "device": "cpu",
}


def run_script(*words: str, env: dict | None = None, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """Run Python with these words in its own process, on the CPU with one thread; the output is text."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(env or {})},
        timeout=300,
    )


def run_here(script: str, *words: object) -> subprocess.CompletedProcess[str]:
    """As run_script, but in this process, which has imported everything: for tests of results."""
    main, texts = importlib.import_module(script.removesuffix(".py")).main, [str(word) for word in words]
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = exit_code(script, main, texts)
    return subprocess.CompletedProcess([script, *texts], code, out.getvalue(), err.getvalue())


@contextmanager
def closed_pipe() -> Iterator[int]:
    """The end of a pipe that nothing reads, as after `| head`, from before a process writes to it."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        yield writing
    finally:
        os.close(writing)
