"""The options of infer_vae.py, each declared once."""

from dataclasses import MISSING, dataclass

from vae.config.declare import (
    background_option,
    device_option,
    kernels_option,
    max_pixels_option,
    option,
    weights_option,
)
from vae.config.flags import parse_section
from vae.system.errors import UserError

MODES = ("reconstruct", "encode", "decode", "interpolate", "variations")
# Options that only one mode reads.
_MODE_OF = {"steps": "interpolate", "count": "variations", "noise_scale": "variations", "seed": "variations"}


@dataclass(frozen=True)
class InferConfig:
    """The VAE, its input, and what to do with it."""

    vae: str = option(
        MISSING,
        "VAE: a checkpoint of train_vae.py, a diffusers folder, a .safetensors file, or OWNER/REPO[:PATH] of "
        "the Hugging Face hub",
        metavar="PATH",
    )
    mode: str = option(
        MISSING,
        "reconstruct: encode and decode images; encode: images to latents; decode: latents to images; "
        "interpolate: a series of images between two inputs; variations: samples around each input",
        choices=MODES,
    )
    input: tuple[str, ...] = option(
        MISSING, "files and folders (with subfolders) of images or latents (.safetensors)", metavar="PATH"
    )
    output_dir: str = option(
        MISSING,
        "folder for the results, named after the inputs; created if missing",
        metavar="DIR",
        writes=True,
    )
    overwrite: bool = option(False, "replace existing results")
    steps: int = option(
        8,
        "interpolate: number of images in the series, including both ends",
        metavar="N",
        at_least=2,
        at_most=10_000,
    )
    count: int = option(4, "variations: samples per input", metavar="N", at_least=1, at_most=10_000)
    noise_scale: float = option(
        1.0,
        "variations: factor on the standard deviation of the VAE's own posterior",
        metavar="X",
        at_least=0,
    )
    seed: int = option(
        0, "variations: random seed of the samples", metavar="N", at_least=0, at_most=2**63 - 1
    )
    tiles: str = option(
        "auto",
        "for large images; blended: overlapping tiles one by one, approximate, memory of one tile; off: "
        "whole images; auto: blended if the whole image does not fit into memory",
        choices=("auto", "blended", "off"),
    )
    tile_size: int = option(
        512, "side of the tiles in px; smaller tiles need less memory", metavar="PX", at_least=32
    )
    weights: str = weights_option()
    any_vae: bool = option(False, "decode latents even if another encoder, or an unknown one, made them")
    dtype: str = option(
        "auto",
        "precision of the computation; auto: fp16 on a GPU, fp32 if a result overflows and on a CPU",
        choices=("auto", "fp32", "bf16", "fp16"),
    )
    device: str = device_option("to compute on")
    kernels: str = kernels_option()
    background: str = background_option()
    max_pixels: int = max_pixels_option("reject")


EPILOG = """examples:
  infer_vae.py --vae outputs/first/vae --mode reconstruct --input photo.jpg --output_dir seen
  infer_vae.py --vae outputs/first/vae --mode encode --input data/train --output_dir latents
  infer_vae.py --vae outputs/first/vae --mode decode --input latents --output_dir decoded

A file that cannot be used is reported, the other files are processed, and the exit code is then 77.
"""


def parse_infer_flags(argv: list[str]) -> InferConfig:
    """The options of one command. Raises UserError if a flag has no effect in the given mode."""
    config = parse_section(
        InferConfig,
        "infer_vae.py",
        "Use a trained VAE: reconstruct images, encode images to latents, and decode latents to images.",
        EPILOG,
        argv,
    )
    given = {word.split("=")[0] for word in argv}
    for name, mode in _MODE_OF.items():
        if f"--{name}" in given and config.mode != mode:
            raise UserError(f"--{name} has an effect only with --mode {mode}, not {config.mode}: remove it")
    if "--tile_size" in given and config.tiles == "off":
        raise UserError(f"--tile_size {config.tile_size} has no effect with --tiles off: remove one of them")
    return config
