"""Several checkpoints averaged into one: equally, or by their score in validation.

Checkpoints of one run lie in one basin, and their mean often validates better than each (Wortsman et al.
2022, "Model soups"). VAEs of different beginnings do not: their mean is no VAE.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from vae.config.errors import UserError


def softmax_shares(scores: Sequence[float], temperature: float) -> list[float]:
    """Shares that sum to 1 and fall by 1/e for each `temperature` below the best score."""
    best = max(scores)
    powers = [math.exp((score - best) / temperature) for score in scores]
    return [power / sum(powers) for power in powers]


def recorded_score(checkpoint: Path, step: int) -> float:
    """PSNR, dB, of the validation at `step` in the metrics.jsonl beside a checkpoint; UserError without."""
    metrics = checkpoint.parent / "metrics.jsonl"
    found = None
    if metrics.is_file():
        for line in metrics.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record.get("kind") == "validation" and record["step"] == step:
                found = record.get("psnr", found)
    if found is None:
        raise UserError(
            f"--average_by score: {metrics} has no validation at step {step}, at which {checkpoint.name} "
            "was saved: give --scores, one for each --vae"
        )
    return found


def average(weights: Sequence[dict[str, torch.Tensor]], shares: Sequence[float]) -> dict[str, torch.Tensor]:
    """Weighted mean of tensors by name, summed in fp64; counters are the first one's."""
    mean = {}
    for name, first in weights[0].items():
        if not first.is_floating_point():
            mean[name] = first
            continue
        total = torch.zeros_like(first, dtype=torch.float64)
        for part, share in zip(weights, shares, strict=True):
            total.add_(part[name].double(), alpha=share)
        mean[name] = total.to(first.dtype)
    return mean
