"""Adversarial loss terms, computed from logits, and the weight that balances them with the other terms.

The adaptive weight follows VQGAN (Esser et al. 2021, eq. 7). It is the ratio of the norms of two gradients:
with it, the discriminator's gradient is about as large as that of all other terms. Two things differ:

- The gradients are those at the reconstruction, not at the decoder's last layer. The step has them already
  (it runs the losses back to the reconstruction first), so they need no extra pass. Their squared norms add
  up over images and micro-batches, because the loss of an image does not touch the pixels of another.
- The ratio is a running value of earlier steps. A ratio of the current batch would couple its images, and
  micro-batches would then change the gradient.

Nothing here copies a value to the host.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from vae.ops.library import accumulation_dtype
from vae.ops.shapes import Logits, PerImage, Scalar


def hinge_discriminator_loss(real_logits: Logits, fake_logits: Logits) -> PerImage:
    """Hinge loss of the discriminator per image, mean over its patches.

    (max(0, 1 - real) + max(0, 1 + fake)) / 2: Lim and Ye 2017, with the factor 1/2 of VQGAN.
    """
    real, fake = _widen(real_logits), _widen(fake_logits)
    return 0.5 * (_mean_per_image(F.relu(1 - real)) + _mean_per_image(F.relu(1 + fake)))


def generator_loss(fake_logits: Logits) -> PerImage:
    """Hinge loss of the generator per image, minus the mean logit of its patches."""
    return -_mean_per_image(_widen(fake_logits))


def squared_norm(gradient: Tensor) -> Scalar:
    """Squared norm of a gradient, at least fp32; those of micro-batches and processes add up."""
    return torch.linalg.vector_norm(gradient, dtype=accumulation_dtype(gradient)).square()


def update_running(running: Tensor, measured: Tensor, decay: float = 0.99) -> Tensor:
    """The running value after one more step, in any shape; here the (2,) squared norms, initially zeros.

    Both norms are updated together, so any factor that they share in a step cancels in their ratio: the bias
    of the start from zero, or a loss scale. A step with a non-finite norm changes nothing.
    """
    updated = torch.lerp(measured.to(running.dtype), running, decay)
    return torch.where(torch.isfinite(measured).all(), updated, running)


def adaptive_weight(running_rec_sq_norm: Scalar, running_adv_sq_norm: Scalar, max_weight: float) -> Scalar:
    """Factor of the adversarial term: the ratio of the running norms, at most `max_weight`.

    `rec` is the gradient of all other terms at the reconstruction (per-pixel and perceptual, with their
    weights). `adv` is that of the unweighted adversarial term. Without history (zeros) the factor is 0.
    """
    measured = running_adv_sq_norm > 0
    ratio = (running_rec_sq_norm / torch.where(measured, running_adv_sq_norm, 1)).sqrt()
    return torch.where(measured, ratio.clamp(max=max_weight), 0).detach()


def ramp(step: int | Tensor, start: int, length: int) -> float | Tensor:
    """Fraction of the adversarial weight at an optimizer step, counted from 0; a tensor if `step` is one.

    0 before `start`, then 1/`length` at `start`, and 1/`length` more at each step, up to 1.
    """
    fraction = (step - start + 1) / max(length, 1)
    return fraction.clamp(0, 1) if isinstance(fraction, Tensor) else min(max(fraction, 0.0), 1.0)


def _mean_per_image(values: Logits) -> PerImage:
    return values.flatten(1).mean(1) if values.dim() > 1 else values


def _widen(values: Tensor) -> Tensor:
    return values.to(accumulation_dtype(values))
