"""GroupNorm (Wu & He, 2018), alone and followed by SiLU, in the dtype of its input with fp32 statistics.

Only the input and the statistics are saved: the normalised value is made again in backward.
G groups of channels; the shapes are those of vae.ops.
"""

import torch

from vae.ops.library import define_op


def group_norm(
    h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, groups: int, eps: float
) -> torch.Tensor:
    """Normalise h (B, C, H, W) over each of `groups` channel groups of each image.

    Statistics are fp32 (fp64 for fp64) whatever the dtype of h; the result has h's dtype and layout.
    """
    return _norm_op(h, weight, bias, groups, eps, False)[0]


def group_norm_silu(
    h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, groups: int, eps: float
) -> torch.Tensor:
    """SiLU of group_norm: the activation in front of every convolution of the network."""
    return _norm_op(h, weight, bias, groups, eps, True)[0]


def norm_statistics(h: torch.Tensor, groups: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and 1/sqrt(variance + eps) of each group of each image: (B, G) each, fp32 (fp64 for fp64)."""
    if h.is_meta:
        shape, dtype = (h.shape[0], groups), _wide(h)
        return h.new_empty(shape, dtype=dtype), h.new_empty(shape, dtype=dtype)
    grouped = _grouped(h.to(_wide(h)), groups)
    variance, mean = torch.var_mean(grouped, dim=(2, 3, 4), correction=0)
    return mean, (variance + eps).rsqrt()


def normalize(
    h: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    groups: int,
    silu: bool,
) -> torch.Tensor:
    """(h - mean) * rstd * weight + bias, then SiLU where asked for, in h's dtype and memory layout."""
    if h.is_meta:
        return torch.empty_like(h)
    affine = _unit(h, mean, rstd, groups) * _per_channel(weight, h) + _per_channel(bias, h)
    return (affine * affine.sigmoid() if silu else affine).to(h.dtype)


def normalize_backward(
    grad_out: torch.Tensor,
    h: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    groups: int,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of h (its dtype and layout), weight and bias (theirs, summed in fp32 at least).

    `mean` and `rstd` count as functions of h, as norm_statistics makes them.
    """
    if h.is_meta:
        return torch.empty_like(h), torch.empty_like(weight), torch.empty_like(bias)
    unit = _unit(h, mean, rstd, groups)
    grad = grad_out.to(unit.dtype)
    if silu:
        affine = unit * _per_channel(weight, h) + _per_channel(bias, h)
        gate = affine.sigmoid()
        grad = grad * gate * (1 + affine * (1 - gate))
    grad_weight = (grad * unit).sum(dim=(0, 2, 3))
    grad_bias = grad.sum(dim=(0, 2, 3))
    grad = grad * _per_channel(weight, h)
    along = _grouped(grad * unit, groups).mean(dim=(2, 3, 4), keepdim=True)
    level = _grouped(grad, groups).mean(dim=(2, 3, 4), keepdim=True)
    grad = _grouped(grad, groups) - level - _grouped(unit, groups) * along
    grad_h = torch.empty_like(h)
    grad_h.copy_((grad * rstd[:, :, None, None, None]).reshape(h.shape))
    return grad_h, grad_weight.to(weight.dtype), grad_bias.to(bias.dtype)


def _wide(h: torch.Tensor) -> torch.dtype:
    return torch.float64 if h.dtype == torch.float64 else torch.float32


def _grouped(h: torch.Tensor, groups: int) -> torch.Tensor:
    """(B, C, H, W) as (B, G, C/G, H, W)."""
    return h.unflatten(1, (groups, -1))


def _per_channel(parameter: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return parameter.to(_wide(h))[:, None, None]


def _unit(h: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, groups: int) -> torch.Tensor:
    """h with mean 0 and variance 1 in each group, in the dtype of the statistics."""
    grouped = _grouped(h.to(_wide(h)), groups)
    return ((grouped - mean[:, :, None, None, None]) * rstd[:, :, None, None, None]).flatten(1, 2)


def _norm(
    h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, groups: int, eps: float, silu: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mean, rstd = norm_statistics(h, groups, eps)
    return normalize(h, mean, rstd, weight, bias, groups, silu), mean, rstd


def _norm_backward(
    grad_out: torch.Tensor,
    h: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    groups: int,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return normalize_backward(grad_out, h, mean, rstd, weight, bias, groups, silu)


def _norm_fake(h, weight, bias, groups, eps, silu):
    statistics = [h.new_empty((h.shape[0], groups), dtype=_wide(h)) for _ in range(2)]
    return torch.empty_like(h), *statistics


def _norm_backward_fake(grad_out, h, mean, rstd, weight, bias, groups, silu):
    return torch.empty_like(h), torch.empty_like(weight), torch.empty_like(bias)


def _save_for_backward(ctx, inputs, output):
    h, weight, bias, ctx.groups, _, ctx.silu = inputs
    ctx.save_for_backward(h, output[1], output[2], weight, bias)


def _gradients(ctx, grad_out, grad_mean, grad_rstd):
    return *_norm_backward_op(grad_out, *ctx.saved_tensors, ctx.groups, ctx.silu), None, None, None


_norm_backward_op = define_op(_norm_backward, _norm_backward_fake)
_norm_op = define_op(_norm, _norm_fake, _gradients, _save_for_backward)
