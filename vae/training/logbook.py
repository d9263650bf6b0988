"""The run's records: one dictionary each, to metrics.jsonl, TensorBoard and the console."""

import json
import math
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from vae.console import discard
from vae.files import atomic_path

METRICS_NAME = "metrics.jsonl"
REJECTED_NAME = "rejected_images.txt"


class Logbook:
    """Writes records of one run; made on the main process only, inert on the others."""

    def __init__(self, folder: Path, first_step: int, active: bool):
        """Records after `first_step`, left by a run that went further before it was resumed, are cut off."""
        self.folder = folder
        self.active = active
        if not active:
            return
        _cut_records(folder / METRICS_NAME, first_step)
        self._metrics = (folder / METRICS_NAME).open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "logs"), purge_step=first_step + 1)

    def record(self, kind: str, step: int, values: dict[str, float]) -> None:
        """Write one record; `kind` is train, validation, baseline or memory, and TensorBoard's group."""
        if not self.active:
            return
        line = {"kind": kind, "step": step, **values}
        plain = {key: None if _not_finite(value) else value for key, value in line.items()}
        self._metrics.write(json.dumps(plain) + "\n")
        self._metrics.flush()
        for name, value in values.items():
            if isinstance(value, int | float):
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def image(self, name: str, step: int, pixels: np.ndarray) -> None:
        """Save uint8 `pixels` (H, W, 3) under samples/ and show them in TensorBoard."""
        if not self.active:
            return
        path = self.folder / "samples" / f"{name}_step_{step:07d}.png"
        with atomic_path(path) as temporary:
            Image.fromarray(pixels).save(temporary, format="PNG")
        self._board.add_image(name, pixels, step, dataformats="HWC")

    def rejected(self, line: str) -> None:
        """Name one unusable image on the console and in the list of them."""
        if not self.active:
            return
        say(f"skipped {line}")
        with (self.folder / REJECTED_NAME).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def close(self) -> None:
        """Flush and close the files."""
        if self.active:
            self._metrics.close()
            self._board.close()


def _not_finite(value) -> bool:
    """Infinity and NaN, which JSON does not know."""
    return isinstance(value, float) and not math.isfinite(value)


def say(text: str) -> None:
    """One line on the console that leaves a progress bar whole; a run outlives its console's reader."""
    try:
        tqdm.write(text)
        sys.stdout.flush()  # someone who watches through a pipe sees it now
    except BrokenPipeError:  # as under `| head -1`
        discard(sys.stdout)
        remark = f"nobody reads the output any more: training goes on, its records are in {METRICS_NAME}"
        try:
            print(remark, file=sys.stderr, flush=True)
        except BrokenPipeError:  # as under `2>&1 | head -1`
            discard(sys.stderr)


def _cut_records(path: Path, last_step: int) -> None:
    """Keep the records up to `last_step`; a line torn by a crash goes too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= last_step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    with atomic_path(path) as temporary:
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
