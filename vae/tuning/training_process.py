"""One run of train_vae.py in a folder of its own: started or resumed, watched, stopped, and its outcome."""

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from vae.config.flags import command_words
from vae.config.tune_flags import TuneConfig
from vae.system import console
from vae.system.addresses import public_options
from vae.system.errors import EXIT_CONFIG, EXIT_NON_FINITE, EXIT_SAVED_RESUMABLE, UserError
from vae.system.files import open_regular, write_json
from vae.training.child_runs import POLL_SECONDS, ChildRuns, Validation, continued, validations
from vae.training.output.folder_lock import LOCK_NAME
from vae.training.output.run_folder import checkpoint_paths
from vae.tuning.claims import is_claimed

OPTIONS_NAME = "options.json"  # of a run, for train_vae.py --config
LOG_NAME = "log.txt"  # what the run printed
RUN_NAME = "run"  # the run's own folder
ATTEMPTS = 3  # of a run that something else stops or kills
_LAST_BYTES = 20_000  # of the log, for the reason of a failure


class Kind(Enum):
    """How a run ended."""

    FINISHED = "finished"
    STOPPED = "stopped early"  # by `watch`
    DIVERGED = "diverged"
    OUT_OF_MEMORY = "out of memory"
    REJECTED = "rejected before training"  # its options
    FAILED = "failed"


class Ended(NamedTuple):
    """The outcome of a run."""

    kind: Kind
    reason: str  # the run's own error line, or empty
    validations: list[Validation]

    @property
    def last(self) -> Validation:
        """The last validation; empty if there is none."""
        return self.validations[-1] if self.validations else {}


def train(
    folder: Path, options: dict[str, Any], card: int | None, watch: Callable[[Validation], bool]
) -> Ended:
    """Train with these options in `folder`, from its last checkpoint on if there is one, until it ends.

    `watch` gets every validation after step 0, and may stop the run by returning True.
    """
    write_json(folder / OPTIONS_NAME, public_options(options), indent=2)
    while is_claimed(folder / RUN_NAME / LOCK_NAME):  # of a killed search: it is saving and will end
        time.sleep(POLL_SECONDS)
    for attempt in range(ATTEMPTS):
        with ChildRuns[Path]() as runs:
            words = _words(folder, options)
            process = runs.start(folder, "train_vae.py", words, card, folder / LOG_NAME)
            stopped = _watch(process, folder, watch)
        ended = _outcome(process.returncode, stopped, folder)
        if ended is not None:
            return ended
        console.info(f"{folder.name}: the run was stopped or killed (attempt {attempt + 1} of {ATTEMPTS})")
    reason = f"stopped or killed {ATTEMPTS} times, last with exit code {process.returncode}"
    return Ended(Kind.FAILED, reason, list(validations(folder / RUN_NAME)))


def _words(folder: Path, options: dict[str, Any]) -> list[str]:
    """The flags that start or continue the run."""
    file, run = folder / OPTIONS_NAME, folder / RUN_NAME
    if continued(run, options) != options:
        file = folder / "resumed.json"
        write_json(file, public_options(continued(run, options)), indent=2)
    recorded = public_options(options)
    hidden = {name: value for name, value in options.items() if value != recorded[name]}
    words = ["--config", str(file), "--output_dir", str(run), *command_words(hidden)]
    return [*words, "--resume_from", "latest"]


def _watch(process: subprocess.Popen[bytes], folder: Path, watch: Callable[[Validation], bool]) -> bool:
    """Wait for the end of the process; whether `watch` has stopped it."""
    seen, stopped = 0, False
    while True:
        ended = process.poll() is not None
        records = list(validations(folder / RUN_NAME))
        for record in records[seen:]:
            if watch(record) and not (stopped or ended):
                stopped = True
                process.terminate()
        seen = max(seen, len(records))
        if ended:
            return stopped
        try:
            process.wait(timeout=POLL_SECONDS)
        except subprocess.TimeoutExpired:
            continue


def _outcome(code: int, stopped: bool, folder: Path) -> Ended | None:
    """The outcome; None if something else than `watch` has stopped or killed the run."""
    records = list(validations(folder / RUN_NAME))
    if code == 0:
        return Ended(Kind.FINISHED, "", records)
    if stopped:
        return Ended(Kind.STOPPED, "", records)
    if code == EXIT_SAVED_RESUMABLE or code < 0 or code > 128:
        return None
    reason = _last_line(folder / LOG_NAME)
    if code == EXIT_NON_FINITE:
        kind = Kind.DIVERGED
    elif "out of memory" in reason.lower():
        kind = Kind.OUT_OF_MEMORY
    elif code == EXIT_CONFIG and not checkpoint_paths(folder / RUN_NAME):
        kind = Kind.REJECTED
    else:
        kind = Kind.FAILED
    return Ended(kind, reason, records)


def _last_line(log: Path) -> str:
    """The error line of the run: the last one that it printed."""
    with open_regular(log) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
        text = file.read(_LAST_BYTES).decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return console.printable(lines[-1].removeprefix("train_vae.py: ")) if lines else "it printed nothing"


def search_on_cards(config: TuneConfig, argv: Sequence[str]) -> None:
    """Start a process per card, and wait for all of them; UserError if one fails."""
    assert config.cards
    failed: list[int] = []
    with ChildRuns[int]() as processes:
        for card in config.cards:  # the last --cards of a command counts
            processes.start(card, "tune_vae.py", [*argv, "--cards", str(card)])
        console.info(f"cards   {', '.join(map(str, config.cards))}: one process each")
        while processes.running:
            failed += [card for card, code in processes.ended() if code]
    if failed:
        raise UserError(f"--cards {failed[0]}: its process has failed, see above; the same command continues")
