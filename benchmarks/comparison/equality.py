"""The check before any timing: both sides give the same reconstruction, losses and gradients."""

from typing import Any

import torch

from benchmarks.comparison.ours import Ours
from benchmarks.comparison.theirs import FP64, Theirs
from benchmarks.comparison.work import Work

IMAGE_SIZE = 64
# Networks compute in fp64; the remaining difference is from the images and the L1 term, fp32 on both sides.
TOLERANCE = 1e-6


class DifferentWorkError(Exception):
    """The two sides compute different results, so their times must not be compared."""


def check_same_work(device: torch.device, work: Work | None = None) -> dict[str, Any]:
    """Relative differences of one step in fp64 with the same weights, images and noise.

    Raises DifferentWorkError if one is above TOLERANCE.
    """
    work = work or Work(IMAGE_SIZE)
    differences = _differences(work, device)
    for name, difference in differences.items():
        if not difference <= TOLERANCE:
            raise DifferentWorkError(f"{name} differ by {difference:.1e}, more than {TOLERANCE:.0e}")
    return {
        "image_size": work.image_size,
        "dtype": "fp64",
        "tolerance": TOLERANCE,
        "relative_differences": {name: float(f"{value:.2e}") for name, value in differences.items()},
    }


def _differences(work: Work, device: torch.device) -> dict[str, float]:
    ours = Ours(work, device, torch.float64)
    theirs = Theirs(work, device, FP64, ours)
    with torch.no_grad():
        images, noise = theirs.images.double(), theirs.noise
        posterior = theirs.vae.encode(images).latent_dist
        other_recon = theirs.vae.decode(posterior.mean + posterior.std * noise).sample
        recon = ours.networks.autoencoder(images, noise)[0]
    mine = {name: value / work.batch for name, value in ours.gradients().items()}
    other = theirs.gradients()
    found = {"reconstructions": _relative(recon, other_recon)}
    for name in other:
        found[f"{name} losses"] = _relative(mine[name], other[name].detach())
    my_grads = dict(ours.networks.autoencoder.named_parameters())
    pairs = [(my_grads[name].grad, p.grad / work.values) for name, p in theirs.vae.named_parameters()]
    difference = torch.stack([(a - b).norm() for a, b in pairs]).norm()
    length = torch.stack([b.norm() for _, b in pairs]).norm()
    found["gradients"] = _share(difference, length)
    return found


def _relative(value: torch.Tensor, other: torch.Tensor) -> float:
    return _share((value - other).norm(), other.norm())


def _share(difference: torch.Tensor, length: torch.Tensor) -> float:
    """A difference in relation to a length; 0 if there is none, also for a length of 0."""
    return (difference / length).item() if difference != 0 else 0.0
