"""The options of infer_vae.py, each declared once."""

from dataclasses import MISSING, dataclass

from vae.config.errors import UserError
from vae.config.flags import parse_section
from vae.config.options import (
    background_option,
    device_option,
    max_pixels_option,
    option,
    weights_option,
)

MODES = ("reconstruct", "encode", "decode", "interpolate", "variations")
# Options that one mode alone reads.
_MODE_OF = {"steps": "interpolate", "count": "variations", "noise_scale": "variations", "seed": "variations"}


@dataclass(frozen=True)
class InferConfig:
    """Which VAE, what it is used on, and how."""

    vae: str = option(
        MISSING, "the VAE: one of our checkpoints, a diffusers folder or a .safetensors file", metavar="PATH"
    )
    mode: str = option(
        MISSING,
        "reconstruct: images through encoder and decoder; encode: images to latents; decode: latents to "
        "images; interpolate: a series between two of either; variations: samples around each of either",
        choices=MODES,
    )
    input: tuple[str, ...] = option(
        MISSING, "files and folders (of any depth): images, or latents (.safetensors)", metavar="PATH"
    )
    output_dir: str = option(MISSING, "where results go, named as the inputs; made if missing", metavar="DIR")
    overwrite: bool = option(False, "replace results that are there already")
    steps: int = option(
        8,
        "interpolate: images in the series, both ends included",
        metavar="N",
        at_least=2,
        at_most=10_000,
    )
    count: int = option(4, "variations: samples of each input", metavar="N", at_least=1, at_most=10_000)
    noise_scale: float = option(
        1.0,
        "variations: how far samples lie from the middle, in standard deviations of the VAE's own posterior",
        metavar="X",
        at_least=0,
    )
    seed: int = option(0, "variations: another seed draws others", metavar="N", at_least=0, at_most=2**63 - 1)
    tile: bool = option(
        False,
        "for images larger than memory: layer by layer over tiles, features in host memory; same result up "
        "to rounding",
    )
    tile_size: int = option(512, "side of the tiles; smaller takes less memory", metavar="PX", at_least=32)
    weights: str = weights_option()
    any_vae: bool = option(
        False, "decode latents although their record names another encoder, or nothing at all"
    )
    dtype: str = option(
        "auto",
        "precision of the computation; auto: bf16 on a card that has it, else fp32",
        choices=("auto", "fp32", "bf16", "fp16"),
    )
    device: str = device_option("to compute on")
    background: str = background_option()
    max_pixels: int = max_pixels_option("reject")


EPILOG = """examples:
  infer_vae.py --vae outputs/first/vae --mode reconstruct --input photo.jpg --output_dir seen
  infer_vae.py --vae outputs/first/vae --mode encode --input data/train --output_dir latents
  infer_vae.py --vae outputs/first/vae --mode decode --input latents --output_dir decoded
  infer_vae.py --vae outputs/first/vae --mode reconstruct --input huge.png --output_dir seen --tile

A file that cannot be used is named and the others are finished; the exit code is then 77.
"""


def parse_infer_flags(argv: list[str]) -> InferConfig:
    """The options of one command; UserError where one of them says nothing about the others."""
    config = parse_section(
        InferConfig,
        "infer_vae.py",
        "Use a trained VAE: see what it makes of images, write their latents, and turn latents into images.",
        EPILOG,
        argv,
    )
    given = {word.split("=")[0] for word in argv}
    for name, mode in _MODE_OF.items():
        if f"--{name}" in given and config.mode != mode:
            raise UserError(f"--{name} belongs to --mode {mode}, not to --mode {config.mode}: leave it out")
    if "--tile_size" in given and not config.tile:
        raise UserError(f"--tile_size {config.tile_size} says nothing without --tile: add it")
    return config
