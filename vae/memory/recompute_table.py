"""A table of the recompute levels: bytes and arithmetic of one step of the default model, counted.

python -m vae.memory.recompute_table --help
"""

import argparse
from dataclasses import replace

import torch

from vae.config.options import RECOMPUTE, LossConfig, ModelConfig
from vae.config.resolve import check_image_size
from vae.memory.available import CUDA_RESERVE
from vae.memory.plan import StepMemory, StepSpec, step_memory
from vae.system import console
from vae.system.errors import UserError
from vae.system.host import GIB

TERA = 1e12


def default_spec(image_size: int, batch: int = 1) -> StepSpec:
    """The step behind the figures in the documentation: bf16, L1 + LPIPS + KL, EMA weights."""
    return StepSpec(
        model=ModelConfig(),
        loss=LossConfig(),
        image_size=image_size,
        batch=batch,
        dtype=torch.bfloat16,
        channels_last=True,
        ema=True,
        reserve=CUDA_RESERVE,
    )


def memory_by_level(spec: StepSpec) -> list[StepMemory]:
    """The step at every recompute level, with one image per pass, from the fastest level to the smallest."""
    return [step_memory(replace(spec, recompute=level), 1) for level in RECOMPUTE]


def recompute_table(image_size: int) -> str:
    """Working bytes per pixel and arithmetic of each recompute level, and all bytes of 1 and of 4 images."""
    one, four = (memory_by_level(default_spec(image_size, batch)) for batch in (1, 4))
    lines = [
        f"{'--recompute':<16}{'bytes/pixel':>12}{'TFLOP/image':>13}{'GiB, 1 image':>14}{'4 as 4 x 1':>12}"
    ]
    for single, passes in zip(one, four, strict=True):
        lines.append(
            f"{single.recompute:<16}{single.working / image_size**2:>12,.0f}{single.flops / TERA:>13.1f}"
            f"{single.total / GIB:>14.1f}{passes.total / GIB:>12.1f}"
        )
    return "\n".join(lines)


def side(text: str) -> int:
    """Parse the side of a square image that the default model supports, px."""
    try:
        check_image_size(int(text), ModelConfig())
    except (ValueError, UserError) as error:
        raise argparse.ArgumentTypeError(f"{text}: use a multiple of 8 from 16 on, such as 1024") from error
    return int(text)


def main() -> None:
    """Print the table for the side on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vae.memory.recompute_table", description=recompute_table.__doc__, allow_abbrev=False
    )
    help_text = "side of the square images, px (%(default)s)"
    parser.add_argument("side", nargs="?", type=side, default=1024, metavar="SIDE", help=help_text)
    console.info(recompute_table(parser.parse_args().side))


if __name__ == "__main__":
    main()
