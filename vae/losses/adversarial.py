"""Adversarial loss terms, computed from logits, and the weight that balances them with the other terms.

Every reconstruction has its original, so the logits of both are compared, patch by patch. Their difference is
the *gap*: the discriminator learns to make it 1, and the autoencoder to make it 0 (least squares, Mao et al.
2017, of relativistic pairs, Jolicoeur-Martineau 2018). What a pair has in common cancels. With the hinge loss
of VQGAN, it does not: the logits depended more on the picture than on its quality, the discriminator did not
learn in a hundred steps, and the adaptive weight made its noise as large as the gradient of all other terms
(benchmarks/LOG.md, "The adversarial loss"). And an autoencoder that deceives the discriminator gains nothing.

The adaptive weight follows VQGAN (Esser et al. 2021, eq. 7). It is the ratio of the norms of two gradients:
with it, the adversarial gradient at a gap of 1 is as large as that of all other terms. Two things differ:

- The gradients are those at the reconstruction, not at the decoder's last layer. The step has them already
  (it runs the losses back to the reconstruction first), so they need no extra pass. Their squared norms add
  up over images and micro-batches, because the loss of an image does not touch the pixels of another.
- The ratio is a running value of earlier steps. A ratio of the current batch would couple its images, and
  micro-batches would then change the gradient.

Nothing here copies a value to the host.
"""

import torch
from torch import Tensor

from vae.ops.library import accumulation_dtype
from vae.ops.shapes import Logits, PerImage, Scalar

SMALLEST_SQUARE = 1e-12  # of a gap: below it, the gradient is zero but for rounding


def discriminator_loss(real_logits: Logits, fake_logits: Logits) -> PerImage:
    """Loss of the discriminator per image: half of (real - fake - 1)^2, the mean over its patches."""
    return 0.5 * _mean_per_image((_gap(real_logits, fake_logits) - 1).square())


def generator_loss(real_logits: Logits, fake_logits: Logits) -> PerImage:
    """Loss of the autoencoder per image: half of (real - fake)^2, the mean over its patches."""
    return 0.5 * _mean_per_image(_gap(real_logits, fake_logits).square())


def squared_norm(gradient: Tensor) -> Scalar:
    """Squared norm of a gradient, at least fp32; those of micro-batches and processes add up."""
    return torch.linalg.vector_norm(gradient, dtype=accumulation_dtype(gradient)).square()


def squared_norm_at_gap_1(gradient: Tensor, losses: PerImage) -> Scalar:
    """Squared norm of the generator's gradient (b, C, H, W), as if the gap of each image was 1.

    `losses` are the generator's: half of the mean squared gap. The gradient is proportional to the gap, so it
    becomes small if the discriminator does not tell the images apart. The ratio of `adaptive_weight` would
    make it large again.
    """
    norms = torch.linalg.vector_norm(gradient, dim=(1, 2, 3), dtype=accumulation_dtype(gradient))
    return (norms.square() / (2 * losses).clamp(min=SMALLEST_SQUARE)).sum()


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


def ramp(step: int, start: int, length: int) -> float:
    """Fraction of the adversarial weight at an optimizer step, counted from 0.

    0 before `start`, then 1/`length` at `start`, and 1/`length` more at each step, up to 1.
    """
    return min(max((step - start + 1) / max(length, 1), 0.0), 1.0)


def _gap(real_logits: Logits, fake_logits: Logits) -> Tensor:
    return _widen(real_logits) - _widen(fake_logits)


def _mean_per_image(values: Logits) -> PerImage:
    return values.flatten(1).mean(1) if values.dim() > 1 else values


def _widen(values: Tensor) -> Tensor:
    return values.to(accumulation_dtype(values))
