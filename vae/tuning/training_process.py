"""One run of train_vae.py: started in its folder, watched, stopped, and how it has ended."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from optuna import TrialPruned

from vae.config.flags import command_words
from vae.interop.vae_path import METRICS_NAME
from vae.system import child_process, console
from vae.system.errors import EXIT_CONFIG, EXIT_NON_FINITE
from vae.system.files import read_json_lines
from vae.system.script import ROOT

POLL_SECONDS = 0.5
INSTALLED_SCRIPT = "from vae.commands import vae_train; vae_train()"  # pip installs no train_vae.py

Validation = dict[str, float]  # a record of metrics.jsonl


class TrialError(Exception):
    """A run failed for a reason that says nothing about its settings."""


def train(run: Path, options: dict[str, Any], watch: Callable[[Validation], bool]) -> Validation:
    """Train in the folder `run`; returns the last validation.

    `watch` gets every validation after step 0, and may stop the run by returning True. Raises TrialPruned if
    the run is stopped so, diverges, needs too much memory or refuses its options, and TrialError for other
    failures. What it prints is in `run`.log.
    """
    log = run.with_suffix(".log")
    given = {name: value for name, value in options.items() if value is not None}
    given["output_dir"] = str(run)
    script = ROOT / "train_vae.py"
    start = [str(script)] if script.exists() else ["-c", INSTALLED_SCRIPT]
    command = [sys.executable, *start, *command_words(given)]
    with open(log, "ab", buffering=0) as output:
        process = child_process.start(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        was_stopped = _watch(process, run, watch)
    except BaseException as error:  # also Ctrl-C, which Windows sends to the run, too
        if process.poll() is None and not (sys.platform == "win32" and isinstance(error, KeyboardInterrupt)):
            process.terminate()
        process.wait()  # it saves before it ends
        raise
    if process.returncode == 0:
        return next(reversed(list(validations(run))), {})
    if was_stopped:
        raise TrialPruned("stopped early")
    reason = f"{_last_line(log)} (exit code {process.returncode})"
    if process.returncode in (EXIT_CONFIG, EXIT_NON_FINITE) or "out of memory" in reason.lower():
        raise TrialPruned(reason)
    raise TrialError(reason)


def _watch(process: "subprocess.Popen[bytes]", run: Path, watch: Callable[[Validation], bool]) -> bool:
    """Wait for the end of the process; whether `watch` has stopped it."""
    seen = 0.0
    was_stopped = False
    while True:
        has_ended = process.poll() is not None
        for record in validations(run):
            if record["step"] > seen:
                seen = record["step"]
                if watch(record) and not (was_stopped or has_ended):
                    was_stopped = True
                    process.terminate()
        if has_ended:
            return was_stopped
        time.sleep(POLL_SECONDS)


def validations(run: Path) -> Iterator[Validation]:
    """The validations of a run so far, without the one before its first step."""
    path = run / METRICS_NAME
    if path.exists():
        for record in read_json_lines(path):
            if record.get("kind") == "validation" and record.get("step", 0) > 0:
                yield record


def _last_line(log: Path) -> str:
    """The error line of the run: the last one that it printed."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
    return console.printable(last.removeprefix("train_vae.py: "))
