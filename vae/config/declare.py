"""The declaration of an option: a dataclass field with its help text, its limits and facts about it.

This module declares the options that several scripts share, checks the value of an option, and suggests a
known name for an unknown one.
"""

import difflib
import math
import numbers
import operator
import os
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, field
from typing import Any

from vae.system.addresses import is_like_address
from vae.system.errors import UsageError, UserError
from vae.system.files import expand_home

PATHS = ("PATH", "DIR", "FILE", "FILES", "TARS", "PATH|latest")  # the metavars of options that are paths
OptionValues = dict[str, Any]  # by the names of the options
MAX_PIXELS = 300_000_000  # per image file: 0.9 GB of decoded RGB


def option(
    default: Any,
    help: str,
    *,
    choices: tuple | None = None,
    metavar: str | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    auto: bool = False,
    unset: str | None = None,
    inherited: bool = True,
    writes: bool = False,
    changes_samples: bool = False,
) -> Any:
    """A dataclass field with its help text and valid values; `auto` also allows the text "auto".

    `unset` is what the default None means, as the help prints it. A metavar in PATHS makes it a path.

    inherited: whether a resumed run takes the value from its checkpoint.
    writes: it is a path that is written. changes_samples: it changes training crops.
    """
    limits = {"at_least": at_least, "at_most": at_most, "auto": auto}
    texts = {"help": help, "choices": choices, "metavar": metavar, "unset": unset}
    facts = {"inherited": inherited, "writes": writes, "changes_samples": changes_samples}
    return field(default=default, metadata={**texts, **limits, **facts})


def term_weight(
    default: float, help: str, term: str, *, always: bool = False, statistics: bool = False
) -> Any:
    """The weight of a term of the training loss: NAME_weight is that of `vae/losses/NAME.py`.

    `term` is "image", "latent" or "view", as in `LossTerms`. With weight 0 the term is not
    computed, unless `always`. `statistics`: it needs those of the latents (vae/losses/variance.py).
    """
    metadata = option(default, help, at_least=0).metadata
    facts = {"term": term, "always": always, "statistics": statistics}
    return field(default=default, metadata={**metadata, **facts})


def device_option(purpose: str) -> Any:
    """--device of every script that computes."""
    return option(
        "auto", f"device {purpose}; auto: cuda if available", choices=("auto", "cuda", "cpu"), inherited=False
    )


def kernels_option() -> Any:
    """--kernels of every script that computes."""
    return option(
        "auto",
        "our kernels on a GPU; auto: Triton, or PyTorch for one that fails its test at the start; triton: an "
        "error if one fails; torch: slower",
        choices=("auto", "triton", "torch"),
    )


def background_option() -> Any:
    """--background of every script that decodes images."""
    return option(
        "white",
        "colour behind transparent pixels: a colour name or #rrggbb",
        metavar="COLOR",
        changes_samples=True,
    )


def max_pixels_option(action: str) -> Any:
    """--max_pixels of every script that decodes images; `action`: what happens to larger ones."""
    help_text = f"{action} images with more pixels than this"
    return option(MAX_PIXELS, help_text, at_least=64, changes_samples=True)


def cache_dir_option() -> Any:
    """--cache_dir of every script that reads a dataset of shards."""
    return option(
        None,
        "folder on this machine for shards of remote datasets and copies of those of the Hugging Face hub; "
        "if given, also for shards on a shared disk",
        metavar="DIR",
        unset="vae-trainer in the user's cache folder",
        inherited=False,
        writes=True,
    )


def cache_gib_option() -> Any:
    """--cache_gib of every script that reads a dataset of shards."""
    return option(50.0, "maximum GiB of --cache_dir", metavar="GIB", at_least=0, inherited=False)


def exclude_option() -> Any:
    """--exclude of every script that measures or trains with images."""
    return option(None, "text file of images that are not used (docs/shards.md)", metavar="FILE")


def weights_option() -> Any:
    """--weights of every script that reads a trained VAE."""
    help_text = "weights to read from a checkpoint of train_vae.py: EMA weights or raw weights"
    return option("ema", help_text, choices=("ema", "raw"))


# ---- scaling of latents ------------------------------------------------------------------------------------
# Each is (scaling, shift), from the published config.json of the model.
PUBLISHED_SCALING = {
    "sd": (0.18215, 0.0),
    "sdxl": (0.13025, 0.0),
    "sd3": (1.5305, 0.0609),
    "flux": (0.3611, 0.1159),
}
_NAMES = {"sd": "SD 1.x and 2.x", "sdxl": "SDXL", "sd3": "SD3", "flux": "FLUX.1"}


def scaling_option() -> Any:
    """--scaling_factor of every script that writes a VAE."""
    return option(
        None, "scaling of latents, (z - shift) * scaling, to write instead of the file's or the measured one"
    )


def shift_option() -> Any:
    """--shift_factor of every script that writes a VAE."""
    return option(None, "shift of latents to write together with --scaling_factor")


def check_scaling(scaling: float | None, shift: float | None) -> None:
    """Raise UserError if the values of both options cannot be used."""
    if shift is not None and scaling is None:
        raise UserError("--shift_factor needs --scaling_factor: give both, or omit both")
    if scaling is not None and not scaling > 0:
        raise UserError(f"--scaling_factor {scaling} is not a scaling: give a number above 0")


def scaling_flags(scaling: float, shift: float) -> str:
    """The flags for the constants of latents, as a user types them."""
    return f"--scaling_factor {scaling:g}" + (f" --shift_factor {shift:g}" if shift else "")


def published_flags() -> str:
    """The flags for each published model."""
    return "; ".join(f"{_NAMES[name]}: {scaling_flags(*both)}" for name, both in PUBLISHED_SCALING.items())


# ---- The value of an option --------------------------------------------------------------------------------


def base_type(item: Field[Any]) -> type:
    """The type of one value of an option: bool, int, float or str. For a tuple of ints it is int."""
    kind = _without_none(item)
    return typing.get_args(kind)[0] if is_list(item) else kind


def _without_none(item: Field[Any]) -> Any:
    if isinstance(item.type, types.UnionType):  # int | None
        return next(part for part in typing.get_args(item.type) if part is not type(None))
    return item.type


def is_list(item: Field[Any]) -> bool:
    """Whether the option accepts several values."""
    return typing.get_origin(_without_none(item)) is tuple


def coerce_all(options: Mapping[str, Field[Any]], given: Mapping[str, Any]) -> OptionValues:
    """The values by option name, each as `coerce` gives it; UsageError for a name that is no option."""
    for name in given:
        if name not in options:
            raise UsageError(f"unknown flag --{name}{nearest(f'--{name}', [f'--{key}' for key in options])}")
    return {name: coerce(options[name], value) for name, value in given.items()}


def coerce(item: Field[Any], value: Any) -> Any:
    """The option's value for a given one: words of a command line, a value of a JSON file or of a call.

    None stays None if it is the default. UsageError for a value of another type, and UserError for one
    outside the limits.
    """
    if value is None and item.default is None:
        return None
    if not is_list(item):
        return _coerce_one(item, value)
    parts = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not parts:
        raise UserError(f"--{item.name} has no value: give one or remove the flag")
    return tuple(_coerce_one(item, part) for part in parts)


def _coerce_one(item: Field[Any], value: Any) -> Any:
    choices = item.metadata["choices"]
    typed = _typed(item, value)
    if typed == "":
        raise UserError(f"--{item.name} has no value: give one or remove the flag")
    if choices and typed not in choices:
        known = ", ".join(map(repr, choices))
        raise UsageError(f"--{item.name}: invalid choice: {typed!r} (choose from {known})")
    if item.metadata["metavar"] in PATHS:
        typed = expand_home(typed, f"--{item.name}")
    _check_limits(item, typed)
    return typed


_CONVERTERS: dict[type, typing.Callable[[Any], Any]] = {
    int: lambda value: int(value) if isinstance(value, str) else operator.index(value),
    float: float,
    str: lambda value: str(value) if isinstance(value, numbers.Real) else os.fspath(value),
}


def _typed(item: Field[Any], value: Any) -> Any:
    """The value in the type of the option; a number may be text, as on a command line."""
    kind = base_type(item)
    typed = None
    if isinstance(value, bool):
        typed = value
    elif kind in _CONVERTERS:
        with suppress(TypeError, ValueError, OverflowError):
            typed = _CONVERTERS[kind](value)
    if type(typed) is not kind:
        raise UsageError(f"--{item.name}: invalid {kind.__name__} value: {value!r}")
    return typed


def _check_limits(item: Field[Any], value: Any) -> None:
    limits = item.metadata
    if limits["writes"] and is_like_address(value):
        raise UserError(f"--{item.name} {value} is an address: give a path on this machine")
    if limits["auto"]:
        if value == "auto":
            return
        value = _whole_number(item, value)
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"--{item.name} {value} is not a finite number: give one such as 0.001")
    if limits["at_least"] is not None and value < limits["at_least"]:
        raise UserError(f"--{item.name} {value} is too small: the minimum is {limits['at_least']}")
    if limits["at_most"] is not None and value > limits["at_most"]:
        raise UserError(f"--{item.name} {value} is too large: the maximum is {limits['at_most']}")


def check_once(name: str, values: Sequence[Any]) -> None:
    """Raise UserError if an option has the same value more than once."""
    twice = next((value for value in values if values.count(value) > 1), None)
    if twice is not None:
        raise UserError(f"--{name} contains {twice} twice: give it once")


def _whole_number(item: Field[Any], value: Any) -> int:
    try:
        return int(value)
    except ValueError:
        raise UserError(f"--{item.name} {value} is neither a whole number nor auto") from None


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """The remedy ': did you mean X?' with the most similar known name, or an empty string."""
    known = list(known)
    bare = name.lstrip("-")
    dashes = name[: len(name) - len(bare)]
    ours = dashes + _OURS.get(bare.lower().replace("-", "_"), "")
    # Below 0.75, most suggestions for flags of other trainers were wrong: num_epochs for num_processes.
    close = [ours] if ours in known else difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f": did you mean {close[0]}?" if close else ""


# ---- names of settings in other trainers -------------------------------------------------------------------
# They are from diffusers' example scripts, kohya's sd-scripts, OneTrainer, ai-toolkit and the VAE trainers of
# CompVis.

_OTHER_NAMES = {
    "accumulation_steps": "gradient_accumulation_steps gradient_accumulation grad_accum",
    "adversarial_weight": "disc_weight disc_factor disc_scale gan_weight adv_weight gan_loss_weight",
    "batch_size": "bs train_batch_size per_device_train_batch_size batch",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "buckets": "enable_bucket aspect_ratio_bucketing enable_aspect_ratio_bucketing",
    "channels": "block_out_channels ch_mult",
    "checkpoint_freq": "save_every_n_epochs save_every checkpointing_epochs",
    "checkpoint_steps": "save_every_n_steps checkpointing_steps save_steps",
    "color_jitter": "color_aug",
    "crop": "center_crop",
    "data_path": "train_data_dir dataset dataset_name dataset_path data_dir data instance_data_dir "
    "folder_path concept_path",
    "disc_learning_rate": "disc_lr discriminator_lr",
    "ema_decay": "use_ema ema",
    "enable_tf32": "allow_tf32 tf32",
    "global_batch_size": "total_batch_size",
    "gradient_clip": "max_grad_norm grad_clip clip_grad clip_grad_norm gradient_clip_val",
    "horizontal_flip": "random_flip flip_aug hflip enable_random_flip",
    "image_size": "resolution img_size size crop_size res",
    "init_from": "pretrained_model_name_or_path pretrained vae vae_path base_model pretrained_vae "
    "base_model_name name_or_path finetune_from",
    "keep_checkpoints": "checkpoints_total_limit save_total_limit max_step_saves_to_keep",
    "kl_weight": "kl_scale kl_loss_weight beta_kl",
    "learning_rate": "lr base_learning_rate unet_lr",
    "lr_schedule": "lr_scheduler learning_rate_scheduler scheduler",
    "max_val_images": "num_validation_images",
    "mixed_precision": "amp fp16 train_dtype dtype",
    "norm_groups": "num_groups norm_num_groups",
    "num_epochs": "epoch epochs num_train_epochs max_train_epochs n_epochs",
    "num_steps": "max_train_steps steps total_steps train_steps num_train_steps",
    "num_workers": "workers dataloader_num_workers max_data_loader_n_workers",
    "optimizer": "optimizer_type",
    "output_dir": "out output save_dir workspace_dir training_folder logging_dir log_dir output_path "
    "output_name",
    "perceptual_weight": "lpips_scale lpips_weight lpips_loss_weight percep_weight",
    "persistent_workers": "persistent_data_loader_workers",
    "recompute": "gradient_checkpointing checkpoint_activations activation_checkpointing low_vram",
    "quick_val_steps": "validation_steps eval_steps",
    "reconstruction_loss": "rec_loss pixel_loss loss_type",
    "resume_from": "resume resume_from_checkpoint ckpt checkpoint",
    "save_samples_freq": "sample_every_n_steps sample_every log_image_freq",
    "train_part": "decoder_only train_decoder_only freeze_encoder",
    "use_bf16": "bf16 full_bf16",
    "use_torch_compile": "compile torch_compile",
    "val_freq": "validation_epochs eval_every",
    "val_path": "validation_data_dir val_data_dir eval_data_dir",
    "val_split": "val_ratio validation_split",
    "wandb": "report_to log_with use_wandb",
    "warmup_epochs": "lr_warmup_steps warmup_steps learning_rate_warmup_steps warmup",
    "weight_decay": "wd adam_weight_decay",
    "z_channels": "latent_channels embed_dim z_dim latent_dim",
}
_OURS = {other: name for name, others in _OTHER_NAMES.items() for other in others.split()}
