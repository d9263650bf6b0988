"""The records of a run: each one goes to metrics.jsonl and TensorBoard, which W&B reads if it is on."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from io import TextIOWrapper
from pathlib import Path

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from vae.inference.image_files import write_png
from vae.interop.run_files import METRICS_NAME
from vae.system import console
from vae.system.files import MAX_LINE_CHARS, open_regular, parse_json, replace_text
from vae.training.output.appending import Appender, try_to_write
from vae.training.output.results_image import RESULTS_NAME, write_results

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
        self._draws = active  # RESULTS_NAME, until drawing fails
        self._failed: set[str] = set()  # what a warning has named
        if active:
            self._open(first_step)

    def _open(self, first_step: int) -> None:
        folder = self.folder
        self._try(METRICS_NAME, lambda: _remove_later_records(folder / METRICS_NAME, first_step))
        self._metrics = Appender(folder / METRICS_NAME)
        self._try(EVENTS_NAME, lambda: self._open_events(first_step + 1))

    def _open_events(self, first_step: int) -> None:
        folder = str(self.folder / EVENTS_NAME)
        self._events = SummaryWriter(folder, purge_step=first_step, flush_secs=FLUSH_SECONDS)

    def _show(self, add: Callable[[SummaryWriter], object]) -> None:
        """Add something to TensorBoard, until its writer fails."""
        events = self._events
        if events is not None and not self._try(EVENTS_NAME, lambda: add(events)):
            self._events = None

    def record(self, kind: str, step: int, values: Record) -> None:
        """Write one record. Its `kind`, with a `codec`, is TensorBoard's prefix: docs/monitoring.md."""
        if not self.active:
            return
        line = {"kind": kind, "step": step, **values}
        plain = {key: value if _is_json(value) else None for key, value in line.items()}
        self._metrics.write((json.dumps(plain) + "\n").encode())
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
        self._try("samples", lambda: write_png(path, pixels))
        self._show(lambda events: events.add_image(name, pixels, step, dataformats="HWC"))

    def draw_results(self) -> None:
        """Draw the curves of all records as RESULTS_NAME; a failure is reported once and ends nothing."""
        if not self._draws:
            return
        records, image = self.folder / METRICS_NAME, self.folder / RESULTS_NAME
        try:
            self._try(RESULTS_NAME, lambda: write_results(records, image))
        except Exception as error:  # whatever it is, an image must not end a run
            self._draws = False
            console.warning(f"{image} cannot be drawn: {error}; {METRICS_NAME} contains its values")

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
        self._rejected.close()
        if self.active:
            self._close()

    def _close(self) -> None:
        self._metrics.close()
        self._show(SummaryWriter.close)


def _is_json(value: object) -> bool:
    """Whether JSON can represent the value: infinity and NaN have no form there."""
    return not isinstance(value, float) or math.isfinite(value)


def _remove_later_records(path: Path, last_step: int) -> None:
    """Keep the records up to `last_step`; also remove a line that a crash left incomplete."""
    if not path.exists():
        return
    replace_text(path, _records_until(path, last_step))


def _records_until(path: Path, last_step: int) -> Iterator[str]:
    with TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace") as file:
        while line := file.readline(MAX_LINE_CHARS):
            with suppress(ValueError, KeyError, TypeError):
                if parse_json(line)["step"] <= last_step:
                    yield line.rstrip() + "\n"
