"""Reproducible noise: a draw depends only on its key, not on the batch, the process or the order."""

import hashlib
from collections.abc import Sequence

import torch


def keyed_normal(shape: Sequence[int], *key: int | str, device: torch.device | str = "cpu") -> torch.Tensor:
    """Standard normal fp32 values of `shape`, drawn on `device`; the hash of the key is the seed."""
    text = " ".join(map(str, key)).encode("utf-8", "surrogateescape")
    digest = hashlib.blake2b(text, digest_size=8).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") % 2**63)
    return torch.randn(shape, generator=generator, device=device)


def image_noise(
    epochs: torch.Tensor,
    indices: torch.Tensor,
    shape: tuple[int, ...],
    seed: int,
    device: torch.device | str,
    purpose: str = "noise",  # of the posterior
) -> torch.Tensor:
    """Standard normal (B, *shape); image i has the key (purpose, seed, epochs[i], indices[i])."""
    draws = [
        keyed_normal(shape, purpose, seed, epoch, index, device=device)
        for epoch, index in zip(epochs.tolist(), indices.tolist(), strict=True)
    ]
    return torch.stack(draws) if draws else torch.empty(0, *shape, device=device)
