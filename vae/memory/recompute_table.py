"""The ladder as a table: bytes and arithmetic of one step of the default model at every rung, counted.

python -m vae.memory.recompute_table --help
"""

import argparse
from dataclasses import replace

import torch

from vae.config.errors import UserError
from vae.config.options import RECOMPUTE, LossConfig, ModelConfig
from vae.config.resolve import check_image_size
from vae.host import GIB
from vae.memory.available import CUDA_RESERVE
from vae.memory.plan import StepMemory, StepSpec, step_memory

TERA = 1e12


def default_spec(image_size: int, batch: int = 1) -> StepSpec:
    """The step the figures of the documentation are of: bf16, L1 + LPIPS + KL, averaged weights."""
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


def ladder(spec: StepSpec) -> list[StepMemory]:
    """The step at every rung with single images as passes, from the fastest to the smallest."""
    return [step_memory(replace(spec, recompute=rung), 1) for rung in RECOMPUTE]


def ladder_table(image_size: int) -> str:
    """Working bytes per pixel and arithmetic of each rung, and all bytes of 1 image and of 4 in turn."""
    one, four = ladder(default_spec(image_size)), ladder(default_spec(image_size, batch=4))
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
    """The side of a square image that the default model takes, px."""
    try:
        check_image_size(int(text), ModelConfig())
    except (ValueError, UserError) as error:
        raise argparse.ArgumentTypeError(f"{text}: give a multiple of 8 from 16, as 1024") from error
    return int(text)


def main() -> None:
    """Print the table for the side that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m vae.memory.recompute_table", description=ladder_table.__doc__, allow_abbrev=False
    )
    help_text = "side of the square images, px (%(default)s)"
    parser.add_argument("side", nargs="?", type=side, default=1024, metavar="SIDE", help=help_text)
    print(ladder_table(parser.parse_args().side))


if __name__ == "__main__":
    main()
