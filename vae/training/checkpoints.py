"""The checkpoints of a run in its folder: their names, which is newest, which may go."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vae.config.errors import UserError
from vae.console import command_line
from vae.interop.checkpoint_file import DamagedCheckpointError, load_checkpoint, record_path
from vae.training.stages import Position, Stage

_NAME = re.compile(r"checkpoint_(epoch|step)_(\d+)\.pt")


def epoch_name(epochs: int) -> str:
    """Name of the checkpoint after `epochs` epochs of the run."""
    return f"checkpoint_epoch_{epochs}.pt"


def step_name(step: int) -> str:
    """Name of a checkpoint between epochs, after `step` optimizer steps of the run."""
    return f"checkpoint_step_{step}.pt"


def latest_command(folder: Path) -> str:
    """The command that goes on with the run in `folder`, ready to be typed."""
    return command_line("python", "train_vae.py", "--output_dir", folder, "--resume_from", "latest")


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in `folder`, newest position first; those that cannot be opened stand last."""
    found = [path for path in folder.glob("checkpoint_*.pt") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (saved_step(path), path.name), reverse=True)


def folders_of_runs(folder: Path) -> list[Path]:
    """Folders directly in `folder` that hold checkpoints, the one written to last first."""
    newest = {}
    for path in folder.glob("*/checkpoint_*.pt"):
        if _NAME.fullmatch(path.name):
            newest[path.parent] = max(newest.get(path.parent, 0.0), path.stat().st_mtime)
    return sorted(newest, key=newest.get, reverse=True)


def saved_step(path: Path) -> int:
    """Optimizer step of a checkpoint, read without its tensors; -1 where it cannot be opened."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return int(content["position"]["step"])
    except Exception:  # damage shows itself in many kinds; the verified load names it
        return -1


def load_newest(folder: Path, say: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
    """The newest valid checkpoint of a folder and its content; damaged ones are named through `say`.

    Raises UserError where there are checkpoints and none is valid.
    """
    paths = sorted(list_checkpoints(folder), key=lambda path: saved_step(path) >= 0)
    for path in paths:  # first those that cannot be opened: they may be the newest, and are to be named
        try:
            return path, load_checkpoint(path)
        except UserError as error:
            say(f"skipped: {error}")
    if paths:
        raise UserError(f"--resume_from latest: none of the {len(paths)} checkpoints in {folder} is valid")
    return None


def load_named(path: Path, say: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """The checkpoint at `path`; where it is damaged, the newest valid one beside it, said through `say`."""
    try:
        content = load_checkpoint(path)
    except DamagedCheckpointError as error:
        others = [p for p in list_checkpoints(path.parent) if p.resolve() != path.resolve()]
        for other in others:
            try:
                content = load_checkpoint(other)
            except UserError:
                continue
            say(f"WARNING: {error}; going on from {other}, the newest valid checkpoint beside it")
            return other, content
        raise
    newer = [p.name for p in list_checkpoints(path.parent) if saved_step(p) > content["position"]["step"]]
    if newer:
        say(f"note: {path.parent} holds newer checkpoints of this run: {', '.join(newer[:3])}")
    return path, content


def prune(folder: Path, keep: int, stages: list[Stage], position: Position, best: str | None) -> list[Path]:
    """Remove all but the newest `keep`, the best and each finished stage's last; returns the removed.

    Checkpoints further on, left by a run that was taken up again before them, neither go nor count. What a
    process killed within a save has left goes too.
    """
    last = {epoch_name(stage.end_epoch) for stage in stages if stage.end_epoch <= position.epoch}
    others = [path for path in list_checkpoints(folder) if path.name not in last and path.name != best]
    removed = [path for path in others if saved_step(path) <= position.step][keep:]
    for path in removed:
        path.unlink(missing_ok=True)
        record_path(path).unlink(missing_ok=True)
    for torn in folder.glob("checkpoint_*.tmp"):
        torn.unlink(missing_ok=True)
    return removed
