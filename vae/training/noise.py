"""The posterior's noise: one draw per image and epoch, the same under any batch, micro-batch or process."""

import hashlib

import torch

_WORD = 2**63


def posterior_noise(
    epochs: torch.Tensor, indices: torch.Tensor, shape: tuple[int, int, int], seed: int, device: torch.device
) -> torch.Tensor:
    """Standard normal (B, *shape) in fp32 on `device`, image i keyed by (seed, epochs[i], indices[i])."""
    generator = torch.Generator(device)
    draws = []
    for epoch, index in zip(epochs.tolist(), indices.tolist(), strict=True):
        generator.manual_seed(_key(seed, epoch, index))
        draws.append(torch.randn(shape, generator=generator, device=device))
    return torch.stack(draws) if draws else torch.empty(0, *shape, device=device)


def _key(seed: int, epoch: int, index: int) -> int:
    digest = hashlib.blake2b(f"noise {seed} {epoch} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _WORD
