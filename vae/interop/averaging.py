"""Averages of several checkpoints, with equal weights or weights from their validation scores.

Checkpoints of one run are in the same loss basin, and their mean often validates better than each of them
(Wortsman et al. 2022, "Model soups"). The mean of independently trained VAEs is not a usable VAE.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from vae.system.errors import UserError
from vae.system.files import read_json_lines


def hash_of_weights(state_dict: dict[str, torch.Tensor]) -> str:
    """SHA-256 of names and values: runs with the same one before their first step began from one VAE."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state_dict.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def softmax_weights(scores: Sequence[float], temperature: float) -> list[float]:
    """Weights that sum to 1 and scale by 1/e for each `temperature` below the best score."""
    best = max(scores)
    powers = [math.exp((score - best) / temperature) for score in scores]
    return [power / sum(powers) for power in powers]


def recorded_score(checkpoint: Path, step: int) -> float:
    """PSNR in dB of the validation at `step`, from metrics.jsonl beside the checkpoint; else UserError."""
    metrics = checkpoint.parent / "metrics.jsonl"
    found = None
    if metrics.is_file():
        for record in read_json_lines(metrics):
            if record.get("kind") == "validation" and record.get("step") == step:
                found = record.get("psnr", found)
    if found is None:
        raise UserError(
            f"--average_by score: {metrics} has no validation at step {step}, when {checkpoint.name} was "
            "saved: give --scores, one for each --vae"
        )
    return found


def greedy_soup(scores: Sequence[float], score_of: Callable[[Sequence[int]], float]) -> list[int]:
    """The members of a greedy soup (Wortsman et al. 2022, recipe 1), the best one first.

    `scores` are those of each alone. In this order, a member is kept only if `score_of` the members with it
    is above the score without it.
    """
    order = sorted(range(len(scores)), key=lambda one: -scores[one])
    members, best = order[:1], scores[order[0]]
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
