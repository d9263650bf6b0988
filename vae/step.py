"""One optimizer step: micro-batches, gradients of the losses, the discriminator, and the update.

Shapes: B images of this process and step, b images of one micro-batch, Z latent channels.
Every loss is a mean over the images of all processes, so micro-batches do not change the gradient.
"""

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce

import torch
from torch import nn

from vae.config.options import OptimConfig
from vae.images.pixels import to_float
from vae.losses.adversarial import generator_loss, hinge_discriminator_loss, squared_norm
from vae.losses.reconstruction import reconstruction_loss
from vae.losses.terms import LossTerms

LOSS_SCALE_START = 2.0**16  # fp16: start, growth and backoff as in PyTorch's GradScaler
LOSS_SCALE_GROWTH_STEPS = 2000

LastPass = Callable[[nn.Module], AbstractContextManager[object]]


@dataclass
class Networks:
    """The networks of a step, their loss and compute dtype."""

    autoencoder: nn.Module
    discriminator: nn.Module | None
    terms: LossTerms
    dtype: torch.dtype
    channels_last: bool


@dataclass
class StepInputs:
    """Images of a step, and its random and running values as well, so that the step is a function."""

    images: torch.Tensor  # (B, 3, H, W) uint8 on the device
    noise: torch.Tensor  # (B, Z, H/f, W/f), one draw per image, independent of micro-batches
    image_share: float  # weight of one image: number of processes / images of all processes, as expected
    loss_scale: torch.Tensor  # () fp32; 1 unless fp16
    adversarial_factor: torch.Tensor | None  # () weight of the adversarial term; None: not started


def trained_networks(networks: Networks) -> list[nn.Module]:
    """The networks that a step trains."""
    return [network for network in (networks.autoencoder, networks.discriminator) if network]


def clear_gradients(networks: Networks) -> None:
    """Delete the gradients of all networks."""
    for network in trained_networks(networks):
        network.zero_grad(set_to_none=True)


def network_input(images: torch.Tensor, networks: Networks) -> torch.Tensor:
    """Float images in the dtype and memory layout of the networks."""
    layout = torch.channels_last if networks.channels_last else torch.contiguous_format
    return images.to(dtype=networks.dtype, memory_format=layout)


def micro_batch_sizes(images: int, micro_batch: int) -> list[int]:
    """Sizes that split `images` into passes of at most `micro_batch`."""
    rest = images % micro_batch
    return [micro_batch] * (images // micro_batch) + [rest] * (rest > 0)


def compute_gradients(
    networks: Networks,
    inputs: StepInputs,
    sizes: list[int],
    last_pass: LastPass = nullcontext,
) -> dict[str, torch.Tensor]:
    """Add this step's gradients to .grad of all trained parameters; return sums over images, on the device.

    `last_pass` is entered with each trained network around its last pass, in which gradients become complete.
    The discriminator's gradients are computed before any weight changes. It gets the same detached
    reconstructions in either order, and this way a step that ran out of memory can restart.
    """
    sums, recons = autoencoder_gradients(networks, inputs, sizes, last_pass)
    if inputs.adversarial_factor is not None:
        sums |= discriminator_gradients(networks, inputs, recons, sizes, last_pass)
    return sums


def autoencoder_gradients(
    networks: Networks, inputs: StepInputs, sizes: list[int], last_pass: LastPass
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Gradients of all losses of the autoencoder; returns sums and detached reconstructions."""
    sums: dict[str, torch.Tensor] = {}
    recons = []
    image_parts, noise_parts = inputs.images.split(sizes), inputs.noise.split(sizes)
    for index, (part, noise) in enumerate(zip(image_parts, noise_parts, strict=True)):
        with _pass(networks.autoencoder, index == len(sizes) - 1, last_pass):
            images = to_float(part)
            recon, mean, logvar = networks.autoencoder(network_input(images, networks), noise)
            grad_recon, values = reconstruction_gradient(networks, recon.detach(), images, inputs)
            if inputs.adversarial_factor is not None:
                recons.append(recon.detach())
            roots, gradients = [recon], [grad_recon]
            for term in networks.terms.latent:
                value = term.function(mean, logvar, images[0, 0].numel())  # (b,)
                root = value.sum() * (term.weight * inputs.image_share) * inputs.loss_scale
                if root.requires_grad:  # false if the encoder is frozen
                    roots, gradients = [*roots, root], [*gradients, torch.ones_like(root)]
                values[term.name] = value.detach()
            torch.autograd.backward(roots, gradients)
        _accumulate(sums, values)
    return sums, recons


@torch.no_grad()
def forward_losses(networks: Networks, inputs: StepInputs, sizes: list[int]) -> dict[str, torch.Tensor]:
    """The sums of `compute_gradients`, except adversarial ones, without a backward pass."""
    sums: dict[str, torch.Tensor] = {}
    image_parts, noise_parts = inputs.images.split(sizes), inputs.noise.split(sizes)
    for part, noise in zip(image_parts, noise_parts, strict=True):
        images = to_float(part)
        recon, mean, logvar = networks.autoencoder(network_input(images, networks), noise)
        _, values = _image_terms(networks.terms, recon, images)
        values |= {t.name: t.function(mean, logvar, images[0, 0].numel()) for t in networks.terms.latent}
        _accumulate(sums, values)
    return sums


def reconstruction_gradient(
    networks: Networks, recon: torch.Tensor, images: torch.Tensor, inputs: StepInputs
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Gradient of the losses at the reconstruction; their graph is freed before the backward of the decoder.

    `recon` (b, 3, H, W) is detached. Returns the gradient and the values: (b,), or () for norms.
    """
    recon.requires_grad_()
    total, values = _image_terms(networks.terms, recon, images)
    scale = inputs.image_share * inputs.loss_scale
    (grad,) = torch.autograd.grad((total * scale).sum(), recon)
    if inputs.adversarial_factor is None:
        return grad, values
    adversarial_grad, values["adversarial"] = adversarial_gradient(networks, recon, inputs)
    values["reconstruction_sq_norm"] = squared_norm(grad)
    values["adversarial_sq_norm"] = squared_norm(adversarial_grad)
    return grad + (inputs.adversarial_factor * adversarial_grad).to(grad.dtype), values


def adversarial_gradient(
    networks: Networks, recon: torch.Tensor, inputs: StepInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of the unweighted adversarial term at the reconstruction, and the term, (b,)."""
    assert networks.discriminator is not None
    logits = networks.discriminator(recon)  # without gradients of its parameters
    adversarial = generator_loss(logits)
    scale = inputs.image_share * inputs.loss_scale
    (gradient,) = torch.autograd.grad((adversarial * scale).sum(), recon)
    return gradient, adversarial.detach()


def _image_terms(
    terms: LossTerms, recon: torch.Tensor, images: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The weighted sum of the image terms, and each of them and the mean squared error, detached: (b,)."""
    with torch.no_grad():
        mse = reconstruction_loss(recon, images, "mse")
    values = {term.name: term.function(recon, images) for term in terms.image}
    total = reduce(operator.add, [term.weight * values[term.name] for term in terms.image])
    return total, {"mse": mse} | {name: value.detach() for name, value in values.items()}


def discriminator_gradients(
    networks: Networks,
    inputs: StepInputs,
    recons: list[torch.Tensor],
    sizes: list[int],
    last_pass: LastPass,
) -> dict[str, torch.Tensor]:
    """Gradients of the discriminator: hinge loss of real images and detached reconstructions."""
    assert networks.discriminator is not None
    sums: dict[str, torch.Tensor] = {}
    for index, (part, recon) in enumerate(zip(inputs.images.split(sizes), recons, strict=True)):
        with _pass(networks.discriminator, index == len(sizes) - 1, last_pass):
            images = network_input(to_float(part), networks)
            real, fake = networks.discriminator(torch.cat([images, recon])).chunk(2)
            hinge = hinge_discriminator_loss(real, fake)  # (b,)
            ((hinge * inputs.image_share).sum() * inputs.loss_scale).backward()
        terms = {"discriminator": hinge, "logits_real": real, "logits_fake": fake}
        _accumulate(sums, {k: v.detach().float().reshape(len(part), -1).mean(1) for k, v in terms.items()})
    return sums


def _pass(network: nn.Module, is_last: bool, last_pass: LastPass) -> AbstractContextManager[object]:
    return last_pass(network) if is_last else nullcontext()


def _accumulate(sums: dict[str, torch.Tensor], terms: dict[str, torch.Tensor]) -> None:
    for name, value in terms.items():
        sums[name] = sums.get(name, 0) + value.sum()


@dataclass
class UpdateState:
    """State of the update between steps, as tensors on the device so that no step waits for the host."""

    loss_scale: torch.Tensor  # () fp32
    finite_steps: torch.Tensor  # () steps since the scale last changed
    nonfinite_streak: torch.Tensor  # () skipped steps in a row
    nonfinite_total: torch.Tensor  # () skipped steps of the run

    @classmethod
    def begin(cls, device: torch.device, fp16: bool) -> "UpdateState":
        start = LOSS_SCALE_START if fp16 else 1.0
        values = (start, 0.0, 0.0, 0.0)
        return cls(*(torch.tensor(value, dtype=torch.float32, device=device) for value in values))


def apply_update(
    optimizers: Sequence[torch.optim.Optimizer],
    state: UpdateState,
    optim: OptimConfig,
    fp16: bool,
    empty: bool,
) -> list[torch.Tensor]:
    """Clip, step and clear the gradients; return the gradient norm of each optimizer before clipping, ().

    If a gradient is not finite on any process, or the step has no image (`empty`), no weight of any network
    changes: the fused optimizers read `found_inf` on the device. Then the fp16 loss scale is adjusted.
    """
    norms = [_clip(optimizer, state.loss_scale, optim.gradient_clip, fp16) for optimizer in optimizers]
    skipped = torch.stack([~torch.isfinite(norm) for norm in norms]).any().float()
    if empty:
        skipped = torch.ones_like(skipped)
    for optimizer in optimizers:
        optimizer.found_inf = skipped  # type: ignore[attr-defined]  # fused optimizers read it, as GradScaler's
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if not empty:
        _adjust_loss_scale(state, skipped, fp16)
    return norms


def _clip(
    optimizer: torch.optim.Optimizer, loss_scale: torch.Tensor, limit: float, fp16: bool
) -> torch.Tensor:
    """Divide the gradients by the loss scale and clip them to `limit`; return their norm before clipping."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if fp16:
        torch._foreach_div_(grads, loss_scale)
    norm = torch.nn.utils.get_total_norm(grads)
    if limit > 0:
        torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _adjust_loss_scale(state: UpdateState, skipped: torch.Tensor, fp16: bool) -> None:
    state.nonfinite_total += skipped
    state.nonfinite_streak = (state.nonfinite_streak + skipped) * skipped
    if fp16:
        steps = (state.finite_steps + 1) * (1 - skipped)
        grow = (steps >= LOSS_SCALE_GROWTH_STEPS).float()
        state.loss_scale = state.loss_scale * torch.where(skipped > 0, 0.5, 1.0) * (1 + grow)
        state.finite_steps = steps * (1 - grow)
