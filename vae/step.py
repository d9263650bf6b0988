"""One optimizer step: micro-batches, gradients of the losses, the discriminator, and the update.

Shapes: B images of this process and step, b images of one micro-batch, Z latent channels.
Every loss is a mean over the images of all processes, so micro-batches do not change the gradient.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vae.config.options import OptimConfig
from vae.images.pixels import to_float
from vae.losses.adversarial import generator_loss, hinge_discriminator_loss, squared_norm
from vae.losses.reconstruction import reconstruction_loss
from vae.losses.terms import LossTerms

LOSS_SCALE_START = 2.0**16  # fp16: start, growth and backoff as in PyTorch's GradScaler
LOSS_SCALE_GROWTH_STEPS = 2000

SharedPass = Callable[[], AbstractContextManager[None]]


@dataclass
class Networks:
    """The networks of a step, wrapped by DistributedDataParallel or not, their loss and compute dtype."""

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
    image_share: float  # weight of one image: number of processes / images of all processes
    loss_scale: torch.Tensor  # () fp32; 1 unless fp16
    adversarial_factor: torch.Tensor | None  # () weight of the adversarial term; None: not started


def unwrapped(module: nn.Module) -> nn.Module:
    """The network inside its DistributedDataParallel wrapper, if it has one."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def trained_networks(networks: Networks) -> list[nn.Module]:
    """The networks that a step trains, unwrapped."""
    return [unwrapped(network) for network in (networks.autoencoder, networks.discriminator) if network]


def clear_gradients(networks: Networks) -> None:
    """Delete the gradients of all networks."""
    for network in trained_networks(networks):
        network.zero_grad(set_to_none=True)


def network_input(images: torch.Tensor, networks: Networks) -> torch.Tensor:
    """Float images in the dtype and memory layout of the networks."""
    layout = torch.channels_last if networks.channels_last else torch.contiguous_format
    return images.to(dtype=networks.dtype, memory_format=layout)


def micro_batch_sizes(images: int, micro_batch: int, distributed: bool) -> list[int]:
    """Sizes that split `images` into passes of at most `micro_batch`.

    With several processes, the last pass is at most half of the largest, rounded up. Its backward includes
    the all-reduce, and there no process may run out of memory alone.
    """
    sizes = [micro_batch] * (images // micro_batch)
    if images % micro_batch:
        sizes.append(images % micro_batch)
    if distributed and len(sizes) == 1 and images > 1:
        last = max(1, images // 3)
        return [images - last, last]
    half = (sizes[0] + 1) // 2
    if distributed and sizes[-1] > half:
        sizes[-1:] = [half, sizes[-1] - half]
    return sizes


def compute_gradients(
    networks: Networks,
    inputs: StepInputs,
    sizes: list[int],
    shared_pass: SharedPass = nullcontext,
) -> dict[str, torch.Tensor]:
    """Add this step's gradients to .grad of all trained parameters; return sums over images, on the device.

    `shared_pass` is entered around each pass whose backward includes the all-reduce: one pass per trained
    network. The discriminator's gradients are computed before any weight changes. It gets the same detached
    reconstructions in either order, and this way a step that ran out of memory can restart.
    """
    sums, recons = autoencoder_gradients(networks, inputs, sizes, shared_pass)
    if inputs.adversarial_factor is not None:
        sums |= discriminator_gradients(networks, inputs, recons, sizes, shared_pass)
    return sums


def autoencoder_gradients(
    networks: Networks, inputs: StepInputs, sizes: list[int], shared_pass: SharedPass
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Gradients of all losses of the autoencoder; returns sums and detached reconstructions."""
    sums: dict[str, torch.Tensor] = {}
    recons = []
    image_parts, noise_parts = inputs.images.split(sizes), inputs.noise.split(sizes)
    for index, (part, noise) in enumerate(zip(image_parts, noise_parts, strict=True)):
        with _one_pass(networks.autoencoder, index == len(sizes) - 1, shared_pass) as autoencoder:
            images = to_float(part)
            recon, mean, logvar = autoencoder(network_input(images, networks), noise)
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
def forward_losses(
    networks: Networks,
    inputs: StepInputs,
    sizes: list[int],
    shared_pass: SharedPass = nullcontext,
) -> dict[str, torch.Tensor]:
    """The sums of `compute_gradients`, except adversarial ones, without a backward pass."""
    sums: dict[str, torch.Tensor] = {}
    image_parts, noise_parts = inputs.images.split(sizes), inputs.noise.split(sizes)
    for index, (part, noise) in enumerate(zip(image_parts, noise_parts, strict=True)):
        with _one_pass(networks.autoencoder, index == len(sizes) - 1, shared_pass) as autoencoder:
            images = to_float(part)
            recon, mean, logvar = autoencoder(network_input(images, networks), noise)
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
    logits = unwrapped(networks.discriminator)(recon)  # without gradients of its parameters
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
    shared_pass: SharedPass,
) -> dict[str, torch.Tensor]:
    """Gradients of the discriminator: hinge loss of real images and detached reconstructions."""
    assert networks.discriminator is not None
    sums: dict[str, torch.Tensor] = {}
    for index, (part, recon) in enumerate(zip(inputs.images.split(sizes), recons, strict=True)):
        with _one_pass(networks.discriminator, index == len(sizes) - 1, shared_pass) as discriminator:
            images = network_input(to_float(part), networks)
            real, fake = discriminator(torch.cat([images, recon])).chunk(2)
            hinge = hinge_discriminator_loss(real, fake)  # (b,)
            ((hinge * inputs.image_share).sum() * inputs.loss_scale).backward()
        terms = {"discriminator": hinge, "logits_real": real, "logits_fake": fake}
        _accumulate(sums, {k: v.detach().float().reshape(len(part), -1).mean(1) for k, v in terms.items()})
    return sums


@contextmanager
def _one_pass(module: nn.Module, last: bool, shared_pass: SharedPass) -> Iterator[nn.Module]:
    """The module to run: the wrapper for the last pass, whose all-reduce includes all gradients.

    Earlier passes run the unwrapped network, so their gradients stay on this process, as with no_sync().
    Under no_sync() the forward of the wrapper would still wait for processes that may have fewer passes.
    """
    if last:
        with shared_pass():
            yield module
    else:
        yield unwrapped(module)


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
