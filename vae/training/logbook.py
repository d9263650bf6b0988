"""The records of a run: each one goes to metrics.jsonl and TensorBoard, which W&B reads if it is on."""

import json
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from vae.inference.infer import write_image
from vae.interop.vae_path import METRICS_NAME
from vae.system import console, files
from vae.system.addresses import public_text
from vae.system.errors import UserError
from vae.system.files import read_text, replace_text
from vae.training.early_checks import check_wandb_installed
from vae.training.results_image import RESULTS_NAME, write_results


def try_to_write(path: Path, write: Callable[[], object], quiet: bool = False) -> bool:
    """Write a file that training does not need; a failure is printed, unless `quiet`, and gives False."""
    try:
        write()
    except OSError as error:
        if not quiet:
            console.warning(f"{path} cannot be written: {error.strerror or error}; training continues")
        return False
    return True


def try_to_write_json(path: Path, content: dict[str, Any], indent: int) -> None:
    """Write a file that training does not need; on failure an older file is unchanged."""
    try_to_write(path, partial(files.write_json, path, content, indent))


class Appender:
    """Appends whole chunks to a file, at once. Its methods raise no OSError: a failure is reported once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting = b""
        self._is_written = True

    def write(self, chunk: bytes) -> None:
        """Append `chunk` after everything that waits."""
        self._waiting += chunk
        if self._waiting:
            self._is_written = try_to_write(self.path, self._write_waiting, quiet=not self._is_written)

    def _write_waiting(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab", buffering=0) as file:
            while self._waiting:
                self._waiting = self._waiting[file.write(self._waiting) :]


REJECTED_NAME = "rejected_images.txt"  # of the main process; of the others, with their rank
EVENTS_NAME = "logs"  # TensorBoard's folder
FLUSH_SECONDS = 30
MAX_NAMES = 10_000  # of unusable images that are kept in memory, so that each is listed once

Record = Mapping[str, float | int | str | list[float] | None]


class Logbook:
    """Writes the records of one run on the main process; the others only list unusable images."""

    def __init__(self, folder: Path, first_step: int, active: bool, rank: int = 0):
        """Open the files. Records after `first_step`, which a run that got further left, are removed."""
        path = folder / REJECTED_NAME
        self._rejected = Appender(path.with_stem(f"{path.stem}_{rank}") if rank else path)
        self._names: set[str] = set()  # that are listed there
        self.folder = folder
        self.active = active
        self._events: SummaryWriter | None = None
        self._excepthook = threading.excepthook
        self._draws = active  # RESULTS_NAME, until drawing fails
        self._failed: set[str] = set()  # what a warning has named
        self._metrics = Appender(folder / METRICS_NAME)
        if active:
            self._try(METRICS_NAME, lambda: _remove_later_records(folder / METRICS_NAME, first_step))
            self._try(EVENTS_NAME, lambda: self._open_events(first_step + 1))

    def _open_events(self, first_step: int) -> None:
        threading.excepthook = self._on_thread_error
        folder = str(self.folder / EVENTS_NAME)
        self._events = SummaryWriter(folder, purge_step=first_step, flush_secs=FLUSH_SECONDS)

    def _on_thread_error(self, failure: threading.ExceptHookArgs) -> None:
        """TensorBoard's thread prints no traceback if the disk is full: `_show` reports that."""
        is_of_tensorboard = type(failure.thread).__module__.startswith("tensorboard.")
        if not (is_of_tensorboard and issubclass(failure.exc_type, OSError)):
            self._excepthook(failure)

    def _show(self, add: Callable[[SummaryWriter], object]) -> None:
        """Add something to TensorBoard, until its writer fails."""
        events = self._events
        if events is not None and not self._try(EVENTS_NAME, lambda: add(events)):
            self._events = None

    def record(self, kind: str, step: int, values: Record) -> None:
        """Write one record. Its `kind`, with a `codec`, is TensorBoard's prefix: docs/monitoring.md."""
        if not self.active:
            return
        # JSON has no infinity and no NaN
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self._metrics.write((json.dumps({"kind": kind, "step": step, **finite}) + "\n").encode())
        # Of two baselines with one name, TensorBoard would show one.
        prefix = f"{kind}/{values['codec']}" if "codec" in values else kind
        for name, value in values.items():
            if isinstance(value, int | float):
                add = partial(SummaryWriter.add_scalar, tag=f"{prefix}/{name}", scalar_value=value)
                self._show(partial(add, global_step=step))

    def image(self, name: str, step: int, pixels: np.ndarray) -> None:
        """Save uint8 `pixels` (H, W, 3) as a PNG file in samples/ and show them in TensorBoard."""
        if not self.active:
            return
        path = self.folder / "samples" / f"{name}_step_{step:07d}.png"
        self._try("samples", lambda: write_image(path, pixels))
        self._show(lambda events: events.add_image(name, pixels, step, dataformats="HWC"))

    def draw_results(self) -> None:
        """Draw the curves of all records as RESULTS_NAME; a failure is reported once and ends nothing."""
        if not self._draws:
            return
        records, image = self.folder / METRICS_NAME, self.folder / RESULTS_NAME

        def write() -> None:
            self._draws = write_results(records, image)

        self._try(RESULTS_NAME, write)

    def rejected(self, name: str, line: str) -> None:
        """Report one unusable image of this process on the console and in its REJECTED_NAME.

        Once, unless this process has found more than MAX_NAMES: later ones are only listed in the file.
        """
        if name in self._names:
            return
        if len(self._names) < MAX_NAMES:
            self._names.add(name)
            console.info(f"skipped {line}")
        self._rejected.write(f"{line}\n".encode("utf-8", "backslashreplace"))

    def _try(self, name: str, write: Callable[[], object]) -> bool:
        """Write something; a failure is reported once for each `name`, and gives False."""
        done = try_to_write(self.folder / name, write, quiet=name in self._failed)
        if not done:
            self._failed.add(name)
        return done

    def close(self) -> None:
        """Flush and close the files."""
        for file in (self._rejected, self._metrics):
            file.write(b"")  # what waited for space on the disk
        self._show(SummaryWriter.close)
        threading.excepthook = self._excepthook


def _remove_later_records(path: Path, last_step: int) -> None:
    """Keep the records up to `last_step`; also remove a line that a crash left incomplete."""

    def kept() -> Iterator[str]:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                with suppress(ValueError, KeyError, TypeError):
                    if json.loads(line)["step"] <= last_step:
                        yield line.rstrip() + "\n"

    if path.exists():
        replace_text(path, kept())


# ---- Weights & Biases ----------------------------------------------------------------------------------


ID_NAME = "wandb_run_id.txt"  # in the output folder: a resumed run continues the same run of W&B


def start_wandb(folder: Path, project: str, config: dict[str, Any]) -> Any:
    """Start the run, or continue the one of this output folder, before TensorBoard's writer is made.

    Returns W&B's run, which `finish` ends. Raises UserError if W&B refuses it.
    """
    check_wandb_installed()  # --wandb may come from the checkpoint of a resumed run
    folder.mkdir(parents=True, exist_ok=True)
    id_file = folder / ID_NAME
    arguments = sys.argv
    try:
        sys.argv = [public_text(word) for word in arguments]  # W&B uploads the command line
        run = import_module("wandb").init(
            project=project,
            name=folder.resolve().name,
            dir=str(folder.resolve()),
            id=read_text(id_file).strip() if id_file.exists() else None,
            resume="allow",
            config=config,
            allow_val_change=True,
            sync_tensorboard=True,
        )
    except Exception as error:  # W&B raises many types, for example without a login
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"--wandb: {reason.rstrip('.')}: run `wandb login`, or set WANDB_MODE=offline"
        ) from error
    finally:
        sys.argv = arguments
    replace_text(id_file, f"{run.id}\n")
    return run
