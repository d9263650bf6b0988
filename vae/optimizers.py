"""The optimizers: AdamW, and Muon for the hidden weights of the autoencoder with AdamW for all others.

Shapes: n matrices with r rows and c >= r columns.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from vae.config.options import LossConfig, OptimConfig

Pair = tuple[torch.Tensor, torch.Tensor]  # a weight and its gradient as matrices

ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")
# Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon): momentum, steps, coefficients, least norm.
MOMENTUM = 0.95
STEPS = 5
A, B, C = 3.4445, -4.7750, 2.0315
SMALLEST_NORM = 1e-7
# Root mean square of an update at learning rate 1: that of AdamW, so that both take the same rate (Liu et al.
# 2025, Muon is Scalable for LLM Training, https://arxiv.org/abs/2502.16982, equation 4).
UPDATE_RMS = 0.2
ADAMW_EPS = 1e-8
DISC_BETA1 = 0.5  # of the discriminator, whose task changes with every step: pix2pix, VQGAN
# The last norm and convolution of encoder and decoder. Their inputs have a large mean at the warm start, so
# equal changes of their weights, such as Adam's first ones, add up to a constant color: benchmarks/LOG.md.
ENDS = {"conv_norm_out", "conv_out"}
WARM_ENDS_SHARE = 0.1  # of the learning rate, in a run from the warm start
BATCH_ELEMENTS = 2**25  # 128 MiB of fp32 gradients are orthogonalized at a time: it bounds the scratch memory


@dataclass(frozen=True)
class Optimizers:
    """The optimizers of a run."""

    autoencoder: torch.optim.Optimizer
    discriminator: torch.optim.Optimizer | None

    @property
    def all(self) -> list[torch.optim.Optimizer]:
        """Every optimizer, the autoencoder's first."""
        return [self.autoencoder, self.discriminator] if self.discriminator else [self.autoencoder]


def build_optimizers(
    autoencoder: nn.Module, discriminator: nn.Module | None, optim: OptimConfig, loss: LossConfig
) -> Optimizers:
    """Build --optimizer for the autoencoder, and AdamW for the discriminator if there is one."""
    betas = (optim.beta1, optim.beta2)
    weight_decay = optim.weight_decay
    rate = optim.learning_rate or 0.0  # training sets the rate of each step

    def adamw_of(
        groups: list[list[nn.Parameter]], learning_rate: float, betas: tuple[float, float]
    ) -> torch.optim.Optimizer:
        params = [{"params": group} for group in groups]
        return torch.optim.AdamW(params, learning_rate, betas, weight_decay=weight_decay, fused=True)

    others, ends, *hidden = parameter_groups(autoencoder, optim.optimizer)
    of_autoencoder: torch.optim.Optimizer
    if hidden:
        of_autoencoder = Muon(others, ends, hidden[0], rate, betas, weight_decay)
    else:
        of_autoencoder = adamw_of([others, ends], rate, betas)
    if discriminator is None:
        return Optimizers(of_autoencoder, None)
    parameters = [list(discriminator.parameters())]
    of_discriminator = adamw_of(parameters, loss.disc_learning_rate, (DISC_BETA1, optim.beta2))
    return Optimizers(of_autoencoder, of_discriminator)


def parameter_groups(autoencoder: nn.Module, optimizer: str) -> list[list[nn.Parameter]]:
    """The trained parameters: all others, the ENDS, and for "muon" the hidden weights.

    Hidden are those between the first and the last layer of encoder and decoder, which read and write images
    and latents: Jordan et al. leave these to AdamW.
    """
    matrices = [name for name, parameter in autoencoder.named_parameters() if parameter.ndim >= 2]
    parts = [[n for n in matrices if n.startswith(part)] for part in ("encoder.", "decoder.")]
    between = {name for part in parts for name in part[1:-1]}
    others: list[nn.Parameter] = []
    ends: list[nn.Parameter] = []
    hidden: list[nn.Parameter] = []
    for name, parameter in autoencoder.named_parameters():
        layers = name.split(".")
        if not ENDS.isdisjoint(layers):
            group = ends
        else:
            group = hidden if optimizer == "muon" and name in between else others
        if parameter.requires_grad:
            group.append(parameter)
    return [others, ends, hidden] if optimizer == "muon" else [others, ends]


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float, ends_share: float = 1.0) -> None:
    """Set the rate of all groups; that of the second one, the ENDS, is multiplied by `ends_share`."""
    for index, group in enumerate(optimizer.param_groups):
        group["lr"] = rate * (ends_share if index == 1 else 1.0)


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for the parameters `hidden`, AdamW for all others; all are in fp32.

    torch.optim.Muon takes matrices only, one at a time, in bf16, and does not read `found_inf`. As in fused
    optimizers, a `found_inf` of 1 on the device is a step that changes nothing. It changes gradients.
    """

    def __init__(
        self,
        others: list[nn.Parameter],
        ends: list[nn.Parameter],
        hidden: list[nn.Parameter],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        of_adamw = {"betas": betas, "fused": True}  # load_state_dict reads `fused`
        groups: list[dict[str, Any]] = [{"params": others, **of_adamw}, {"params": ends, **of_adamw}]
        groups.append({"params": hidden})
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self.found_inf: torch.Tensor | None = None  # (), 0 or 1

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        *of_adamw, hidden = self.param_groups
        for group in of_adamw:
            self._update_others(group)
        weights = [parameter for parameter in hidden["params"] if parameter.grad is not None]
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        momenta = [self.state[weight]["momentum_buffer"] for weight in weights]
        muon_update(weights, momenta, hidden["lr"], hidden["weight_decay"], self.found_inf)

    def _update_others(self, group: dict[str, Any]) -> None:
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in trained:
            if not self.state[parameter]:
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                moments = (torch.zeros_like(parameter) for _ in range(2))
                self.state[parameter] = dict(zip(ADAMW_STATE, (step, *moments), strict=True))
        steps, means, squares = ([self.state[p][name] for p in trained] for name in ADAMW_STATE)
        adamw(
            trained,
            [parameter.grad for parameter in trained],
            means,
            squares,
            [],
            steps,
            fused=True,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=ADAMW_EPS,
            maximize=False,
        )


@torch.no_grad()
def muon_update(
    weights: list[nn.Parameter],
    momenta: list[torch.Tensor],
    learning_rate: float,
    weight_decay: float,
    found_inf: torch.Tensor | None = None,
) -> None:
    """A step of Muon with the gradients of `weights`, which it changes; convolutions are (out, in*kh*kw)."""
    gradients: list[torch.Tensor] = [weight.grad for weight in weights if weight.grad is not None]
    kept = weights[0].new_ones(()) if found_inf is None else 1 - found_inf
    bits = [gradient.view(torch.int32) for gradient in gradients]
    torch._foreach_mul_(bits, kept.int())  # as integers, because 0 * NaN is NaN
    torch._foreach_mul_(momenta, 1 - (1 - MOMENTUM) * kept)
    torch._foreach_add_(momenta, gradients, alpha=1 - MOMENTUM)
    torch._foreach_lerp_(gradients, momenta, MOMENTUM)  # Nesterov
    torch._foreach_mul_(list(weights), 1 - (learning_rate * weight_decay) * kept)
    pairs = [
        (_matrix(weight, weight), _matrix(gradient, weight))
        for weight, gradient in zip(weights, gradients, strict=True)
    ]
    with _no_tf32():
        for batch in _batches(pairs):
            stacks = [torch.stack([gradient for _, gradient in same_shape]) for same_shape in batch]
            for same_shape, update in zip(batch, _orthogonalized(stacks, kept), strict=True):
                rate = learning_rate * UPDATE_RMS * math.sqrt(update.shape[2])
                torch._foreach_add_([weight for weight, _ in same_shape], list(update.unbind()), alpha=-rate)


def _matrix(tensor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`tensor` as a matrix (r, c), without a copy if it has the layout of `weight`, to which it belongs."""
    if weight.ndim == 4 and not weight.is_contiguous():  # channels_last: the order of columns is arbitrary
        tensor = tensor.permute(0, 2, 3, 1)
    matrix = tensor.reshape(len(tensor), -1)
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T


def _batches(pairs: list[Pair]) -> Iterator[list[list[Pair]]]:
    """Pairs of matrices with the same r, up to BATCH_ELEMENTS if one is not larger, in lists of equal c."""
    batch: list[Pair] = []
    for pair in sorted(pairs, key=lambda pair: tuple(pair[1].shape)):
        size = sum(gradient.numel() for _, gradient in batch) + pair[1].numel()
        if batch and (len(pair[1]) != len(batch[0][1]) or size > BATCH_ELEMENTS):
            yield _equal_shapes(batch)
            batch = []
        batch.append(pair)
    yield _equal_shapes(batch)


def _equal_shapes(batch: list[Pair]) -> list[list[Pair]]:
    return [list(pairs) for _, pairs in groupby(batch, key=lambda pair: pair[1].shape)]


def _orthogonalized(stacks: list[torch.Tensor], factor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Each stack (n, r, c) with the singular values of its matrices moved close to 1, times `factor` ().

    All steps X <- (A + B G + C G^2) X with G = XX' (Newton-Schulz) are one polynomial in the first G: r x r
    products for all stacks at once, 0.4 times the operations if c = 9 r. Rounding errors of G grow by A^2 per
    step, so it needs fp32: in bf16, it would diverge.
    """
    gram = torch.cat([stack @ stack.mT for stack in stacks])  # (n, r, r), n of all stacks
    norm = gram.diagonal(dim1=1, dim2=2).sum(1).sqrt().clamp(min=SMALLEST_NORM)[:, None, None]
    gram /= norm * norm
    product = polynomial = _polynomial(gram)
    for _ in range(STEPS - 1):
        gram = polynomial @ gram @ polynomial
        polynomial = _polynomial(gram)
        product = polynomial @ product
    del gram, polynomial
    product = product * (factor / norm)
    for part, stack in zip(product.split([len(stack) for stack in stacks]), stacks, strict=True):
        yield part @ stack


def _polynomial(gram: torch.Tensor) -> torch.Tensor:
    polynomial = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
    polynomial.diagonal(dim1=1, dim2=2).add_(A)
    return polynomial


@contextmanager
def _no_tf32() -> Iterator[None]:
    """Matrix products in full fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
