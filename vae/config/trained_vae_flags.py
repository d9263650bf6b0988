"""The options of evaluate_vae.py, export_vae.py and infer_vae.py, each declared once."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from difflib import get_close_matches
from glob import glob, has_magic
from pathlib import PurePath
from typing import Any

from vae.config.declare import (
    PUBLISHED_SCALING,
    background_option,
    cache_dir_option,
    cache_gib_option,
    check_once,
    check_scaling,
    device_option,
    exclude_option,
    kernels_option,
    max_pixels_option,
    option,
    scaling_option,
    shift_option,
    weights_option,
)
from vae.config.flags import coerce_values, parse_values
from vae.config.options import MIN_IMAGE_SIZE
from vae.system.console import counted
from vae.system.errors import UserError

MIN_SIZE = 8  # px: a smaller image is smaller than one latent pixel of this model family
WHOLE = 0  # as a size: whole images, not cropped


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """The VAEs to compare, the images, and the protocol."""

    vae: tuple[str, ...] = option(
        MISSING,
        "one or more VAEs: checkpoints of train_vae.py, diffusers folders, .safetensors files, or "
        "OWNER/REPO[:PATH] of the Hugging Face hub; outputs/first/checkpoint_*.pt: all that match",
        metavar="PATH",
    )
    data_path: str = option(
        MISSING,
        "folder of images, with subfolders, or the dataset.json of a dataset of shards, also on a remote "
        "store (s3://, gs://, https://), or hf://datasets/OWNER/NAME[/SPLIT] of the Hugging Face hub",
        metavar="PATH",
    )
    output_dir: str = option(
        MISSING, "folder for report.html, the tables and sample images", metavar="DIR", writes=True
    )
    exclude: str | None = exclude_option()
    cache_dir: str | None = cache_dir_option()
    cache_gib: float = cache_gib_option()
    overwrite: bool = option(False, "replace the results of an earlier comparison")
    promote: str | None = option(
        None,
        "write the best VAE of the comparison, by LPIPS or else by PSNR at the last size, into this folder "
        "in diffusers' format, with report.html",
        metavar="DIR",
        writes=True,
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
    seed: int = option(0, "random seed of --posterior sample", at_least=0, at_most=2**31)
    max_images: int = option(0, "maximum number of images, a sample by hash; 0: all", at_least=0)
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
    diagnose: bool = option(
        False, "also look for a grid, speckles, a colour cast, a border and blur (docs/evaluate.md)"
    )
    codecs: bool = option(
        True,
        "also measure the bicubic baseline, and JPEG and WebP with as many bytes as the latents in 8 bit",
    )
    samples: int = option(
        2, "number of sample images of each kind: worst, typical, best; 0: none", at_least=0, at_most=50
    )
    batch_size: int = option(1, "images to encode and decode at once", at_least=1)
    weights: str = weights_option()
    dtype: str = option("fp32", "precision of encoder and decoder", choices=("fp32", "bf16", "fp16"))
    device: str = device_option("to compute on")
    kernels: str = kernels_option()
    background: str = background_option()
    max_pixels: int = max_pixels_option("exclude")


EVALUATE_EXAMPLES = """examples:
  evaluate_vae.py --vae outputs/first/vae --data_path data/test --output_dir results/first
  evaluate_vae.py --vae outputs/first/vae outputs/second/vae other.safetensors \\
      --data_path data/test --output_dir results/compared --sizes 128 256
  evaluate_vae.py --vae outputs/first/vae --data_path data/test --output_dir results/whole --sizes 0

An image that cannot be used is reported and left out for every VAE. Open report.html in a browser.
"""


# Only --help_all shows these.
DETAILS = (
    *("exclude", "cache_dir", "cache_gib", "seed", "perceptual_weights", "inception_weights"),
    *("kernels", "background", "max_pixels"),
)


def parse_evaluate_flags(argv: list[str]) -> EvaluateConfig:
    """The options of one command. Raises UserError if they contradict each other."""
    values = parse_values(
        EvaluateConfig,
        "evaluate_vae.py",
        "Measure one or more VAEs on a folder of images and compare them under one protocol.",
        EVALUATE_EXAMPLES,
        argv,
        DETAILS,
    )
    return evaluate_config(values)


def evaluate_config(given: Mapping[str, Any]) -> EvaluateConfig:
    """The options from given values. Raises UserError if they contradict each other."""
    values = coerce_values(EvaluateConfig, given)
    config = EvaluateConfig(**{**values, "vae": _matching(values["vae"])})
    _check_evaluation(config)
    return config


def _matching(paths: Sequence[str]) -> tuple[str, ...]:
    """The paths, and what their wildcards match: no shell of Windows does this."""
    matching: list[str] = []
    for path in paths:
        if os.path.lexists(path) or not has_magic(path):
            matching.append(path)
            continue
        matches = sorted(glob(path), key=lambda match: (len(match), match))  # epoch 9 before 10
        if not matches:
            raise UserError(f"--vae {path} matches no file: give the path of a VAE")
        matching += matches
    return tuple(matching)


def _check_evaluation(config: EvaluateConfig) -> None:
    for size in config.sizes:
        if size != WHOLE and size < MIN_SIZE:
            raise UserError(f"--sizes {size} is below {MIN_SIZE}: raise it; 0 measures whole images")
    check_once("sizes", config.sizes)
    check_once("vae", config.vae)
    if config.diffusability and config.sizes == (WHOLE,):
        raise UserError("--diffusability needs squares of one size: add --sizes 256")
    if WHOLE in config.sizes and config.batch_size > 1:
        raise UserError(f"--batch_size {config.batch_size} needs images of one size: use 1, or no --sizes 0")
    if config.perceptual_weights is not None and config.perceptual_net in ("random", "none"):
        raise UserError(
            f"--perceptual_weights has no effect with --perceptual_net {config.perceptual_net}: remove one"
        )
    if config.inception_weights is not None and not config.rfid:
        raise UserError("--inception_weights has no effect without --rfid: add --rfid, or remove it")


# ---- export_vae.py -----------------------------------------------------------------------------------------
_SINGLE = (".safetensors", ".sft")  # endings of a single file
_OTHER_FILES = (".ckpt", ".pt", ".pth", ".bin", ".pkl", ".gguf", ".onnx", ".zip", ".json")
CHANNELS = "channels"  # --fold_scaling: mean 0 and standard deviation 1 of each channel, without a scaling
FOLDED_SCALING = {**PUBLISHED_SCALING, CHANNELS: (1.0, 0.0)}


@dataclass(frozen=True)
class ExportConfig:
    """The files that export_vae.py reads and writes, and its changes of the weights."""

    vae: tuple[str, ...] = option(
        MISSING,
        "checkpoint, diffusers folder, .safetensors file or OWNER/REPO[:PATH] of the Hugging Face hub; "
        "several are averaged",
        metavar="PATH",
    )
    output: str = option(
        MISSING,
        "folder for from_pretrained of diffusers; or a name that ends in .safetensors or .sft: one file with "
        "the parameter names of the original research code, for ComfyUI and other programs",
        metavar="PATH",
        writes=True,
    )
    dtype: str = option("fp32", "precision of the stored weights", choices=("fp32", "fp16", "bf16"))
    weights: str = weights_option()
    overwrite: bool = option(False, "replace an existing --output")
    average_by: str = option(
        "uniform",
        "weights of the average of several --vae: equal, or by their validation loss",
        choices=("uniform", "score"),
    )
    scores: tuple[float, ...] | None = option(
        None,
        "for --average_by score: a loss of each --vae, such as LPIPS, used instead of the records of its run",
        metavar="LOSS",
        at_least=1e-9,
        at_most=10,
    )
    temperature: float = option(
        0.01,
        "for --average_by score: rise of the loss, as a share of the lowest, that scales a weight by 1/e",
        metavar="SHARE",
        at_least=1e-6,
    )
    data_path: str | None = option(None, "images for measuring the latents and testing fp16", metavar="DIR")
    image_size: int | None = option(
        None, "side of the centre crops of those images, in px", unset="the training size of the VAE, or 256"
    )
    num_images: int = option(256, "maximum number of those images, spread over all; 0: all", at_least=0)
    scaling_factor: float | None = scaling_option()
    shift_factor: float | None = shift_option()
    fold_scaling: str | None = option(
        None,
        "change the weights so that latents have standard deviation 1 under this model's fixed scaling; "
        "channels: without a scaling, mean 0 and standard deviation 1 of each channel",
        choices=tuple(FOLDED_SCALING),
    )
    per_channel: bool = option(
        False, "with --fold_scaling: standard deviation 1 for each latent channel, not for all together"
    )
    add_quant_conv: bool = option(
        False, "add the 1x1 convolutions of SD 1.x around the latents; folding a shift needs them"
    )
    into: str | None = option(
        None,
        "video VAE Wan 2.1 or Qwen-Image, a folder or .safetensors file: write it with its names and the "
        "trained network in it; for single images only",
        metavar="PATH",
    )
    license: str | None = option(
        None, "license in the metadata and in README.md, such as apache-2.0 or other", metavar="NAME"
    )
    device: str = device_option("to encode the images on")
    kernels: str = kernels_option()

    @property
    def is_single(self) -> bool:
        """Whether one file is written, not a folder."""
        return self.output.lower().endswith(_SINGLE)


EXPORT_EXAMPLES = """examples:
  export_vae.py --vae outputs/first/checkpoint_epoch_100.pt --output my_vae --data_path data/train
  export_vae.py --vae my_vae --output my_vae.safetensors --dtype fp16 --data_path data/train
"""


def parse_export_flags(argv: list[str]) -> ExportConfig:
    """Parse the command line of export_vae.py; UserError if options contradict each other."""
    description = (
        "Write a trained VAE for other programs: a diffusers folder or a single file, in fp32, fp16 or bf16."
    )
    return export_config(parse_values(ExportConfig, "export_vae.py", description, EXPORT_EXAMPLES, argv))


def export_config(given: Mapping[str, Any]) -> ExportConfig:
    """The options from given values; UserError if they contradict each other."""
    config = ExportConfig(**coerce_values(ExportConfig, given))
    _check_export(config)
    return config


def _check_export(config: ExportConfig) -> None:
    ending = PurePath(config.output).suffix.lower()
    is_typo = get_close_matches(ending, _SINGLE, cutoff=0.55) and not config.is_single
    if is_typo or ending in _OTHER_FILES:
        raise UserError(
            f"--output {config.output}: an export is a folder or one .safetensors file, not {ending}: change "
            "the ending, or give a folder without one"
        )
    if config.image_size is not None and config.image_size < MIN_IMAGE_SIZE:
        raise UserError(f"--image_size {config.image_size} is too small: give for example 256")
    several = len(config.vae) > 1
    if config.average_by == "score" and not several:
        raise UserError("--average_by score needs several VAEs: list them all after one --vae")
    if config.scores is not None and config.average_by != "score":
        raise UserError("--scores needs --average_by score: add it, or omit --scores")
    if config.scores is not None and len(config.scores) != len(config.vae):
        raise UserError(
            f"--scores has {counted(len(config.scores), 'value')} for {len(config.vae)} --vae: give one each"
        )
    check_scaling(config.scaling_factor, config.shift_factor)
    if config.fold_scaling and config.data_path is None:
        raise UserError("--fold_scaling needs --data_path: the latents of those images are measured")
    if config.fold_scaling and config.scaling_factor is not None:
        raise UserError("--fold_scaling determines the scaling: omit --scaling_factor")
    if config.per_channel and not config.fold_scaling:
        raise UserError("--per_channel needs --fold_scaling: add it, or omit --per_channel")


# ---- infer_vae.py ------------------------------------------------------------------------------------------
MODES = ("reconstruct", "encode", "decode", "interpolate", "variations")
# These options are read by one mode only.
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
    format: str = option("png", "format of the images; both are lossless", choices=("png", "webp"))
    steps: int = option(
        8, "interpolate: number of images in the series, including both ends", at_least=2, at_most=10_000
    )
    count: int = option(4, "variations: samples per input", at_least=1, at_most=10_000)
    noise_scale: float = option(
        1.0, "variations: factor on the standard deviation of the VAE's own posterior", at_least=0
    )
    seed: int = option(0, "variations: random seed of the samples", at_least=0, at_most=2**63 - 1)
    tiles: str = option(
        "auto",
        "for large images; blended: overlapping tiles one by one, approximate, memory of one tile; off: "
        "whole images; auto: blended if the whole image does not fit into memory, or takes minutes longer",
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


INFER_EXAMPLES = """examples:
  infer_vae.py --vae outputs/first/vae --mode reconstruct --input photo.jpg --output_dir seen
  infer_vae.py --vae outputs/first/vae --mode encode --input data/train --output_dir latents
  infer_vae.py --vae outputs/first/vae --mode decode --input latents --output_dir decoded

A file that cannot be used is reported, the other files are processed, and the exit code is then 77.
"""


def parse_infer_flags(argv: list[str]) -> InferConfig:
    """The options of one command. Raises UserError if a flag has no effect in the given mode."""
    description = (
        "Use a trained VAE: reconstruct images, encode images to latents, and decode latents to images."
    )
    given = parse_values(InferConfig, "infer_vae.py", description, INFER_EXAMPLES, argv)
    config = InferConfig(**coerce_values(InferConfig, given))
    for name, mode in _MODE_OF.items():
        if name in given and config.mode != mode:
            raise UserError(f"--{name} has an effect only with --mode {mode}, not {config.mode}: remove it")
    if "format" in given and config.mode == "encode":
        raise UserError(f"--format {config.format} has no effect with --mode encode: remove it")
    if "tile_size" in given and config.tiles == "off":
        raise UserError(f"--tile_size {config.tile_size} has no effect with --tiles off: remove one of them")
    return config
