"""The VAE that several VAEs are averaged to: whether they may be averaged, with which weights, and the mean.

Checkpoints of one run are in the same loss basin, and their mean often validates better than each of them
(Wortsman et al. 2022, "Model soups"). So are VAEs that began from the same weights (Frankle et al. 2020,
"Linear mode connectivity"; Neyshabur et al. 2020). Units of networks from different starts have no common
order: their mean is noise.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vae.config.export_flags import ExportConfig
from vae.device import pick_device
from vae.images.psnr import MAX_PSNR_DB, psnr
from vae.interop.crops import Crops
from vae.interop.run_files import METRICS_NAME
from vae.interop.vae_files import LoadedVae
from vae.model.autoencoder import AutoencoderKL
from vae.system import console
from vae.system.errors import UserError
from vae.system.files import read_json, read_json_lines

ENCODER = ("encoder.", "quant_conv.", "bn.")  # first parts of the names that decide the latents


def combine(vaes: Sequence[LoadedVae], config: ExportConfig) -> LoadedVae:
    """The first of `vaes` with the average of all weights; UserError if they cannot be averaged."""
    check_combinable(vaes, config.vae)
    weights = [1 / len(vaes)] * len(vaes)
    parts = [dict(vae.autoencoder.state_dict()) for vae in vaes]
    if config.average_by == "score":
        scores = torch.tensor(_scores(vaes, config), dtype=torch.float64)
        weights = torch.softmax(scores / config.temperature, 0).tolist()
    elif config.average_by == "soup":
        weights = _soup(vaes, parts, config)
    for path, weight in zip(config.vae, weights, strict=True):
        console.info(f"averaged: {weight:.1%} of {path}")
    used = [number for number, weight in enumerate(weights) if weight]
    first = vaes[used[0]]
    if len(used) == 1:
        console.info(f"no other VAE raises the score, so the result is {config.vae[used[0]]} alone")
        return first
    _report_latents(first, [vaes[number] for number in used])
    mean = average([parts[number] for number in used], [weights[number] for number in used])
    first.autoencoder.load_state_dict(mean)
    if not all(vaes[number].file.start for number in used):
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
                "averaged; evaluate_vae.py --ensemble averages reconstructions"
            )
    known = {vae.file.start: number for number, vae in enumerate(vaes) if vae.file.start}
    if len(known) > 1:
        one, other = list(known.values())[:2]
        raise UserError(
            f"--vae {paths[one]} and {paths[other]} began from different weights, so the mean of their "
            "weights is no VAE: average folds or checkpoints that began from one VAE (same --init_from or "
            "--seed), or average the reconstructions instead: evaluate_vae.py --ensemble"
        )
    unknown = [path for path, vae in zip(paths, vaes, strict=True) if not vae.file.start]
    if unknown:
        console.warning(
            f"--vae {unknown[0]} does not say from which weights its training began: the average is a VAE "
            "only if all of them began from one"
        )


def _report_latents(first: LoadedVae, used: Sequence[LoadedVae]) -> None:
    """Print whether the average has the latents of its members; if not, it needs constants of its own."""
    states = [vae.autoencoder.state_dict() for vae in used]
    names = [name for name in states[0] if name.startswith(ENCODER)]
    if all(torch.equal(state[name], states[0][name]) for state in states[1:] for name in names):
        console.info("latents: the same as before, because all encoders are equal")
        return
    console.info(
        "latents: the encoders differ, so the average has its own: encode images again that one of them "
        "encoded"
    )
    if len({(vae.scaling_factor, vae.shift_factor) for vae in used}) > 1:
        first.file.scaling_factor = first.file.shift_factor = None  # to be measured
        first.file.latents_mean = first.file.latents_std = ()


def _scores(vaes: Sequence[LoadedVae], config: ExportConfig) -> Sequence[float]:
    """The PSNR of each VAE in dB: given, measured on --held_out, or recorded by its run."""
    if config.scores is not None:
        return config.scores
    if config.held_out is not None:
        measure = _held_out_psnr(vaes[0], config)
        return [measure(vae.autoencoder) for vae in vaes]
    sets = {_validation_set(path) for path in config.vae} - {None}
    if len(sets) > 1:
        raise UserError(
            "--average_by score: the VAEs were validated on different images, so their PSNR cannot be "
            "compared: give images that none of them was trained on with --held_out, or give --scores"
        )
    return [_recorded(path, vae) for path, vae in zip(config.vae, vaes, strict=True)]


def _recorded(path: str, vae: LoadedVae) -> float:
    """The PSNR of the validation at which a checkpoint was saved, from metrics.jsonl beside it."""
    step = vae.file.step
    metrics = Path(path).parent / METRICS_NAME
    if step is None:
        raise UserError(
            f"--average_by score: {path} is not a checkpoint of a run: give --scores, one for each --vae, or "
            "--held_out"
        )
    records = read_json_lines(metrics) if metrics.is_file() else ()
    scores = [
        r["psnr"] for r in records if (r.get("kind"), r.get("step")) == ("validation", step) and "psnr" in r
    ]
    if not scores:
        raise UserError(
            f"--average_by score: {metrics} has no validation at step {step}, when {Path(path).name} was "
            "saved: give --scores, one for each --vae"
        )
    return float(scores[-1])


def _validation_set(path: str) -> str | None:
    """What identifies the validation images of a checkpoint's run, if the run recorded them."""
    try:
        config: Any = read_json(Path(path).parent / "config.json")
        return str(config["contract"]["validation"]["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _soup(
    vaes: Sequence[LoadedVae], parts: Sequence[dict[str, torch.Tensor]], config: ExportConfig
) -> list[float]:
    """Equal weights of the members of a greedy soup, and 0 for the others."""
    measure = _held_out_psnr(vaes[0], config)
    model = AutoencoderKL(vaes[0].autoencoder.config).eval().requires_grad_(False)

    def score_of(members: Sequence[int]) -> float:
        model.load_state_dict(average([parts[one] for one in members], [1 / len(members)] * len(members)))
        score = measure(model)
        shown = " ".join(str(one + 1) for one in members)
        console.info(f"soup of {shown} (of {len(vaes)} VAEs): PSNR {score:.3f} dB on --held_out")
        return score

    members = greedy_soup([score_of([one]) for one in range(len(vaes))], score_of)
    return [1 / len(members) if one in members else 0.0 for one in range(len(vaes))]


def _held_out_psnr(first: LoadedVae, config: ExportConfig) -> Callable[[AutoencoderKL], float]:
    """A function that measures the mean PSNR of a VAE on --held_out."""
    assert config.held_out is not None
    crops = Crops.of(config.held_out, config, first, "--held_out", held_out=True)
    device = pick_device(config.device)

    @torch.no_grad()
    def measure(model: AutoencoderKL) -> float:
        model.to(device)
        batches = (images.to(device) for images in crops.batches())
        values = [psnr(model(images)[0], images).clamp(max=MAX_PSNR_DB) for images in batches]
        model.cpu()
        return torch.cat(values).mean().item()

    return measure


def hash_of_weights(state_dict: dict[str, torch.Tensor]) -> str:
    """SHA-256 of names and values: runs with the same one before their first step began from one VAE."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state_dict.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def greedy_soup(scores: Sequence[float], score_of: Callable[[Sequence[int]], float]) -> list[int]:
    """The members of a greedy soup (Wortsman et al. 2022, recipe 1), the best one first.

    `scores` are those of each alone. In this order, a member is kept only if `score_of` the members with it
    is above the score without it.
    """
    order = sorted(range(len(scores)), key=lambda one: -scores[one])
    members = order[:1]
    best = scores[order[0]]
    for one in order[1:]:
        score = score_of([*members, one])
        if score > best:
            members, best = [*members, one], score
    return members


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
