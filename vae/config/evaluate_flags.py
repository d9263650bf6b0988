"""The options of evaluate_vae.py, each declared once."""

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

LEAST_SIZE = 8  # px: below it an image is smaller than what one latent pixel of this family stands for
WHOLE = 0  # as a size: images as they are


@dataclass(frozen=True)
class EvaluateConfig:
    """Which VAEs are compared, on which images, under which protocol."""

    vae: tuple[str, ...] = option(
        MISSING,
        "one or several VAEs: checkpoints, diffusers folders, .safetensors files",
        metavar="PATH",
    )
    data_path: str = option(MISSING, "folder of images, any depth", metavar="DIR")
    output_dir: str = option(
        MISSING, "where report.html, the tables and sample images go; made if missing", metavar="DIR"
    )
    overwrite: bool = option(False, "replace the results of an earlier comparison")
    sizes: tuple[int, ...] = option(
        (256,),
        "sides of the squares that are measured, px; 0: whole images",
        metavar="PX",
        at_least=0,
    )
    crop: str = option(
        "resize",
        "how an image becomes a square; resize: its short side is scaled to the size, then the middle is "
        "taken; center: the middle alone, unscaled",
        choices=("resize", "center"),
    )
    posterior: str = option(
        "mode",
        "what is decoded: the middle of the encoder's posterior or a sample",
        choices=("mode", "sample"),
    )
    seed: int = option(
        0, "another seed draws other samples of --posterior sample", metavar="N", at_least=0, at_most=2**31
    )
    max_images: int = option(
        0, "at most this many images, evenly spread over the sorted names; 0: all", metavar="N", at_least=0
    )
    perceptual_net: str = option(
        "auto",
        "network of LPIPS; auto: vgg where its weights are there or can be downloaded, otherwise LPIPS is "
        "named as missing; random: vgg with random weights, for trials only",
        choices=("auto", "vgg", "alex", "squeeze", "random", "none"),
    )
    perceptual_weights: str | None = option(
        None, "file with the ImageNet weights of --perceptual_net, instead of the download", metavar="FILE"
    )
    rfid: bool = option(
        False, "measure rFID too: needs torchmetrics, torch-fidelity and 91 MB of Inception weights"
    )
    inception_weights: str | None = option(
        None, "file with torch-fidelity's Inception weights, instead of the download", metavar="FILE"
    )
    codecs: bool = option(True, "measure JPEG and WebP too, at as many bytes as the latents in 8 bit")
    probe_images: int = option(
        16,
        "images that equivariance is measured on, at the smallest size; 0: none",
        metavar="N",
        at_least=0,
    )
    samples: int = option(
        2, "images shown of each kind: worst, typical, best; 0: none", metavar="N", at_least=0, at_most=50
    )
    batch_size: int = option(1, "images encoded and decoded at once", metavar="N", at_least=1)
    weights: str = weights_option()
    dtype: str = option("fp32", "precision of encoder and decoder", choices=("fp32", "bf16", "fp16"))
    device: str = device_option("to compute on")
    background: str = background_option()
    max_pixels: int = max_pixels_option("exclude")


EPILOG = """examples:
  evaluate_vae.py --vae outputs/first/vae --data_path data/test --output_dir results/first
  evaluate_vae.py --vae outputs/first/vae outputs/second/vae other.safetensors \\
      --data_path data/test --output_dir results/compared --sizes 128 256
  evaluate_vae.py --vae outputs/first/vae --data_path data/test --output_dir results/whole --sizes 0

An image that cannot be used is named and left out for every VAE; open report.html in a browser.
"""


def parse_evaluate_flags(argv: list[str]) -> EvaluateConfig:
    """The options of one command; UserError where one of them is no use."""
    config = parse_section(
        EvaluateConfig,
        "evaluate_vae.py",
        "Measure one or several VAEs on a folder of images, side by side under one protocol.",
        EPILOG,
        argv,
    )
    _check_together(config)
    return config


def _check_together(config: EvaluateConfig) -> None:
    for size in config.sizes:
        if size != WHOLE and size < LEAST_SIZE:
            raise UserError(
                f"--sizes {size} is too small: the least is {LEAST_SIZE}, and 0 takes whole images"
            )
    for name in ("sizes", "vae"):
        values = getattr(config, name)
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise UserError(f"--{name} names {twice} twice: once is enough")
    if WHOLE in config.sizes and config.batch_size > 1:
        raise UserError(
            f"--batch_size {config.batch_size} does not go with whole images (--sizes 0), whose sides "
            "differ: leave one of them out"
        )
    if config.perceptual_weights is not None and config.perceptual_net in ("random", "none"):
        raise UserError(
            f"--perceptual_weights names a file, but --perceptual_net {config.perceptual_net} uses none: "
            "drop one"
        )
    if config.inception_weights is not None and not config.rfid:
        raise UserError("--inception_weights are read for --rfid only: add it, or leave the file out")
