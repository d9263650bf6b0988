"""Reading VAE tensors from a safetensors file, which may contain other networks, and writing them."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from vae.config.export_flags import PUBLISHED_SCALING
from vae.device import DTYPES
from vae.interop.compvis_names import BLOCK, current_name, from_compvis, is_compvis
from vae.interop.wan_names import from_wan, is_wan
from vae.system.errors import UserError
from vae.system.files import atomic_path, open_rewriting, parse_json, regular_path

READABLE = {"F64", "F32", "F16", "BF16"}
_PREFIXES = ("first_stage_model.", "vae.")  # of VAE names in a file with several networks
# Discriminator and LPIPS; EMA weights with flattened names; what AsymmetricAutoencoderKL uses with masks only
_DROPPED = re.compile(r"(loss|model_ema|decoder\.condition_encoder)\.")

# Other networks by the name of a tensor: the first match is reported if a file contains no VAE.
OTHER_NETWORKS = (
    (r"lora_|.*\.lora_(A|B|up|down|te)", "a LoRA for another network"),
    (r"quantize\.embedding|.*vector_quant", "a VQ model with a codebook"),
    (r"(encoder|decoder)\.stages\.|(encoder|decoder)\.project_(in|out)", "a DC-AE"),
    (r"((en|de)coder\.layers\.|taesd_)", "a tiny autoencoder (TAESD)"),
    (r"(en|de)coder\.(down|up)samples\.\d+\.(down|up)samples\.", "the VAE of Wan 2.2"),
    (r"model\.diffusion_model\.|double_blocks\.|joint_blocks\.|transformer_blocks\.|down_blocks\.0\.resnets",
     "a diffusion model without its VAE"),
    (r"text_model\.|cond_stage_model\.|conditioner\.", "a text encoder"),
    (r"(encoder|model)\.layers?\.\d|blocks?\.\d", "a transformer"),
)  # fmt: skip

# In a file with several networks, a name of another network determines the latent scaling of the VAE.
_SCALING_BY_OTHER_NETWORK = (
    ("conditioner.embedders.", PUBLISHED_SCALING["sdxl"]),
    ("cond_stage_model.", PUBLISHED_SCALING["sd"]),  # SD 1.x, 2.x
    ("model.diffusion_model.joint_blocks.", PUBLISHED_SCALING["sd3"]),
    ("model.diffusion_model.double_blocks.", PUBLISHED_SCALING["flux"]),
)


@dataclass
class VaeTensors:
    """Tensors of a VAE in fp32 under diffusers names, and other facts from the file."""

    weights: dict[str, torch.Tensor]
    kind: str  # of parameter names: diffusers, compvis (the original research code) or wan
    dtype: torch.dtype  # of the weights in the file
    metadata: dict[str, str]
    published_scaling: tuple[float, float] | None  # scaling and shift, if other networks show the model


def read_safetensors(path: Path, where: str) -> VaeTensors:
    """Read the VAE from the file at `path`; a UserError starts with `where` (flag and path)."""
    tensors, names, prefix, metadata = _read(path, where)
    floats = (value.dtype for value in tensors.values() if value.is_floating_point())
    dtype = next(floats, torch.float32)  # without any, its shapes do not fit either
    other_names = [name for name in names if not prefix or not name.startswith(prefix)]
    scaling = next(
        (s for start, s in _SCALING_BY_OTHER_NETWORK if any(n.startswith(start) for n in other_names)), None
    )
    kind = "wan" if is_wan(tensors) else "compvis" if any(map(is_compvis, tensors)) else "diffusers"
    named = from_wan(tensors) if kind == "wan" else _diffusers_names(tensors)
    weights = {n: value.float() if value.is_floating_point() else value for n, value in named.items()}
    _check_finite(weights, where)
    return VaeTensors(weights, kind, dtype, metadata, scaling)


def read_tensors(path: Path, where: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a VAE as they are in the file at `path`, without a prefix, and its metadata."""
    tensors, _, _, metadata = _read(path, where)
    return tensors, metadata


def _read(path: Path, where: str) -> tuple[dict[str, torch.Tensor], list[str], str, dict[str, str]]:
    """Tensors of the VAE by their names without prefix, all names in the file, the prefix, the metadata."""
    try:
        with safe_open(regular_path(path), framework="pt") as file:
            names = list(file.keys())
            chosen, prefix = _vae_names(names, where)
            kinds = {name: file.get_slice(name).get_dtype() for name in chosen.values()}
            _check_kinds(kinds, where)
            tensors = {ours: file.get_tensor(name) for ours, name in chosen.items()}
            return tensors, names, prefix, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{where}: {path.name} cannot be read: {_cause_of_damage(error)}") from None


def _diffusers_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of an AutoencoderKL, with current or first names of diffusers or those of CompVis."""
    levels = 1 + max(
        (int(m[1]) for m in (re.match(rf"encoder\.down\.({BLOCK})\.", n) for n in tensors) if m), default=0
    )
    return {current_name(from_compvis(name, levels)): value for name, value in tensors.items()}


def stored_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file; empty if it has none or cannot be read."""
    try:
        with safe_open(regular_path(path), framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def stored_weights(model: nn.Module, dtype: str) -> dict[str, torch.Tensor]:
    """Tensors of a model on the CPU in `dtype` (fp32, fp16 or bf16); integer tensors are unchanged.

    Raises UserError if a weight is too large for fp16.
    """
    stored = {}
    for name, value in model.state_dict().items():
        value = value.detach().cpu().contiguous()
        if value.is_floating_point():
            value = value.to(DTYPES[dtype])
            if not torch.isfinite(value).all():
                raise UserError(
                    f"--dtype {dtype} cannot represent {name}: its values are too large; use bf16 or fp32"
                )
        stored[name] = value
    return stored


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file atomically; OSError if it cannot be written."""
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    try:
        with atomic_path(path) as temporary:
            save_file(tensors, temporary, metadata={"format": "pt", **metadata})
            _sort_metadata(temporary)
    except SafetensorError as error:  # a full disk
        raise OSError(f"cannot write {path}: {error}") from error


def _sort_metadata(path: Path) -> None:
    """Sort the metadata in the header: safetensors writes it in a random order."""
    with open_rewriting(path) as file:
        size = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(size).decode())
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= size:  # it is padded with spaces
            file.seek(8)
            file.write(text.ljust(size))


def _vae_names(names: list[str], where: str) -> tuple[dict[str, str], str]:
    """Names of the VAE tensors in the file by their names without prefix, and the prefix."""
    for prefix in _PREFIXES:
        if any(name.startswith((f"{prefix}encoder.", f"{prefix}decoder.")) for name in names):
            vae_names = {n.removeprefix(prefix): n for n in names if n.startswith(prefix)}
            break
    else:
        prefix = ""
        vae_names = {name: name for name in names}
    vae_names = {ours: name for ours, name in vae_names.items() if not _DROPPED.match(ours)}
    expected = re.compile(r"(encoder\.(conv_in|down(_blocks)?)|decoder\.(conv_in|up(_blocks)?))\.")
    if not (is_wan(vae_names) or any(expected.match(name) for name in vae_names)):
        kind = next(
            (network for pattern, network in OTHER_NETWORKS if any(re.match(pattern, n) for n in names)), None
        )
        some = ", ".join(sorted(names)[:3])
        raise UserError(
            f"{where} is not a VAE of this family: "
            + (f"it looks like {kind}" if kind else f"it has other parameter names (first names: {some})")
        )
    return vae_names, prefix


def _check_kinds(kinds: dict[str, str], where: str) -> None:
    """Raise UserError if weights are stored in a format with too little precision."""
    bad = {name: kind for name, kind in kinds.items() if kind not in READABLE and "num_batches" not in name}
    if bad:
        name, kind = next(iter(bad.items()))
        raise UserError(
            f"{where} contains {'fp8' if kind.startswith('F8') else kind} weights ({len(bad)} tensors, for "
            f"example {name} in {kind}): use the file in fp16, bf16 or fp32"
        )


def _check_finite(weights: dict[str, torch.Tensor], where: str) -> None:
    bad = sorted(name for name, value in weights.items() if not torch.isfinite(value).all())
    if bad:
        raise UserError(
            f"{where} contains values that are not finite ({len(bad)} tensors, for example {bad[0]}): use "
            "another copy"
        )


def _cause_of_damage(error: Exception) -> str:
    text = str(error).splitlines()[0]
    if any(
        sign in text
        for sign in ("Incomplete", "IncompleteBuffer", "not fully covered", "TooSmall", "too small")
    ):
        return f"it is truncated, for example by an interrupted download ({text}): download it again"
    return text
