"""The options of export_vae.py, each declared once."""

from dataclasses import MISSING, dataclass

from vae.config.errors import UserError
from vae.config.flags import parse_section
from vae.config.options import LEAST_IMAGE_SIZE, option
from vae.config.vae_options import weights_option

# (scaling, shift) that programs apply to latents: (z - shift) * scaling. As their published config.json say.
PUBLISHED_SCALING = {
    "sd": (0.18215, 0.0),
    "sdxl": (0.13025, 0.0),
    "sd3": (1.5305, 0.0609),
    "flux": (0.3611, 0.1159),
}


@dataclass(frozen=True)
class ExportConfig:
    """What is read, what is written, and what happens in between."""

    vae: tuple[str, ...] = option(
        MISSING, "checkpoint, diffusers folder or .safetensors file; several are averaged", metavar="PATH"
    )
    output: str = option(MISSING, "folder (diffusers) or file (single) to write", metavar="PATH")
    format: str = option(
        "diffusers",
        "diffusers: folder for from_pretrained; single: one .safetensors file with the names of the original"
        " research code, for ComfyUI and others",
        choices=("diffusers", "single"),
    )
    dtype: str = option("fp32", "precision of the weights", choices=("fp32", "fp16", "bf16"))
    weights: str = weights_option()
    overwrite: bool = option(False, "replace what is at --output")
    average_by: str = option(
        "uniform",
        "how several --vae are averaged: equally, or by softmax of their PSNR in validation",
        choices=("uniform", "score"),
    )
    scores: tuple[float, ...] | None = option(
        None,
        "for --average_by score: PSNR of each --vae, dB, instead of the records of its run",
        metavar="DB",
    )
    temperature: float = option(
        0.1, "for --average_by score: dB of PSNR by which a weight falls to 1/e", metavar="DB", at_least=1e-6
    )
    data_path: str | None = option(
        None, "images on which latents are measured and fp16 is tried", metavar="DIR"
    )
    image_size: int | None = option(
        None,
        "side of the centre crops of those images, px; left out: what the VAE was trained at, or 256",
        at_least=LEAST_IMAGE_SIZE,
    )
    num_images: int = option(256, "at most this many of those images, spread over all; 0: all", at_least=0)
    scaling_factor: float | None = option(
        None, "write this scaling of latents, (z - shift) * scaling, instead of the file's or the measured"
    )
    shift_factor: float | None = option(None, "write this shift of latents, with --scaling_factor")
    fold_scaling: str | None = option(
        None,
        "change the weights so that a program with that model's fixed scaling sees latents of spread 1",
        choices=tuple(PUBLISHED_SCALING),
    )
    per_channel: bool = option(
        False, "with --fold_scaling: bring each latent channel to spread 1, not all together"
    )
    add_quant_conv: bool = option(
        False, "add the 1x1 convolutions of SD 1.x to a VAE without: only with them a shift can be folded"
    )
    device: str = option(
        "auto", "where the images are encoded: cuda, cpu or auto", choices=("auto", "cuda", "cpu")
    )


EPILOG = """examples:
  export_vae.py --vae outputs/first/checkpoint_epoch_100.pt --output my_vae --data_path data/train
  export_vae.py --vae my_vae --output my_vae.safetensors --format single --dtype fp16 --data_path data/train
"""


def parse_export_flags(argv: list[str]) -> ExportConfig:
    """The options of one export; UserError where they contradict each other."""
    config = parse_section(
        ExportConfig,
        "export_vae.py",
        "Write a trained VAE for other programs: diffusers folder or single file, in fp32, fp16 or bf16.",
        EPILOG,
        argv,
    )
    _check_together(config)
    return config


def _check_together(config: ExportConfig) -> None:
    several = len(config.vae) > 1
    if config.average_by == "score" and not several:
        raise UserError("--average_by score needs several --vae: name them all after one --vae")
    if config.scores is not None and config.average_by != "score":
        raise UserError("--scores are read with --average_by score only: add it, or leave --scores out")
    if config.scores is not None and len(config.scores) != len(config.vae):
        raise UserError(
            f"--scores has {len(config.scores)} values for {len(config.vae)} --vae: give one for each"
        )
    if config.shift_factor is not None and config.scaling_factor is None:
        raise UserError(
            "--shift_factor needs --scaling_factor beside it: give both, or leave both to be found"
        )
    if config.scaling_factor is not None and not config.scaling_factor > 0:
        raise UserError(f"--scaling_factor {config.scaling_factor} is no scaling: give a number above 0")
    if config.fold_scaling and config.data_path is None:
        raise UserError("--fold_scaling needs --data_path: latents are measured on the images there")
    if config.fold_scaling and config.scaling_factor is not None:
        raise UserError("--fold_scaling decides the scaling itself: leave --scaling_factor out")
    if config.per_channel and not config.fold_scaling:
        raise UserError("--per_channel changes only --fold_scaling: add it, or leave --per_channel out")
    single_name = config.output.lower().endswith(".safetensors")
    if config.format == "single" and not single_name:
        raise UserError(
            f"--output {config.output} with --format single is a file: end its name in .safetensors"
        )
    if config.format == "diffusers" and single_name:
        raise UserError(
            f"--output {config.output} with --format diffusers is a folder: leave .safetensors out, or use "
            "--format single"
        )
