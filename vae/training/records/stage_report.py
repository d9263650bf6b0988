"""What a run prints at its start, such as a warning about disk space, and around a stage."""

import shutil
from pathlib import Path

import torch

from vae.config.options import Config
from vae.losses.perceptual import RANDOM_NOTE
from vae.memory.plan import checkpoint_bytes
from vae.memory.plan_table import floor_seconds
from vae.system import console
from vae.system.files import nearest_existing
from vae.system.gpus import match_card
from vae.system.host import GIB
from vae.training.memory.oom_retry import StepSettings
from vae.training.memory.stage_memory import StagePlan, memory_line, memory_peaks, plan_line
from vae.training.output.logbook import Logbook
from vae.training.output.run_folder import checkpoint_paths
from vae.training.parts import PreparedRun
from vae.training.records.duration import duration_text
from vae.training.records.summary import (
    busy_line,
    cache_line,
    cache_warning,
    crops_text,
    data_line,
    device_line,
    late_discriminator_note,
    loss_line,
    model_line,
    steps_line,
    warm_start_warning,
)
from vae.training.schedule import HARMFUL_FACTOR, StageSchedule
from vae.training.stages import Stage, StageSteps
from vae.training.state import TrainingState


def print_remarks(run: PreparedRun) -> None:
    """Print what makes this run slow, its start bad, or its disk full."""
    stages = run.state.stages
    if warning := space_warning(run.output_dir, run.config, stages, [run.steps(stage) for stage in stages]):
        console.warning(warning)
    if warning := cache_warning(run.config.data, run.training_set, run.dist):
        console.warning(warning)
    if remark := busy_line(run.dist.device, torch.get_num_threads()):
        console.info(remark)
    loss = run.config.loss
    if loss.perceptual_weight and loss.perceptual_net == "random":
        console.warning(RANDOM_NOTE)
    if not (run.provenance.resumed_from or run.config.model.init_from):
        console.info(
            "note: this is a new VAE: no existing SDXL or FLUX model can read its latents, it is made for a "
            "diffusion model of its own. --profile decoder improves the VAE of an existing one (docs/jobs.md)"
        )
    if not run.provenance.resumed_from and (warning := warm_start_warning(run.config.model)):
        console.warning(warning)


def print_stage(run: PreparedRun, schedule: StageSchedule, plan: StagePlan) -> None:
    """Print what is about to be trained: model, data, loss, device, memory, steps and folder."""
    config = run.config
    state = run.state
    steps = schedule.steps
    size = run.state.stage.image_size
    start = f"{config.model.init} start"
    if run.provenance.resumed_from:
        start = f"from {run.provenance.resumed_from}, step {state.position.step}"
    elif config.model.init_from:
        start = f"from {config.model.init_from}"
    if config.optim.train_part == "decoder":
        start += ", trains the decoder only"
    validation = run.validation_set.count if run.validation_set else 0
    buckets = run.training_set.buckets(config, size, steps.images)
    lines = [
        f"model   {model_line(config.model, state.autoencoder)}; {start}",
        f"data    {data_line(config.data, run.training_set.num_images, validation)}; "
        f"{crops_text(config.data.crop, size, buckets)}, {console.counted(run.num_workers, 'worker')}",
        cache_line(config.data),
        f"loss    {loss_line(run.networks.terms, schedule.loss)}",
        f"device  {device_line(run.dist, config.speed, run.networks.dtype, run.compiled)}",
        f"plan    {plan_line(plan, size, steps.local_images, config.speed.micro_batch_size)}",
        f"steps   {steps_line(steps, config.optim, schedule.peak)}",
        _time_line(plan, steps, run),
        f"output  {run.output_dir}   (tensorboard --logdir {run.output_dir / 'logs'})",
        _rate_note(schedule),
        late_discriminator_note(schedule.loss, state.position.step, _last_step(run, steps)),
    ]
    console.info("\n".join(filter(None, lines)))


def _last_step(run: PreparedRun, steps: StageSteps) -> int:
    """The optimizer step at which the run ends; `steps` are those of the stage that begins or goes on."""
    state, limit = run.state, run.config.run.max_steps
    later = (stage for stage in state.stages if stage.first_epoch > steps.first_epoch)
    left = steps.total - steps.done(state.position) + sum(run.steps(stage).total for stage in later)
    last = state.position.step + left
    return last if limit is None else min(last, limit)


def _time_line(plan: StagePlan, steps: StageSteps, run: PreparedRun) -> str | None:
    """The least time of the stage on a card with recorded rates, which are for half precision."""
    device = run.dist.device
    if device.type != "cuda" or run.networks.dtype == torch.float32:
        return None
    properties = torch.cuda.get_device_properties(device)
    card = match_card(properties.name, properties.total_memory / GIB)
    seconds = floor_seconds(plan.memory, steps.local_images, card) if card else None
    if seconds is None:
        return None
    return (
        f"time    at least {duration_text(seconds * steps.total)}, {seconds:.2g} s per step: arithmetic and "
        "memory traffic at the card's rates, not measured"
    )


def _rate_note(schedule: StageSchedule) -> str | None:
    """A note if a given --learning_rate is likely to end the stage below its start."""
    if schedule.peak <= HARMFUL_FACTOR * schedule.ruled_peak:
        return None
    steps = console.counted(schedule.steps.total, "step")
    return (
        f"note: --learning_rate {schedule.peak:g} is kept, but {steps} at this rate may end below their "
        f"start ({schedule.start}): the default is {schedule.ruled_peak:.2g} here"
    )


def record_memory(logbook: Logbook, state: TrainingState, plan: StagePlan, settings: StepSettings) -> None:
    """Record and print the stage's measured memory peaks beside the predicted one."""
    planned, device = plan.memory, state.running_sq_norms.device
    predicted, peaks = plan.predicted / GIB, memory_peaks(device)
    record: dict[str, float | str] = {
        "image_size": state.stage.image_size,
        "micro_batch": settings.micro_batch,
        "recompute": settings.recompute,
        "predicted_peak_gib": predicted,
        **peaks,
    }
    logbook.record("memory", state.position.step, record)
    changed = (settings.recompute, settings.micro_batch) != (planned.recompute, planned.micro_batch)
    console.info(memory_line(predicted, peaks, changed))


def checkpoints_at_once(config: Config, stages: list[Stage], steps: list[StageSteps]) -> int:
    """The most checkpoints that a run has on disk at once, with the one that is being written."""
    options = config.run
    saves = sum(-(-stage.num_epochs // options.checkpoint_freq) for stage in stages)
    if options.checkpoint_steps:
        saves += sum(stage_steps.total for stage_steps in steps) // options.checkpoint_steps
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
