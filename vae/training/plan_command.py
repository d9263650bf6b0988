"""--plan: the memory and the least time of a command's steps on any card, before anything is trained."""

from collections.abc import Iterator
from dataclasses import replace

from vae.config.options import RECOMPUTE, Config
from vae.config.resolve import with_local_batch
from vae.memory.plan_table import ProfilePlan, Target, find_target, plan_profile, print_table
from vae.training.precheck import Given
from vae.training.setup import check_stage, resolve_options, run_stages
from vae.training.stages import Stage, config_of


def print_stage_plans(given: Given, gpu: str | None = None, vram_gib: float | None = None) -> None:
    """Print each stage of the command that is left, as chosen and at each other recompute level.

    The card is that of `find_target`. Raises UserError if something is wrong.
    """
    target = find_target(gpu, vram_gib)
    options = resolve_options(given, target.is_gpu, target.settings)
    config = with_local_batch(options.config, 1)
    stages, position = run_stages(config, options.given, options.content)
    left = {
        number: _at_stage(config, stage, stages)
        for number, stage in enumerate(stages, 1)
        if stage.end_epoch > position.epoch
    }
    print_table(target, _plans(left, target), "stage")


def _at_stage(config: Config, stage: Stage, stages: list[Stage]) -> Config:
    check_stage(config, stage)
    config = config_of(stage, stages, config)
    return replace(
        config,
        data=replace(config.data, image_size=stage.image_size),
        run=replace(config.run, batch_size=stage.batch_size),
    )


def _plans(configs: dict[int, Config], target: Target) -> Iterator[ProfilePlan]:
    for number, config in configs.items():
        chosen = plan_profile(f"{number}", config, target)
        yield chosen
        for level in RECOMPUTE:
            if level != chosen.recompute and config.speed.recompute == "auto":
                speed = replace(config.speed, recompute=level)
                yield plan_profile("  or", replace(config, speed=speed), target)
