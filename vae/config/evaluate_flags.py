"""The options of evaluate_vae.py, each declared once."""

from dataclasses import MISSING, dataclass
from typing import Any

from vae.config.declare import (
    background_option,
    cache_dir_option,
    cache_gib_option,
    device_option,
    exclude_option,
    kernels_option,
    max_pixels_option,
    option,
    weights_option,
)
from vae.config.flags import parse_values
from vae.config.values import check_once
from vae.system.errors import UserError

MIN_SIZE = 8  # px: a smaller image is smaller than one latent pixel of this model family
WHOLE = 0  # as a size: whole images, not cropped


@dataclass(frozen=True)
class EvaluateConfig:
    """The VAEs to compare, the images, and the protocol."""

    vae: tuple[str, ...] = option(
        MISSING,
        "one or more VAEs: checkpoints of train_vae.py, diffusers folders, .safetensors files, or "
        "OWNER/REPO[:PATH] of the Hugging Face hub",
        metavar="PATH",
    )
    data_path: tuple[str, ...] = option(
        MISSING,
        "folder of images, with subfolders, or the dataset.json of a dataset of shards, also on a remote "
        "store (s3://, gs://, https://); several: each is measured, and the mean of all is given",
        metavar="PATH",
    )
    output_dir: str = option(
        MISSING,
        "folder for report.html, the tables and sample images; created if missing",
        metavar="DIR",
        writes=True,
    )
    exclude: str | None = exclude_option()
    cache_dir: str | None = cache_dir_option()
    cache_gib: float = cache_gib_option()
    overwrite: bool = option(False, "replace the results of an earlier comparison")
    watch: str | None = option(
        None,
        "instead of the comparison, and without --vae and --output_dir: measure each new checkpoint in this "
        "--output_dir of a run, until the run is finished",
        metavar="DIR",
    )
    promote: bool = option(
        False,
        "write name, SHA-256 and metrics of the checkpoint with the best PSNR to promoted.json in --watch",
    )
    sizes: tuple[int, ...] = option(
        (256,), "sides of the square crops to measure, px; 0: whole images", metavar="PX"
    )
    crop: str = option(
        "resize",
        "how an image becomes a square; resize: scale its short side to the size, then crop the center; "
        "center: crop the center without scaling",
        choices=("resize", "center"),
    )
    posterior: str = option(
        "mode", "what to decode: the mode of the encoder's posterior or a sample", choices=("mode", "sample")
    )
    seed: int = option(0, "random seed of --posterior sample", metavar="N", at_least=0, at_most=2**31)
    max_images: int = option(
        0, "maximum number of images, evenly spread over the sorted names; 0: all", metavar="N", at_least=0
    )
    perceptual_net: str = option(
        "auto",
        "LPIPS network; auto: vgg if its weights exist or can be downloaded, otherwise LPIPS is reported as "
        "missing; random: vgg with random weights, only for experiments",
        choices=("auto", "vgg", "alex", "squeeze", "random", "none"),
    )
    perceptual_weights: str | None = option(
        None, "file with ImageNet weights of --perceptual_net, instead of the download", metavar="FILE"
    )
    rfid: bool = option(
        False, "also measure rFID; needs torchmetrics, torch-fidelity and 91 MB of Inception weights"
    )
    inception_weights: str | None = option(
        None, "file with torch-fidelity's Inception weights, instead of the download", metavar="FILE"
    )
    diffusability: bool = option(
        False,
        "also measure what a diffusion model's errors in the latents cost, at the smallest square size: PSNR "
        "after decoding with noise, and the effective rank (docs/evaluate.md)",
    )
    ensemble: bool = option(
        False,
        "also measure the mean of the reconstructions of all --vae, which may differ in shape and start",
    )
    ensemble_weights: tuple[float, ...] | None = option(
        None, "weights of --ensemble, one for each --vae", metavar="WEIGHT", at_least=0, unset="equal"
    )
    codecs: bool = option(
        True,
        "also measure the bicubic baseline, and JPEG and WebP with as many bytes as the latents in 8 bit",
    )
    samples: int = option(
        2,
        "number of sample images of each kind: worst, typical, best; 0: none",
        metavar="N",
        at_least=0,
        at_most=50,
    )
    batch_size: int = option(1, "images to encode and decode at once", metavar="N", at_least=1)
    weights: str = weights_option()
    dtype: str = option("fp32", "precision of encoder and decoder", choices=("fp32", "bf16", "fp16"))
    device: str = device_option("to compute on")
    kernels: str = kernels_option()
    background: str = background_option()
    max_pixels: int = max_pixels_option("exclude")

    @property
    def path(self) -> str:
        """The path of --data_path, of which there is one."""
        (path,) = self.data_path
        return path


@dataclass(frozen=True, kw_only=True)
class WatchConfig(EvaluateConfig):
    """The options with --watch, which replaces --vae and --output_dir."""

    vae: tuple[str, ...] = option((), "not with --watch")
    output_dir: str = option("", "not with --watch", writes=True)


EPILOG = """examples:
  evaluate_vae.py --vae outputs/first/vae --data_path data/test --output_dir results/first
  evaluate_vae.py --vae outputs/first/vae outputs/second/vae other.safetensors \\
      --data_path data/test --output_dir results/compared --sizes 128 256
  evaluate_vae.py --vae outputs/first/vae --data_path data/test --output_dir results/whole --sizes 0

An image that cannot be used is reported and left out for every VAE. Open report.html in a browser.
"""


# Only --help_all shows these.
DETAILS = (
    *("exclude", "cache_dir", "cache_gib", "seed", "perceptual_weights", "inception_weights"),
    *("ensemble_weights", "kernels", "background", "max_pixels"),
)


def parse_evaluate_flags(argv: list[str]) -> EvaluateConfig:
    """The options of one command. Raises UserError if they contradict each other."""
    is_watching = any(word.partition("=")[0] == "--watch" for word in argv)
    section = WatchConfig if is_watching else EvaluateConfig
    given = parse_values(
        section,
        "evaluate_vae.py",
        "Measure one or more VAEs on a folder of images and compare them under one protocol.",
        EPILOG,
        argv,
        DETAILS,
    )
    config = section(**given)
    _check_together(config)
    _check_watch(config, given)
    return config


_FOR_WATCH = (
    "watch", "promote", "data_path", "exclude", "cache_dir", "cache_gib", "sizes", "crop",
    "posterior", "seed", "max_images", "perceptual_net", "perceptual_weights", "rfid", "inception_weights",
    "batch_size", "weights", "dtype", "device", "kernels", "background", "max_pixels",
)  # fmt: skip


def _check_watch(config: EvaluateConfig, given: dict[str, Any]) -> None:
    """Raise UserError for flags that have no effect with --watch, or --promote without it."""
    if config.watch is None:
        if config.promote:
            raise UserError("--promote needs a run: add --watch with its --output_dir")
        return
    useless = next((flag for flag in given if flag not in _FOR_WATCH), None)
    if useless is not None:
        raise UserError(f"--{useless} has no effect with --watch: remove it")
    for name in ("data_path", "sizes"):
        if len(getattr(config, name)) > 1:
            shown = " ".join(map(str, getattr(config, name)))
            raise UserError(f"--{name} {shown}: --watch needs a single one")


def _check_together(config: EvaluateConfig) -> None:
    for size in config.sizes:
        if size != WHOLE and size < MIN_SIZE:
            raise UserError(f"--sizes {size} is below {MIN_SIZE}: raise it; 0 measures whole images")
    check_once("sizes", config.sizes)
    check_once("vae", config.vae)
    if config.diffusability and config.sizes == (WHOLE,):
        raise UserError("--diffusability needs squares of one size: add --sizes 256")
    if config.ensemble and len(config.vae) < 2:
        raise UserError("--ensemble needs several VAEs: list them all after one --vae, or remove --ensemble")
    weights = config.ensemble_weights
    if weights is not None and not config.ensemble:
        raise UserError("--ensemble_weights has no effect without --ensemble: add it, or remove the weights")
    if weights is not None and (len(weights) != len(config.vae) or not sum(weights) > 0):
        raise UserError(
            f"--ensemble_weights {' '.join(f'{weight:g}' for weight in weights)}: give one for each of the "
            f"{len(config.vae)} --vae, at least one of them above 0"
        )
    if WHOLE in config.sizes and config.batch_size > 1:
        raise UserError(f"--batch_size {config.batch_size} needs images of one size: use 1, or no --sizes 0")
    if config.perceptual_weights is not None and config.perceptual_net in ("random", "none"):
        raise UserError(
            f"--perceptual_weights has no effect with --perceptual_net {config.perceptual_net}: remove one"
        )
    if config.inception_weights is not None and not config.rfid:
        raise UserError("--inception_weights has no effect without --rfid: add --rfid, or remove it")
