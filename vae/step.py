"""The gradients of one optimizer step: micro-batches, the losses, and the discriminator.

Shapes: B images of this process and step, b images of one micro-batch, C channels of an image, Z of a latent.
Every term compares RGB images: those with alpha over black and over white (vae/images/composites.py).
Every loss is a mean over the images of all processes, so micro-batches do not change the gradient.
"""

import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, reduce

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vae.images.composites import as_rgb, per_image, premultiply, unpremultiply
from vae.images.pixels import to_float
from vae.losses.adversarial import discriminator_loss, generator_loss, squared_norm, squared_norm_at_gap_1
from vae.losses.reconstruction import reconstruction_loss
from vae.losses.terms import LossTerms
from vae.losses.variance import moments, statistics_of


@dataclass
class Networks:
    """The networks of a step, their loss and compute dtype.

    With several processes, the trained networks are DistributedDataParallel.
    """

    autoencoder: nn.Module
    discriminator: nn.Module | None
    terms: LossTerms
    dtype: torch.dtype
    channels_last: bool
    progress: Callable[[], None] = lambda: None  # called after each micro-batch

    @property
    def eval_dtype(self) -> torch.dtype:
        """The dtype of validation: fp16 is near fp32, bf16 is not (benchmarks/LOG.md)."""
        return torch.float32 if self.dtype == torch.bfloat16 else self.dtype


@dataclass
class StepInputs:
    """Images of a step, and its random and running values as well, so that the step is a function."""

    images: torch.Tensor  # (B, C, H, W) uint8 on the device
    noise: torch.Tensor  # (B, Z, H/f, W/f), one draw per image, independent of micro-batches
    image_share: float  # weight of one image: number of processes / images of all processes, as expected
    loss_scale: torch.Tensor  # () fp32; 1 unless fp16
    adversarial_factor: torch.Tensor | None  # () weight of the adversarial term; None: not started
    running_moments: torch.Tensor | None = None  # (3, Z) of the latents so far, if a term needs them

    def split(self, sizes: list[int]) -> "list[StepInputs]":
        """Return the inputs of each micro-batch."""
        parts = zip(self.images.split(sizes), self.noise.split(sizes), strict=True)
        return [replace(self, images=images, noise=noise) for images, noise in parts]


@dataclass
class StepResult:
    """Measurements of a step in this process, on the device.

    `gradient_sq_norms`: of the gradients at the reconstruction: without the adversarial term, and of it
    alone at a gap of 1.
    """

    losses: dict[str, torch.Tensor] = field(default_factory=dict)  # () each: sums over the images, by term
    gradient_sq_norms: torch.Tensor | None = None  # (2,), if the discriminator trains
    latent_moments: torch.Tensor | None = None  # (3, Z) sums over the images, if a term needs them

    def add(self, values: dict[str, torch.Tensor]) -> None:
        """Add the losses (b,) of a micro-batch."""
        for name, value in values.items():
            self.losses[name] = self.losses.get(name, 0) + value.sum()

    def tensors(self) -> list[torch.Tensor]:
        """All tensors; `mapped` visits them in this order."""
        others = (self.gradient_sq_norms, self.latent_moments)
        return [*self.losses.values(), *(tensor for tensor in others if tensor is not None)]

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "StepResult":
        """Return the result with each tensor changed."""
        losses = {name: change(value) for name, value in self.losses.items()}
        others = (self.gradient_sq_norms, self.latent_moments)
        return StepResult(losses, *(None if tensor is None else change(tensor) for tensor in others))


def trained_networks(networks: Networks) -> list[nn.Module]:
    """Return the networks that a step trains."""
    return [network for network in (networks.autoencoder, networks.discriminator) if network]


def unwrapped(network: nn.Module) -> nn.Module:
    """Return the network itself, without DistributedDataParallel."""
    return network.module if isinstance(network, DistributedDataParallel) else network


def clear_gradients(networks: Networks) -> None:
    """Delete the gradients of all networks."""
    for network in trained_networks(networks):
        network.zero_grad(set_to_none=True)


def network_input(images: torch.Tensor, networks: Networks, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Float images in the memory layout of the networks, and in `dtype`, by default theirs."""
    layout = torch.channels_last if networks.channels_last else torch.contiguous_format
    return images.to(dtype=dtype or networks.dtype, memory_format=layout)


def micro_batch_sizes(images: int, micro_batch: int) -> list[int]:
    """Sizes that split `images` into passes of at most `micro_batch`."""
    rest = images % micro_batch
    return [micro_batch] * (images // micro_batch) + [rest] * (rest > 0)


def compute_gradients(networks: Networks, inputs: StepInputs, sizes: list[int]) -> StepResult:
    """Add this step's gradients to .grad of all trained parameters.

    With several processes, .grad becomes the mean over them.
    The discriminator's gradients are computed before any weight changes. It gets the same detached
    reconstructions in either order, and this way a step that ran out of memory can restart.
    """
    result, recons = autoencoder_gradients(networks, inputs, sizes)
    if inputs.adversarial_factor is not None:
        discriminator_gradients(networks, inputs, recons, sizes, result)
    return result


def autoencoder_gradients(
    networks: Networks, inputs: StepInputs, sizes: list[int]
) -> tuple[StepResult, list[torch.Tensor]]:
    """Gradients of all losses of the autoencoder; returns their values and detached reconstructions."""
    result = StepResult()
    recons = []
    for index, part in enumerate(inputs.split(sizes)):
        with _pass(networks.autoencoder, is_last=index == len(sizes) - 1):
            images = to_float(part.images)
            targets = _latents_of_teacher(networks, images)
            recon, mean, logvar, *views = _forward(networks, images, part, targets)
            grad_recon, values, sq_norms = reconstruction_gradient(networks, recon.detach(), images, part)
            if sq_norms is not None:
                recons.append(recon.detach())
                result.gradient_sq_norms = _sum(result.gradient_sq_norms, sq_norms)
            view_gradients, view_values = _view_gradients(networks, views, images, part)
            values |= view_values
            roots, gradients = [recon, *views], [grad_recon, *view_gradients]
            for name, weight, value in _latent_terms(networks.terms, mean, logvar, images, inputs, targets):
                root = value.sum() * (weight * inputs.image_share) * inputs.loss_scale
                if root.requires_grad:  # false if the encoder is frozen
                    roots, gradients = [*roots, root], [*gradients, torch.ones_like(root)]
                values[name] = value.detach()
            if inputs.running_moments is not None:
                result.latent_moments = _sum(result.latent_moments, moments(mean).sum(0))
            torch.autograd.backward(roots, gradients)
        result.add(values)
        networks.progress()
    return result, recons


def _latents_of_teacher(networks: Networks, images: torch.Tensor) -> torch.Tensor | None:
    """Return the latents that the encoder learns; None without a teacher."""
    return next((term.function(network_input(images, networks)) for term in networks.terms.teacher), None)


def _forward(
    networks: Networks, images: torch.Tensor, part: StepInputs, targets: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Return the reconstruction, mean, log-variance and decoded views of a micro-batch."""
    x = network_input(images, networks)
    if targets is None and not networks.terms.view:
        return networks.autoencoder(x, part.noise)
    side = images.shape[3] // part.noise.shape[3]
    views = [partial(term.function, unit=1, side=side) for term in networks.terms.view]
    return networks.autoencoder(x, part.noise, views, targets)


def _latent_terms(
    terms: LossTerms,
    mean: torch.Tensor,
    logvar: torch.Tensor,
    images: torch.Tensor,
    inputs: StepInputs,
    targets: torch.Tensor | None,
) -> Iterator[tuple[str, float, torch.Tensor]]:
    """Name, weight and value (b,) of each term of the posterior."""
    running = inputs.running_moments
    statistics = None if running is None else statistics_of(running)
    for term in terms.latent:
        yield term.name, term.weight, term.function(mean, logvar, images[0, 0].numel(), statistics)
    for term in terms.teacher:
        assert targets is not None
        yield term.name, term.weight, (mean - targets).square().flatten(1).mean(1)


def _view_gradients(
    networks: Networks, views: list[torch.Tensor], images: torch.Tensor, part: StepInputs
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Compute the gradients of the view terms at the decoded views, and their values (b,)."""
    gradients: list[torch.Tensor] = []
    values, scale = {}, part.image_share * part.loss_scale
    side, remaining = images.shape[3] // part.noise.shape[3], iter(views)
    for term in networks.terms.view:
        targets = term.function(premultiply(images), unit=side, side=side)
        values[term.name] = images.new_zeros(len(images))
        for target in targets:
            leaf = next(remaining).detach().requires_grad_()
            total = image_terms(networks.terms, leaf, unpremultiply(target))[0] / len(targets)
            gradients += torch.autograd.grad((term.weight * total * scale).sum(), leaf)
            values[term.name] = values[term.name] + total.detach()
    return gradients, values


def reconstruction_gradient(
    networks: Networks, recon: torch.Tensor, images: torch.Tensor, inputs: StepInputs
) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor | None]:
    """Compute the gradient at the reconstruction; its graph is freed before the backward of the decoder.

    `recon` (b, C, H, W) is detached. Returns the gradient, the values (b,), and with the adversarial term the
    squared norms (2,) of the gradient without it and of its own at a gap of 1.
    """
    recon.requires_grad_()
    total, values = image_terms(networks.terms, recon, images)
    scale = inputs.image_share * inputs.loss_scale
    (grad,) = torch.autograd.grad((total * scale).sum(), recon)
    if inputs.adversarial_factor is None:
        return grad, values, None
    adversarial_grad, adversarial = adversarial_gradient(networks, recon, images, inputs)
    values["adversarial"] = adversarial
    sq_norms = torch.stack([squared_norm(grad), squared_norm_at_gap_1(adversarial_grad, adversarial)])
    return grad + (inputs.adversarial_factor * adversarial_grad).to(grad.dtype), values, sq_norms


def adversarial_gradient(
    networks: Networks, recon: torch.Tensor, images: torch.Tensor, inputs: StepInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gradient of the unweighted adversarial term at the reconstruction, and the term, (b,)."""
    assert networks.discriminator is not None
    discriminator = unwrapped(networks.discriminator)
    with torch.no_grad():
        real = discriminator(network_input(as_rgb(images), networks))
    fake = discriminator(as_rgb(recon).to(recon.dtype))  # without gradients of its parameters
    adversarial = per_image(generator_loss(real, fake), len(recon))
    scale = inputs.image_share * inputs.loss_scale
    (gradient,) = torch.autograd.grad((adversarial * scale).sum(), recon)
    return gradient, adversarial.detach()


def image_terms(
    terms: LossTerms, recon: torch.Tensor, images: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The weighted sum of the image terms, and each of them and the mean squared error, detached: (b,)."""
    count = len(images)
    recon, images = as_rgb(recon), as_rgb(images)
    with torch.no_grad():
        mse = per_image(reconstruction_loss(recon, images, "mse"), count)
    values = {term.name: per_image(term.function(recon, images), count) for term in terms.image}
    total = reduce(operator.add, [term.weight * values[term.name] for term in terms.image])
    return total, {"mse": mse} | {name: value.detach() for name, value in values.items()}


def discriminator_gradients(
    networks: Networks, inputs: StepInputs, recons: list[torch.Tensor], sizes: list[int], result: StepResult
) -> None:
    """Compute the discriminator's gradients from pairs of an image and its detached reconstruction.

    The values are added to `result`.
    """
    assert networks.discriminator is not None
    for index, (part, recon) in enumerate(zip(inputs.split(sizes), recons, strict=True)):
        with _pass(networks.discriminator, is_last=index == len(sizes) - 1):
            count = len(recon)
            images = network_input(as_rgb(to_float(part.images)), networks)
            recon = as_rgb(recon).to(recon.dtype)
            real, fake = networks.discriminator(torch.cat([images, recon])).chunk(2)
            loss = per_image(discriminator_loss(real, fake), count)  # (b,)
            terms = {"discriminator": loss, "logits_real": real, "logits_fake": fake}
            ((loss * inputs.image_share).sum() * inputs.loss_scale).backward()
        means = {
            name: value.detach().float().reshape(len(value), -1).mean(1) for name, value in terms.items()
        }
        result.add({name: per_image(value, count) for name, value in means.items()})
        networks.progress()


def _pass(network: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    """Return a context for a forward and backward pass: only the last one of a step sums over processes."""
    if isinstance(network, DistributedDataParallel) and not is_last:
        return network.no_sync()
    return nullcontext()


def _sum(total: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    return value if total is None else total + value
