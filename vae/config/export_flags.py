"""The options of export_vae.py, each declared once."""

from dataclasses import MISSING, dataclass
from difflib import get_close_matches
from pathlib import PurePath

from vae.config.declare import (
    PUBLISHED_SCALING,
    check_scaling,
    device_option,
    kernels_option,
    option,
    scaling_option,
    shift_option,
    weights_option,
)
from vae.config.flags import parse_section
from vae.config.options import MIN_IMAGE_SIZE
from vae.system.console import counted
from vae.system.errors import UserError

_SINGLE = (".safetensors", ".sft")  # endings of a single file
_OTHER_FILES = (".ckpt", ".pt", ".pth", ".bin", ".pkl", ".gguf", ".onnx", ".zip", ".json")
CHANNELS = "channels"  # --fold_scaling: mean 0 and standard deviation 1 of each channel, without a scaling
FOLDED_SCALING = {**PUBLISHED_SCALING, CHANNELS: (1.0, 0.0)}


@dataclass(frozen=True)
class ExportConfig:
    """What export_vae.py reads and writes, and how it changes the weights."""

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
        "weights of the average of several --vae: equal, or a softmax of their validation PSNR",
        choices=("uniform", "score"),
    )
    scores: tuple[float, ...] | None = option(
        None,
        "for --average_by score: PSNR of each --vae in dB, used instead of the records of its run",
        metavar="DB",
    )
    temperature: float = option(
        0.1,
        "for --average_by score: PSNR difference that scales a weight by 1/e",
        metavar="DB",
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
    push_to: str | None = option(
        None,
        "also upload the result to this repository of the Hugging Face hub, with a model card made from the "
        "run: its settings, figures and newest samples; a new repository is private",
        metavar="OWNER/REPO",
    )
    license: str | None = option(
        None,
        "license in the metadata and in the model card, such as apache-2.0 or other",
        metavar="NAME",
    )
    device: str = device_option("to encode the images on")
    kernels: str = kernels_option()

    @property
    def is_single(self) -> bool:
        """Whether one file is written, not a folder."""
        return self.output.lower().endswith(_SINGLE)


EPILOG = """examples:
  export_vae.py --vae outputs/first/checkpoint_epoch_100.pt --output my_vae --data_path data/train
  export_vae.py --vae my_vae --output my_vae.safetensors --dtype fp16 --data_path data/train
"""


def parse_export_flags(argv: list[str]) -> ExportConfig:
    """Parse the command line of export_vae.py; UserError if options contradict each other."""
    config = parse_section(
        ExportConfig,
        "export_vae.py",
        "Write a trained VAE for other programs: a diffusers folder or a single file, in fp32, fp16 or bf16.",
        EPILOG,
        argv,
    )
    _check_together(config)
    return config


def _check_together(config: ExportConfig) -> None:
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
    if config.push_to is not None and not config.license:
        raise UserError(
            f"--push_to {config.push_to} needs --license: give that of the VAE, such as apache-2.0 or other; "
            "a VAE that was trained from another one may have to keep its license"
        )
    if config.push_to is not None and config.into is not None:
        raise UserError("--push_to has no model card for a file of --into: omit it, and use hf upload")
    if config.per_channel and not config.fold_scaling:
        raise UserError("--per_channel needs --fold_scaling: add it, or omit --per_channel")
