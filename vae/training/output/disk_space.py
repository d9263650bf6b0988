"""Whether the disk has room for the files of a run."""

import shutil
from pathlib import Path

from vae.config.options import Config
from vae.memory.plan import checkpoint_bytes
from vae.system.files import nearest_existing
from vae.system.host import GIB
from vae.training.output.run_folder import checkpoint_paths
from vae.training.stages import Stage, StageSteps


def checkpoints_at_once(config: Config, stages: list[Stage], steps: list[StageSteps]) -> int:
    """The most checkpoints that a run has on disk at once, with the one that is being written."""
    options = config.run
    saves = sum(-(-stage.num_epochs // options.checkpoint_freq) for stage in stages)
    if options.checkpoint_steps:
        saves += sum(one.total for one in steps) // options.checkpoint_steps
    return min(saves, options.keep_checkpoints + 1 + len(stages)) + 1  # 1: the best


def space_warning(folder: Path, config: Config, stages: list[Stage], steps: list[StageSteps]) -> str | None:
    """The warning that the checkpoints and the export may not fit on the disk of `folder`."""
    size = checkpoint_bytes(config)
    count = checkpoints_at_once(config, stages, steps)
    try:
        existing = sum(path.stat().st_size for path in checkpoint_paths(folder))
        free = shutil.disk_usage(nearest_existing(folder)).free
    except OSError:  # nobody knows
        return None
    export = size // 4  # fp32 weights: a checkpoint also has EMA weights and two moments
    needed = count * size + export - existing
    if needed <= free:
        return None
    return (
        f"--output_dir {folder} has {free / GIB:.2f} GiB free, but this run writes up to {needed / GIB:.2f} "
        f"GiB ({count} checkpoints of {size / GIB:.2f} GiB, and the export): free some space, lower "
        f"--keep_checkpoints {config.run.keep_checkpoints}, or use another disk"
    )
