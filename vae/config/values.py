"""Validate one option's value, and suggest a known name for an unknown one."""

import difflib
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import Field
from typing import Any

from vae.system.addresses import is_like_address
from vae.system.errors import UserError
from vae.system.files import is_utf8

MAX_WHOLE = 2**63 - 1  # what a tensor's shape, a seed or an index can be
_MAX_NAME = 100  # characters of a name that are compared and shown: one in a file from others may be huge


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


def check(item: Field[Any], value: Any) -> None:
    """Raise UserError if `value` is not valid for the option."""
    limits = item.metadata
    if limits["writes"] and isinstance(value, str) and is_like_address(value):
        raise UserError(f"--{item.name} {value} is an address: give a path on this machine")
    if limits["writes"] and isinstance(value, str) and not is_utf8(value):
        raise UserError(
            f"--{item.name} {value} is not valid UTF-8, so PyTorch cannot open files there: give another name"
        )
    if value == "" or (is_list(item) and value is not None and "" in value):
        raise UserError(f"--{item.name} has no value: give one or remove the flag")
    if limits["choices"] and value is not None and value not in limits["choices"]:
        raise UserError(f"--{item.name} {value} is not one of {', '.join(map(str, limits['choices']))}")
    if limits["auto"]:
        if value == "auto":
            return
        value = _whole_number(item, value)
    for part in value if is_list(item) and value is not None else [value]:
        if isinstance(part, float) and not math.isfinite(part):
            raise UserError(f"--{item.name} {part} is not a finite number: give one such as 0.001")
        if part is None:
            continue
        if isinstance(part, int) and abs(part) > MAX_WHOLE:
            shown = f" {part}" if abs(part) < 10**_MAX_NAME else ""  # Python prints no more than 4,300 digits
            raise UserError(f"--{item.name}{shown} has too many digits: the maximum is {MAX_WHOLE}")
        if limits["at_least"] is not None and part < limits["at_least"]:
            raise UserError(f"--{item.name} {part} is too small: the minimum is {limits['at_least']}")
        if limits["at_most"] is not None and part > limits["at_most"]:
            raise UserError(f"--{item.name} {part} is too large: the maximum is {limits['at_most']}")


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
    close = most_similar(name, known)
    return f": did you mean {close}?" if close else ""


def most_similar(name: str, known: typing.Iterable[str]) -> str | None:
    """The most similar known name, or None if none is similar."""
    known = list(known)
    name = name[:_MAX_NAME]
    bare = name.lstrip("-")
    ours = name_here(bare)
    if ours is not None and name[: len(name) - len(bare)] + ours in known:
        return name[: len(name) - len(bare)] + ours
    # Below 0.75, most suggestions for flags of other trainers were wrong: num_epochs for num_processes.
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return close[0] if close else None


# ---- names of settings in other trainers -------------------------------------------------------------------
# Of diffusers' example scripts, kohya's sd-scripts, OneTrainer, ai-toolkit and the VAE trainers of CompVis.

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
    "max_steps": "max_train_steps steps total_steps train_steps",
    "max_val_images": "num_validation_images",
    "mixed_precision": "amp fp16 train_dtype dtype",
    "norm_groups": "num_groups norm_num_groups",
    "num_epochs": "epoch epochs num_train_epochs max_train_epochs n_epochs",
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


def name_here(other: str) -> str | None:
    """Our name for a setting of another trainer, without dashes in front; None if none is recorded."""
    return _OURS.get(other.lower().replace("-", "_"))
