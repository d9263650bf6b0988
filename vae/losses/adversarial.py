"""The adversarial terms on logits handed in, and the weight that balances them with the other terms.

The adaptive weight follows VQGAN (Esser et al. 2021, eq. 7): the ratio of the norms of two gradients, so that
the discriminator pulls about as hard as everything else. It differs in two ways:

- The gradients are those at the reconstruction itself, not at the decoder's last layer. There they are at
  hand (the losses are walked back to the reconstruction first), cost no extra pass, and their squared norms
  simply add up over images and micro-batches, because no image's loss touches another image's pixels.
- The ratio in use is a running value of earlier steps. A ratio of the batch at hand would couple its images,
  and a batch cut into micro-batches would then have other gradients than the whole.

Nothing here reads a value back to the host.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def hinge_discriminator_loss(real_logits: Tensor, fake_logits: Tensor) -> Tensor:
    """Hinge loss of the discriminator per image, mean over its patches: (B, ...) twice -> (B,).

    (max(0, 1 - real) + max(0, 1 + fake)) / 2: Lim and Ye 2017, with VQGAN's half.
    """
    return 0.5 * (
        _mean_per_image(F.relu(1 - _wide(real_logits))) + _mean_per_image(F.relu(1 + _wide(fake_logits)))
    )


def generator_loss(fake_logits: Tensor) -> Tensor:
    """Hinge loss of the generator per image, minus the mean logit of its patches: (B, ...) -> (B,)."""
    return -_mean_per_image(_wide(fake_logits))


def squared_norm(gradient: Tensor) -> Tensor:
    """Squared norm of a gradient, at least fp32: any shape -> (); micro-batches and processes add theirs."""
    return torch.linalg.vector_norm(gradient, dtype=_wide_dtype(gradient)).square()


def update_running(running: Tensor, measured: Tensor, decay: float = 0.99) -> Tensor:
    """The running value after one more step: any one shape, here the (2,) squared norms, first zeros.

    Both norms go in together, so whatever they share in one step cancels in their ratio: the start from zero,
    a loss scale. A step with a non-finite norm changes nothing.
    """
    updated = torch.lerp(measured.to(running.dtype), running, decay)
    return torch.where(torch.isfinite(measured).all(), updated, running)


def adaptive_weight(running_rec_sq_norm: Tensor, running_adv_sq_norm: Tensor, max_weight: float) -> Tensor:
    """Factor of the adversarial term: ratio of the two gradients' running norms, at most `max_weight`: -> ().

    `rec` is the gradient of every other term that reaches the reconstruction (per-pixel and perceptual, with
    their weights), `adv` that of the unweighted adversarial term. Without history (zeros) the factor is 0.
    """
    known = running_adv_sq_norm > 0
    ratio = (running_rec_sq_norm / torch.where(known, running_adv_sq_norm, 1)).sqrt()
    return torch.where(known, ratio.clamp(max=max_weight), 0).detach()


def ramp(step: int | Tensor, disc_start: int, disc_ramp: int) -> float | Tensor:
    """Share of the adversarial weight at an optimizer step counted from 0: a number, a tensor for a tensor.

    0 before `disc_start`, then growing by 1/`disc_ramp` a step, from 1/`disc_ramp` at `disc_start` to 1.
    """
    share = (step - disc_start + 1) / max(disc_ramp, 1)
    return share.clamp(0, 1) if isinstance(share, Tensor) else min(max(share, 0.0), 1.0)


def _mean_per_image(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1) if values.dim() > 1 else values


def _wide_dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _wide(values: Tensor) -> Tensor:
    return values.to(_wide_dtype(values))
