"""Runs as child processes, each in its own folder: started or continued, and stopped so that they save."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from vae.interop.run_files import METRICS_NAME
from vae.system import child_process
from vae.system.files import open_appending, read_json_lines
from vae.system.script import ROOT
from vae.training.output.run_folder import checkpoint_paths

POLL_SECONDS = 0.5

Key = TypeVar("Key")
Validation = dict[str, float]  # a record of metrics.jsonl


class ChildRuns(Generic[Key]):
    """Processes that run at the same time, each with the caller's key for it.

    Leaving the context, also by Ctrl-C or SIGTERM, signals those that still run once and waits: they save and
    end. A second signal ends them without saving, and so does, on Linux, the death of this process.
    """

    def __init__(self) -> None:
        self.running: list[tuple[Key, subprocess.Popen[bytes]]] = []

    def __enter__(self) -> "ChildRuns[Key]":
        return self

    def start(
        self, key: Key, script: str, words: list[str], card: str | int | None = None, log: Path | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start a script of this project, on one card and with its output appended to `log` if given."""
        env = dict(os.environ) if card is None else {**os.environ, "CUDA_VISIBLE_DEVICES": str(card)}
        with ExitStack() as files:
            output = files.enter_context(open_appending(log)) if log else None
            process = child_process.start(
                [sys.executable, str(ROOT / script), *words],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.running.append((key, process))
        return process

    def ended(self) -> list[tuple[Key, int]]:
        """Those that have ended since the last call, with their exit codes; waits a moment for the first."""
        time.sleep(POLL_SECONDS)
        ended = [(key, process.returncode) for key, process in self.running if process.poll() is not None]
        self.running = [item for item in self.running if item[1].returncode is None]
        return ended

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        has_their_signal = sys.platform == "win32" and kind is KeyboardInterrupt  # Ctrl-C of their console
        for _, process in self.running:
            if process.poll() is None and not has_their_signal:
                process.terminate()
        for _, process in self.running:
            process.wait()


def continued(run: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The options that start or continue a run in its folder: a checkpoint has the weights of --init_from."""
    return {**options, "init_from": None} if checkpoint_paths(run) and "init_from" in options else options


def validations(run: Path) -> Iterator[Validation]:
    """The validations of a run so far, without the one before its first step."""
    path = run / METRICS_NAME
    if path.exists():
        for record in read_json_lines(path):
            if record.get("kind") == "validation" and record.get("step", 0) > 0:
                yield record
