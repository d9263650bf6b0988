"""What a run prints at its start and at the beginning and the end of a stage."""

import torch

from vae.system import console
from vae.system.host import GIB
from vae.training.context import RunContext, StageContext
from vae.training.memory.stage_memory import memory_line, memory_peaks, plan_line
from vae.training.output.disk_space import space_warning
from vae.training.records.summary import (
    busy_line,
    cache_line,
    cache_warning,
    crops_text,
    data_line,
    device_line,
    loss_line,
    model_line,
    steps_line,
    warm_start_warning,
)
from vae.training.schedule import HARMFUL_FACTOR
from vae.training.state import TrainingState


def print_remarks(run: RunContext, state: TrainingState) -> None:
    """Print what makes this run slow, its start bad, or its disk full."""
    steps = [run.steps_of(stage) for stage in state.stages]
    if warning := space_warning(run.output_dir, run.config, state.stages, steps):
        console.warning(warning)
    if warning := cache_warning(run.config.data, run.training_set, run.dist):
        console.warning(warning)
    if remark := busy_line(run.dist.device, torch.get_num_threads()):
        console.info(remark)
    loss = run.config.loss
    if loss.perceptual_weight and loss.perceptual_net == "random":
        console.warning(
            "--perceptual_net random: LPIPS has random weights, its values cannot be compared with others"
        )
    if not run.resumed_from and (warning := warm_start_warning(run.config.model)):
        console.warning(warning)


def print_stage(run: RunContext, ctx: StageContext, state: TrainingState) -> None:
    """Print what is about to be trained: model, data, loss, device, memory, steps and folder."""
    config = run.config
    start = f"{config.model.init} start"
    if run.resumed_from:
        start = f"from {run.resumed_from}, step {state.position.step}"
    elif config.model.init_from:
        start = f"from {config.model.init_from}"
    validation = run.validation_set.count if run.validation_set else 0
    buckets = run.training_set.buckets(config, ctx.stage.image_size, ctx.steps.images)
    plan = plan_line(ctx.plan, ctx.stage.image_size, ctx.steps.local_images, config.speed.micro_batch_size)
    lines = [
        f"model   {model_line(config.model, state.autoencoder)}; {start}",
        f"data    {data_line(config.data, run.training_set.num_images, validation)}; "
        f"{crops_text(config.data.crop, ctx.stage.image_size, buckets)}, "
        f"{console.counted(run.num_workers, 'worker')}",
        cache_line(config.data),
        f"loss    {loss_line(run.networks.terms, config.loss)}",
        f"device  {device_line(run.dist, config.speed, run.networks.dtype, run.compiled)}",
        f"plan    {plan}",
        f"steps   {steps_line(ctx.steps, config.optim, ctx.peak)}",
        f"output  {run.output_dir}   (tensorboard --logdir {run.output_dir / 'logs'})",
    ]
    console.info("\n".join(filter(None, [*lines, _rate_note(run, ctx)])))


def _rate_note(run: RunContext, ctx: StageContext) -> str | None:
    """A note if a given --learning_rate is likely to end the stage below its start."""
    ruled = run.ruled_peak(ctx.stage)
    if ctx.peak <= HARMFUL_FACTOR * ruled:
        return None
    steps = console.counted(ctx.steps.total, "step")
    return (
        f"note: --learning_rate {ctx.peak:g} is kept, but {steps} at this rate may end below their start "
        f"({run.start_of(ctx.stage)}): the default is {ruled:.2g} here"
    )


def record_memory(run: RunContext, ctx: StageContext, state: TrainingState) -> None:
    """Record and print the stage's measured memory peaks beside the predicted one."""
    planned, settings = ctx.plan.memory, ctx.settings
    predicted, peaks = planned.total / GIB, memory_peaks(run.dist.device)
    record: dict[str, float | str] = {
        "image_size": ctx.stage.image_size,
        "micro_batch": settings.micro_batch,
        "recompute": settings.recompute,
        "predicted_peak_gib": predicted,
        **peaks,
    }
    ctx.logbook.record("memory", state.position.step, record)
    changed = (settings.recompute, settings.micro_batch) != (planned.recompute, planned.micro_batch)
    console.info(memory_line(predicted, peaks, changed, ctx.plan.cuda_graph))
