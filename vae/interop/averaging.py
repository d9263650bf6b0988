"""The VAE that several VAEs are averaged to: whether they may be averaged, with which weights, and the mean.

Checkpoints of one run are in the same loss basin, and their mean often validates better than each of them
(Wortsman et al. 2022, "Model soups"). So are VAEs that began from the same weights (Frankle et al. 2020,
"Linear mode connectivity"; Neyshabur et al. 2020). Units of networks from different starts have no common
order: their mean is noise.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vae.config.options import LossConfig, image_weights
from vae.config.trained_vae_flags import ExportConfig
from vae.interop.latent_statistics import LatentConstants
from vae.interop.vae_files import LoadedVae
from vae.interop.vae_path import METRICS_NAME
from vae.system import console
from vae.system.errors import UserError
from vae.system.files import read_json, read_json_lines

_WEIGHTS = [f"{name}_weight" for name in image_weights(LossConfig())]  # of the validation loss
ENCODER = ("encoder.", "quant_conv.", "bn.")  # first parts of the names that decide the latents


def combine(vaes: Sequence[LoadedVae], config: ExportConfig) -> LoadedVae:
    """The first of `vaes` with the average of all weights; UserError if they cannot be averaged."""
    check_combinable(vaes, config.vae)
    weights = [1 / len(vaes)] * len(vaes)
    parts = [dict(vae.autoencoder.state_dict()) for vae in vaes]
    if config.average_by == "score":
        losses = torch.tensor(_losses(vaes, config), dtype=torch.float64)
        weights = torch.softmax(-losses / losses.min() / config.temperature, 0).tolist()
    for path, weight in zip(config.vae, weights, strict=True):
        console.info(f"averaged: {weight:.1%} of {path}")
    first = vaes[0]
    _set_latents(first, vaes, weights, is_measured=config.data_path is not None)
    first.autoencoder.load_state_dict(average(parts, weights))
    if not all(vae.file.start for vae in vaes):
        first.file.start = ""  # one of them may have another start
    return first


def check_combinable(vaes: Sequence[LoadedVae], paths: Sequence[str]) -> None:
    """Raise UserError if the shapes or the starts differ; warn if a start is not known."""
    options = vars(vaes[0].autoencoder.config)
    for path, vae in zip(paths, vaes, strict=True):
        others = vars(vae.autoencoder.config)
        if name := next((name for name in options if others[name] != options[name]), None):
            raise UserError(
                f"--vae {path} has {name} {others[name]}, and {paths[0]} {options[name]}: they cannot be "
                "averaged"
            )
    known = {vae.file.start: number for number, vae in enumerate(vaes) if vae.file.start}
    if len(known) > 1:
        first, second = list(known.values())[:2]
        raise UserError(
            f"--vae {paths[first]} and {paths[second]} began from different weights, so the mean of their "
            "weights is no VAE: average folds or checkpoints that began from one VAE (same --init_from or "
            "--seed)"
        )
    unknown = [path for path, vae in zip(paths, vaes, strict=True) if not vae.file.start]
    if unknown:
        console.warning(
            f"--vae {unknown[0]} does not say from which weights its training began: the average is a VAE "
            "only if all of them began from one"
        )


def _set_latents(
    first: LoadedVae, used: Sequence[LoadedVae], weights: Sequence[float], is_measured: bool
) -> None:
    """Print whether the average has the latents of its members; if not, it gets constants of its own.

    They are the mean of those of the members, unless they are then measured.
    """
    states = [vae.autoencoder.state_dict() for vae in used]
    names = [name for name in states[0] if name.startswith(ENCODER)]
    if all(torch.equal(state[name], states[0][name]) for state in states[1:] for name in names):
        console.info("latents: the same as before, because all encoders are equal")
        return
    console.info(
        "latents: the encoders differ, so the average has its own: encode images again that one of them "
        "encoded"
    )
    constants = [vae.file.constants for vae in used]
    if constants.count(constants[0]) == len(constants):
        return
    if is_measured:
        first.file.constants = LatentConstants()
        first.file.encoder_trained = True  # its latents are its own, so no published constants fit
        return
    first.file.constants = LatentConstants(*(_mean(v, weights) for v in zip(*constants, strict=True)))
    if first.scaling_factor is not None:
        console.info(
            f"their scaling is the mean of the members', {first.scaling_factor:.5g}; --data_path measures it"
        )


def _mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """The weighted mean of numbers, or of tuples of them; None, or (), if one is missing."""
    if None in values:
        return None
    if isinstance(values[0], tuple):
        return tuple(_mean(channel, weights) for channel in zip(*values, strict=False))
    return sum(value * weight for value, weight in zip(values, weights, strict=True))


def _losses(vaes: Sequence[LoadedVae], config: ExportConfig) -> Sequence[float]:
    """The validation loss of each VAE: given, or recorded by its run."""
    if config.scores is not None:
        return config.scores
    bases = [basis for path in config.vae if (basis := _basis(path)) is not None]
    if any(basis != bases[0] for basis in bases):
        raise UserError(
            "--average_by score: the VAEs were validated on different images or with another loss, so their "
            "losses cannot be compared: measure them on the same images with evaluate_vae.py, and give "
            "--scores, for example LPIPS"
        )
    return [_recorded(path, vae) for path, vae in zip(config.vae, vaes, strict=True)]


def _recorded(path: str, vae: LoadedVae) -> float:
    """The loss of the validation at which a checkpoint was saved, from metrics.jsonl beside it."""
    step = vae.file.step
    metrics = Path(path).parent / METRICS_NAME
    if step is None:
        raise UserError(
            f"--average_by score: {path} is not a checkpoint of a run: give --scores, one for each --vae"
        )
    records = read_json_lines(metrics) if metrics.is_file() else ()
    losses = [
        r["loss"] for r in records if (r.get("kind"), r.get("step")) == ("validation", step) and "loss" in r
    ]
    if not losses:
        raise UserError(
            f"--average_by score: {metrics} has no validation at step {step}, when {Path(path).name} was "
            "saved: give --scores, one for each --vae"
        )
    return float(losses[-1])


def _basis(path: str) -> tuple[Any, ...] | None:
    """The validation images and the loss of a checkpoint's run, if the run recorded them."""
    try:
        config: Any = {**vars(LossConfig()), **read_json(Path(path).parent / "config.json")}
        images = str(config["provenance"]["validation"]["version"])
        return images, *(config[name] for name in ("reconstruction_loss", "perceptual_net", *_WEIGHTS))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def hash_of_weights(state_dict: dict[str, torch.Tensor]) -> str:
    """SHA-256 of names and values: runs with the same one before their first step began from one VAE."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state_dict.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def average(
    state_dicts: Sequence[dict[str, torch.Tensor]], weights: Sequence[float]
) -> dict[str, torch.Tensor]:
    """Weighted mean of tensors by name, summed in fp64; integer tensors are copied from the first."""
    mean = {}
    for name, first in state_dicts[0].items():
        equal = all(torch.equal(tensors[name], first) for tensors in state_dicts[1:])
        if equal or not first.is_floating_point():
            mean[name] = first  # bit for bit: the latents of a frozen encoder
            continue
        total = torch.zeros_like(first, dtype=torch.float64)
        for tensors, weight in zip(state_dicts, weights, strict=True):
            total.add_(tensors[name].double(), alpha=weight)
        mean[name] = total.to(first.dtype)
    return mean
