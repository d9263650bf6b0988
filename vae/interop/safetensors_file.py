"""The tensors of a VAE in a safetensors file: reading, alone or out of a whole checkpoint, and writing."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vae.config.errors import UserError
from vae.config.export_flags import PUBLISHED_SCALING
from vae.device import DTYPES
from vae.files import atomic_path
from vae.interop.compvis_names import current_name, from_compvis, is_compvis
from vae.model.autoencoder import AutoencoderKL

READABLE = {"F64", "F32", "F16", "BF16"}
_PREFIXES = ("first_stage_model.", "vae.")  # of a VAE among the other networks of one file
_DROPPED = re.compile(r"(loss|model_ema)\.")  # the discriminator and LPIPS; averages under flattened names

# What a file holds instead of a VAE of this family, by a name in it; the first that matches is said.
OTHER_NETWORKS = (
    (r"lora_|.*\.lora_(A|B|up|down|te)", "a LoRA, which changes another network"),
    (r"quantize\.embedding|.*vector_quant", "a VQ model, whose latent is a codebook"),
    (r"(encoder|decoder)\.stages\.|(encoder|decoder)\.project_(in|out)", "a DC-AE"),
    (r"((en|de)coder\.layers\.|taesd_)", "a tiny autoencoder (TAESD)"),
    (r"(encoder|decoder)\.(downsamples|upsamples|middle)\.", "a Wan video VAE"),
    (r"model\.diffusion_model\.|double_blocks\.|joint_blocks\.|transformer_blocks\.|down_blocks\.0\.resnets",
     "a diffusion model without its VAE"),
    (r"text_model\.|cond_stage_model\.|conditioner\.", "a text encoder"),
    (r"(encoder|model)\.layers?\.\d|blocks?\.\d", "a transformer"),
)  # fmt: skip

# Whole checkpoints of one file say by their other networks which latent scaling the VAE in them goes with.
_SCALING_BY_NEIGHBOUR = (
    ("conditioner.embedders.", PUBLISHED_SCALING["sdxl"]),
    ("cond_stage_model.", PUBLISHED_SCALING["sd"]),  # SD 1.x, 2.x
    ("model.diffusion_model.joint_blocks.", PUBLISHED_SCALING["sd3"]),
    ("model.diffusion_model.double_blocks.", PUBLISHED_SCALING["flux"]),
)


@dataclass
class VaeTensors:
    """A VAE's tensors under this project's names, in fp32, and what else the file says."""

    weights: dict[str, torch.Tensor]
    compvis: bool  # names of the original research code
    dtype: torch.dtype  # in the file
    metadata: dict[str, str]
    published_scaling: tuple[float, float] | None  # scaling and shift, where neighbours show the model


def read_safetensors(path: Path, where: str) -> VaeTensors:
    """Read the VAE in the file at `path`; `where` (flag and path) begins what a UserError says."""
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            chosen, prefix = _vae_names(names, where)
            kinds = {name: file.get_slice(name).get_dtype() for name in chosen.values()}
            _check_kinds(kinds, where)
            tensors = {ours: file.get_tensor(name) for ours, name in chosen.items()}
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{where}: {path.name} cannot be read: {_cause_of_damage(error)}") from None
    dtype = next(value.dtype for value in tensors.values() if value.is_floating_point())
    neighbours = [name for name in names if not prefix or not name.startswith(prefix)]
    scaling = next(
        (s for start, s in _SCALING_BY_NEIGHBOUR if any(n.startswith(start) for n in neighbours)), None
    )
    compvis = any(is_compvis(name) for name in tensors)
    levels = 1 + max(
        (int(m[1]) for m in (re.match(r"encoder\.down\.(\d+)\.", n) for n in tensors) if m), default=0
    )
    weights = {}
    for name, value in tensors.items():
        name = current_name(from_compvis(name, levels))
        weights[name] = value.float() if value.is_floating_point() else value
    _check_finite(weights, where)
    return VaeTensors(weights, compvis, dtype, metadata, scaling)


def stored_weights(model: AutoencoderKL, dtype: str) -> dict[str, torch.Tensor]:
    """A model's tensors as they are stored in fp32, fp16 or bf16, on the CPU; counters stay whole numbers.

    Raises UserError where a weight is too large for fp16.
    """
    stored = {}
    for name, value in model.state_dict().items():
        value = value.detach().cpu().contiguous()
        if value.is_floating_point():
            value = value.to(DTYPES[dtype])
            if not torch.isfinite(value).all():
                raise UserError(f"--dtype {dtype} cannot hold {name}, which is too large: use bf16 or fp32")
        stored[name] = value
    return stored


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file whole or not at all; raises OSError where it cannot be written."""
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    try:
        with atomic_path(path) as temporary:
            save_file(tensors, temporary, metadata={"format": "pt", **metadata})
    except SafetensorError as error:  # a full disk
        raise OSError(f"cannot write {path}: {error}") from error


def _vae_names(names: list[str], where: str) -> tuple[dict[str, str], str]:
    """The VAE's tensors by their names without the prefix, and the prefix."""
    for prefix in _PREFIXES:
        if any(name.startswith((f"{prefix}encoder.", f"{prefix}decoder.")) for name in names):
            found = {n.removeprefix(prefix): n for n in names if n.startswith(prefix)}
            break
    else:
        prefix, found = "", {name: name for name in names}
    found = {ours: name for ours, name in found.items() if not _DROPPED.match(ours)}
    ours = re.compile(r"(encoder\.(conv_in|down(_blocks)?)|decoder\.(conv_in|up(_blocks)?))\.")
    if not any(ours.match(name) for name in found):
        kind = next(
            (what for pattern, what in OTHER_NETWORKS if any(re.match(pattern, n) for n in names)), None
        )
        some = ", ".join(sorted(names)[:3])
        raise UserError(
            f"{where} is no VAE of this family: "
            + (f"it looks like {kind}" if kind else f"it has other parameter names (it begins {some})")
        )
    return found, prefix


def _check_kinds(kinds: dict[str, str], where: str) -> None:
    """Raise UserError where weights are stored in a form that has lost too much."""
    bad = {name: kind for name, kind in kinds.items() if kind not in READABLE and "num_batches" not in name}
    if bad:
        name, kind = next(iter(bad.items()))
        raise UserError(
            f"{where} holds {'fp8' if kind.startswith('F8') else kind} weights ({name} is {kind}; "
            f"{len(bad)} such): take the file in fp16, bf16 or fp32"
        )


def _check_finite(weights: dict[str, torch.Tensor], where: str) -> None:
    bad = sorted(name for name, value in weights.items() if not torch.isfinite(value).all())
    if bad:
        raise UserError(
            f"{where} holds values that are not finite, in {bad[0]} ({len(bad)} such): take another copy"
        )


def _cause_of_damage(error: Exception) -> str:
    text = str(error).splitlines()[0]
    if any(
        sign in text
        for sign in ("Incomplete", "IncompleteBuffer", "not fully covered", "TooSmall", "too small")
    ):
        return f"it is truncated, as after an interrupted download ({text}): fetch it again"
    return text
