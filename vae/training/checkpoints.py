"""The checkpoint files in the folder of a run: their names and order, loading the newest, pruning."""

import os
from collections.abc import Callable
from pathlib import Path

from vae.interop.checkpoint_file import CheckpointContent, load_checkpoint, read_torch_file, record_path
from vae.system import console
from vae.system.console import command_line
from vae.system.errors import UserError
from vae.training.distributed import Distributed
from vae.training.run_folder import checkpoint_paths, epoch_name, step_name
from vae.training.stages import Position, Stage

ABANDONED_NAME = "abandoned"  # folder of the checkpoints that a run has gone back behind
Loaded = tuple[Path, CheckpointContent]  # the path of a checkpoint and its content


def position_name(position: Position) -> str:
    """Return the file name of the checkpoint at a position."""
    return step_name(position.step) if position.images_in_epoch else epoch_name(position.epoch)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, the furthest position first, unreadable ones last."""
    return sorted(checkpoint_paths(folder), key=lambda path: (saved_step(path), path.name), reverse=True)


def saved_step(path: Path) -> int:
    """Read the optimizer step of a checkpoint without its tensors; -1 if it cannot be opened."""
    try:
        return int(read_torch_file(path)["position"]["step"])
    except (OSError, ValueError, KeyError, TypeError):  # load_checkpoint reports it
        return -1


def load_newest(folder: Path) -> Loaded | None:
    """Load the newest valid checkpoint in a folder; damaged ones are reported.

    Raises UserError if there are checkpoints and none is valid.
    """
    # Those that cannot be opened come first: they may be the newest, so they are reported.
    paths = sorted(list_checkpoints(folder), key=lambda path: saved_step(path) >= 0)
    for path in paths:
        try:
            return path, load_checkpoint(path)
        except UserError as error:
            console.info(f"skipped: {error}")
    if paths:
        raise UserError(
            f"--resume_from latest: none of the {len(paths)} checkpoints in {folder} is valid: restore one "
            "from a copy, or use another --output_dir for a new run"
        )
    return None


def load_on_all(find: Callable[[], Loaded | None], dist: Distributed) -> Loaded | None:
    """Call `find` on the main process; the others load the checkpoint that it has chosen."""
    loaded: list[Loaded] = []

    def choose() -> Path | None:
        loaded.extend(filter(None, [find()]))
        return loaded[0][0] if loaded else None

    path = dist.on_main(choose)
    if path is not None and not loaded:
        return path, load_checkpoint(path)
    return loaded[0] if loaded else None


def abandon_newer(folder: Path, step: int) -> None:
    """Move the checkpoints after `step`, from which training continues, out of the way of the new ones.

    Those that cannot be opened are moved, too: a new one of the same name would replace them.
    """
    newer = [path for path in list_checkpoints(folder) if not 0 <= saved_step(path) <= step]
    if not newer:
        return
    abandoned = folder / ABANDONED_NAME
    abandoned.mkdir(exist_ok=True)
    for path in newer:
        target = abandoned / path.name
        while target.exists():  # the run has gone back before
            target = target.with_stem(f"{target.stem}_again")
        os.replace(path, target)
        if record_path(path).exists():
            os.replace(record_path(path), record_path(target))
    names = ", ".join(path.name for path in newer[:3])
    console.info(f"{len(newer)} newer or unreadable checkpoints ({names}) are moved to {abandoned}")


def check_newest(folder: Path, checkpoint: Path, reason: str) -> None:
    """Raise UserError if `folder` has newer ones: without a step to make, they must not be moved away.

    `reason`: why no step is to make.
    """
    newer = [path for path in list_checkpoints(folder) if saved_step(path) > saved_step(checkpoint)]
    if newer:
        export = command_line("python", "export_vae.py", "--vae", checkpoint, "--output", "NAME")
        raise UserError(
            f"--resume_from {checkpoint}: {reason}, but {newer[0].name} is newer: resume that one, or export "
            f"this one with: {export}"
        )


def stage_ends(stages: list[Stage], position: Position) -> set[str]:
    """Return the name of the last checkpoint of each finished stage."""
    done = [stage for stage in stages if stage.is_done(position)]
    within_epochs = {step_name(s.first_step + s.num_steps) for s in done if s.num_steps is not None}
    return {epoch_name(stage.end_epoch) for stage in done} | within_epochs


def prune(folder: Path, keep: int, *, apart: set[str], needed: set[str]) -> list[Path]:
    """Remove all but the newest `keep` checkpoints and those with these names; returns the removed.

    Those `apart` do not count, nor do files that cannot be opened, which others may have written. If one
    cannot be removed, because a program on Windows has it open, OSError is raised after the others are.
    """
    counted = [p for p in list_checkpoints(folder) if p.name not in apart and saved_step(p) >= 0]
    removed, failure = [], None
    for path in counted[keep:]:
        if path.name in needed:
            continue
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            failure = error
            continue
        removed.append(path)
    for record in folder.glob("checkpoint_*.pt.sha256"):  # also those of a process that was killed here
        if not (folder / record.stem).exists():
            record.unlink(missing_ok=True)
    if failure:
        raise failure
    return removed
