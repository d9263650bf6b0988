"""The folder of a run: names of its files, and which runs a folder contains. Needs no PyTorch."""

import re
from pathlib import Path

from vae.system import console

METRICS_NAME = "metrics.jsonl"
_NAME = re.compile(r"checkpoint_(epoch|step)_(\d+)\.pt")


def epoch_name(epochs: int) -> str:
    """File name of the checkpoint after `epochs` epochs of the run."""
    return f"checkpoint_epoch_{epochs}.pt"


def step_name(step: int) -> str:
    """File name of a checkpoint within an epoch, after `step` optimizer steps of the run."""
    return f"checkpoint_step_{step}.pt"


def checkpoint_paths(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, in no particular order."""
    return [path for path in folder.glob("checkpoint_*.pt") if _NAME.fullmatch(path.name)]


def folders_of_runs(folder: Path) -> list[Path]:
    """Folders directly in `folder` that contain checkpoints, the most recently written first."""
    newest: dict[Path, float] = {}
    for path in folder.glob("*/checkpoint_*.pt"):
        if _NAME.fullmatch(path.name):
            newest[path.parent] = max(newest.get(path.parent, 0.0), path.stat().st_mtime)
    return sorted(newest, key=lambda found: newest[found], reverse=True)


def resume_command(folder: Path) -> str:
    """The command that resumes the run in `folder`."""
    return console.command_line("python", "train_vae.py", "--output_dir", folder, "--resume_from", "latest")
