"""Reading VAE tensors from files of weights, which may contain other networks: safetensors or torch.save."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vae.config.declare import PUBLISHED_SCALING
from vae.interop.checkpoint_file import DamagedFileError, NeedsCodeError, read_torch_file
from vae.interop.parameter_names import (
    BLOCK,
    from_compvis,
    from_taesd,
    from_wan,
    is_compvis,
    is_wan,
    taesd_half,
)
from vae.interop.vae_path import CONVERT, VaePath
from vae.system import console
from vae.system.errors import UserError
from vae.system.files import utf8_path

_READABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# PyTorch's wrappers of a module add these parts, anywhere in a name.
_WRAPPERS = r"(?:(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.)"
_WRAPPED = re.compile(rf"(?:^|(?<=\.)){_WRAPPERS}+")
# This matches a name of a VAE of this family, behind any prefix.
_OF_VAE = re.compile(
    rf"((?:[^.]+\.)*?)(?:encoder\.{_WRAPPERS}*(?:conv_in|down(?:_blocks)?|downsamples\.0\.residual|layers\.0)"
    rf"|decoder\.{_WRAPPERS}*(?:conv_in|up(?:_blocks)?|layers\.0))\."
)
_OF_EMA = re.compile(r"(^|[._])ema([._]|$)")  # in a prefix
# These are not read: discriminator and LPIPS, EMA weights with flattened names, the part of
# AsymmetricAutoencoderKL that reads masks, and the scaling in files of taesd for ComfyUI.
_DROPPED = re.compile(r"(loss|model_ema|decoder\.condition_encoder)\.|vae_(scale|shift)$")

# Names of tensors in other networks. The first match is reported if a file contains no VAE.
OTHER_NETWORKS = (
    (r"(en|de)coder\.(down|up)samples\.\d+\.(down|up)samples\.", "the VAE of Wan 2.2"),
    (r"model\.diffusion_model\.|double_blocks\.|joint_blocks\.|transformer_blocks\.|down_blocks\.0\.resnets",
     "a diffusion model without its VAE"),
)  # fmt: skip

# In a file with several networks, a name of another network determines the latent scaling of the VAE.
_SCALING_BY_OTHER_NETWORK = (
    ("conditioner.embedders.", PUBLISHED_SCALING["sdxl"]),
    ("cond_stage_model.", PUBLISHED_SCALING["sd"]),  # SD 1.x, 2.x
    ("model.diffusion_model.joint_blocks.", PUBLISHED_SCALING["sd3"]),
    ("model.diffusion_model.double_blocks.", PUBLISHED_SCALING["flux"]),
)

_OTHER_HALF = {"encoder": "decoder", "decoder": "encoder"}  # of a taesd, in the names of its two files

_Stored = Mapping[str, Callable[[], torch.Tensor]]  # the tensors of a file, which are read when needed


@dataclass
class VaeTensors:
    """Tensors of a VAE in fp32 under diffusers names, and other facts from the file."""

    weights: dict[str, torch.Tensor]
    kind: str  # of parameter names: diffusers, compvis (the original research code) or wan
    dtype: torch.dtype  # of the weights in the file
    metadata: dict[str, str]
    published_scaling: tuple[float, float] | None  # scaling and shift, if other networks show the model


def read_weights(located: VaePath, where: str, weights: str = "ema", content: Any = None) -> VaeTensors:
    """Read the VAE from files of weights; a UserError starts with `where` (flag and path).

    `weights` applies to files that contain it twice, once as EMA weights. `content` is that of a file of
    torch.save that is read already.
    """
    tensors, others, metadata = _read(located, where, weights, content)
    floats = (value.dtype for value in tensors.values() if value.is_floating_point() and value.dim() > 1)
    dtype = next(floats, torch.float32)  # without any, its shapes do not fit either
    scaling = next(
        (s for start, s in _SCALING_BY_OTHER_NETWORK if any(f".{start}" in f".{n}" for n in others)), None
    )
    kind = "wan" if is_wan(tensors) else "compvis" if any(map(is_compvis, tensors)) else "diffusers"
    named = from_wan(tensors) if kind == "wan" else _diffusers_names(tensors)
    own = {n: value.float() if value.is_floating_point() else value for n, value in named.items()}
    _check_values(own, where)
    return VaeTensors(own, kind, dtype, metadata, scaling)


def read_tensors(located: VaePath, where: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a VAE as they are in the file, without a prefix, and its metadata."""
    tensors, _, metadata = _read(located, where)
    return tensors, metadata


def read_metadata(located: VaePath, where: str) -> dict[str, str]:
    """The metadata of a single safetensors file, without its tensors; empty for others."""
    if len(located.weights) > 1 or located.format(where) != "safetensors":
        return {}
    (path,) = located.weights
    try:
        with utf8_path(path) as readable, safe_open(readable, framework="pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise _damaged(path, where, error) from None


def _read(
    located: VaePath, where: str, weights: str = "ema", content: Any = None
) -> tuple[dict[str, torch.Tensor], list[str], dict[str, str]]:
    """Tensors of the VAE by their names without prefix, the names of other networks, the metadata."""
    kind = located.format(where)
    with ExitStack() as stack:
        stored = dict[str, Callable[[], torch.Tensor]]()
        metadata = dict[str, str]()
        paths = list(located.weights)
        for path in paths:  # gets the other half of a taesd
            if kind == "pickle":
                part = _stored_in(content if content is not None else read_pickle(path, where))
                content = None
            else:
                try:
                    readable = stack.enter_context(utf8_path(path))
                    file = stack.enter_context(safe_open(readable, framework="pt"))
                except (SafetensorError, OSError) as error:
                    raise _damaged(path, where, error) from None
                part = {name: partial(file.get_tensor, name) for name in file.keys()}  # noqa: SIM118
                metadata |= file.metadata() or {}
            half = taesd_half(part)
            other = path.with_name(path.name.replace(half, _OTHER_HALF[half])) if half else path
            if other not in paths and other.is_file():
                console.info(f"{where}: read with {other.name} beside it")
                paths.append(other)
            stored |= {ours: part[name] for name, ours in from_taesd(part).items()}
        prefix, chosen = _vae_names(stored, where, weights)
        tensors = {ours: stored[name]() for ours, name in chosen.items()}
        _check_dtypes(tensors, where)
        others = [name for name in stored if not prefix or not name.startswith(prefix)]
        return tensors, others, metadata


def read_pickle(path: Path, where: str) -> Any:
    """The content of a file of torch.save; UserError that starts with `where`."""
    try:
        return read_torch_file(path)
    except NeedsCodeError as error:
        raise UserError(f"{where} is a pickle with {error}, which only code can make: {CONVERT}") from None
    except (DamagedFileError, OSError) as error:
        raise _damaged(path, where, error) from None


def _damaged(path: Path, where: str, error: Exception) -> UserError:
    text = str(error).splitlines()[0]
    return UserError(
        f"{where}: {path.name} is damaged, or only part of it was downloaded ({text}): download it again"
    )


def _stored_in(content: Any, prefix: str = "") -> dict[str, Callable[[], torch.Tensor]]:
    """The tensors in nested dicts, by the keys on the way to them."""
    stored = dict[str, Callable[[], torch.Tensor]]()
    for key, value in content.items() if isinstance(content, dict) else ():
        if isinstance(value, torch.Tensor):
            stored[f"{prefix}{key}"] = value.detach
        else:
            stored |= _stored_in(value, f"{prefix}{key}.")
    return stored


def _diffusers_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of an AutoencoderKL, with current or first names of diffusers or those of CompVis."""
    levels = 1 + max(
        (int(m[1]) for m in (re.match(rf"encoder\.down\.({BLOCK})\.", n) for n in tensors) if m), default=0
    )
    return {from_compvis(name, levels): value for name, value in tensors.items()}


def _vae_names(stored: _Stored, where: str, weights: str) -> tuple[str, dict[str, str]]:
    """The prefix of the VAE in the file, and its names in the file by those without prefix and wrappers."""
    prefixes = sorted({match[1] for match in map(_OF_VAE.match, stored) if match})
    if not prefixes:
        raise _no_vae(stored, where)
    names = {
        prefix: _names_behind(prefix, stored, [other for other in prefixes if other != prefix])
        for prefix in prefixes
    }
    prefix = prefixes[0] if len(prefixes) == 1 else _chosen(names, where, weights)
    return prefix, names[prefix]


def _names_behind(prefix: str, names: Iterable[str], others: Sequence[str]) -> dict[str, str]:
    inside = tuple(other for other in others if other.startswith(prefix))
    own = (name for name in names if name.startswith(prefix) and not (inside and name.startswith(inside)))
    renamed = {_WRAPPED.sub("", name.removeprefix(prefix)): name for name in own}
    return {ours: name for ours, name in renamed.items() if not _DROPPED.match(ours)}


def _chosen(names: Mapping[str, Mapping[str, str]], where: str, weights: str) -> str:
    """The prefix of one of two VAEs, raw or EMA weights; UserError if they are different VAEs."""
    raw = [prefix for prefix in names if not _OF_EMA.search(prefix)]
    ema = [prefix for prefix in names if _OF_EMA.search(prefix)]
    if len(raw) > 1 or len(ema) > 1:
        first, second = (raw if len(raw) > 1 else ema)[:2]
        raise UserError(
            f"{where} contains two VAEs, as {first or 'encoder.'}* and {second}*: write one of them to "
            "a file of its own"
        )
    if not raw or not ema:
        return (raw or ema)[0]
    is_complete = names[ema[0]].keys() >= {name for name in names[raw[0]] if _OF_VAE.match(name)}
    chosen = ema[0] if weights == "ema" and is_complete else raw[0]
    console.info(f"{where}: weights of {chosen or 'encoder.'}* are read, of {', '.join(map(repr, names))}")
    return chosen


def _no_vae(names: Iterable[str], where: str) -> UserError:
    """The error for a file without a VAE of this family, with what it is if that is known."""
    names = sorted(names)
    looks_like = (
        f"it looks like {network}"
        for pattern, network in OTHER_NETWORKS
        if any(re.match(pattern, name) for name in names)
    )
    unknown = f"it has other parameter names (first names: {', '.join(names[:3])})"
    return UserError(f"{where} is not a VAE of this family: {next(looks_like, unknown)}")


def _check_dtypes(tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Raise UserError if weights are stored in a format with too little precision."""
    for name, value in tensors.items():
        if value.dtype not in _READABLE and "num_batches" not in name:
            dtype = str(value.dtype).removeprefix("torch.")
            raise UserError(f"{where} has {dtype} weights ({name}): use the file in fp16, bf16 or fp32")


def _check_values(weights: Mapping[str, torch.Tensor], where: str) -> None:
    """Raise UserError for values that are not finite, and norms of zeros, which no network has."""
    bad = sorted(name for name, value in weights.items() if not torch.isfinite(value).all())
    if bad:
        raise UserError(
            f"{where} contains values that are not finite ({len(bad)} tensors, for example {bad[0]}): use "
            "another copy"
        )
    zero = sorted(n for n, v in weights.items() if re.search(r"norm\w*\.weight$", n) and not v.any())
    if zero:
        raise UserError(
            f"{where} contains only zeros in {len(zero)} norms (for example {zero[0]}), so only part of it "
            "was downloaded: download it again"
        )
