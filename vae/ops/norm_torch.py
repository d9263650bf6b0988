"""GroupNorm(+SiLU) from PyTorch operations, in pieces small enough for a processor's cache.

Used on the CPU in every layout, and on GPUs if the Triton kernels do not apply. Each piece is converted to
the dtype of the statistics, so the result is the only allocation of full size. Coefficients are folded per
channel: out = h * scale + shift. All pieces are converted into the same buffer: on a CPU the pages of new
tensors cost as much as the arithmetic (forward of 128 channels at 256 px, bf16: 11.3 ms instead of 7.1).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vae.ops.library import accumulation_dtype

# Elements of a piece. CPU, per thread: 2 MiB in fp32; measured on one core of an AMD EPYC with AVX-512 (L2 of
# 1 MiB), channels last, bf16, 128 channels at 256 px, ms forward and backward: 2**17 8.4 and 24, 2**18 7.1
# and 20, 2**19 6.4 and 17.7, 2**21 6.1 and 18.9. GPU: 64 MiB in fp32, enough to fill it at every launch.
CPU_PIECE_ELEMENTS = 2**19
GPU_PIECE_ELEMENTS = 2**24


class Piece(NamedTuple):
    """Some pixels of some channels of one image: (R, C) with R pixels if channels are last, else (C', R)."""

    image: int
    channels: slice
    views: list[Tensor]  # the same piece of each tensor
    pixel_dim: int

    def coefficients(self, values: Tensor) -> Tensor:
        """The part of `values` (B, C) for this piece, shaped to broadcast over its pixels."""
        return values[self.image, self.channels].unsqueeze(self.pixel_dim)

    def converted(self, index: int, buffer: Tensor) -> Tensor:
        """views[index] in the dtype of `buffer`, read-only: the view itself, or a copy in the buffer."""
        view = self.views[index]
        return view if view.dtype == buffer.dtype else self.view_of(buffer).copy_(view)

    def view_of(self, buffer: Tensor) -> Tensor:
        """The start of `buffer`, in the shape of this piece."""
        return buffer[: self.views[0].numel()].view(self.views[0].shape)

    def affine(self, values: Tensor, scale: Tensor, shift: Tensor, buffer: Tensor) -> Tensor:
        """values * scale + shift, written to `buffer`; `values` may be in the buffer too."""
        scale, shift, out = self.coefficients(scale), self.coefficients(shift), self.view_of(buffer)
        if self.pixel_dim == 0:
            return torch.addcmul(shift, values, scale, out=out)
        return torch.mul(values, scale, out=out).add_(shift)  # addcmul is slow with factors constant in a row


def pieces(*tensors: Tensor) -> Iterator[Piece]:
    """All pieces of `tensors` (B, C, H, W), which have the first one's layout; their views may be written."""
    h, size = tensors[0], _piece_elements(tensors[0])
    batch, channels, pixels = h.shape[0], h.shape[1], h.shape[2] * h.shape[3]
    if h.is_contiguous():
        per_piece = max(1, size // pixels)
        for image in range(batch):
            flat = [t[image].view(channels, pixels) for t in tensors]
            for first in range(0, channels, per_piece):
                some = slice(first, min(first + per_piece, channels))
                for start in range(0, pixels, size):
                    yield Piece(image, some, [t[some, start : start + size] for t in flat], 1)
        return
    per_piece = max(1, size // channels)
    for image in range(batch):
        flat = [t[image].permute(1, 2, 0).view(pixels, channels) for t in tensors]
        for start in range(0, pixels, per_piece):
            yield Piece(image, slice(0, channels), [t[start : start + per_piece] for t in flat], 0)


def _piece_elements(h: Tensor) -> int:
    """The most elements of a piece of h (B, C, H, W): at least one pixel with all its channels."""
    size = CPU_PIECE_ELEMENTS * torch.get_num_threads() if h.device.type == "cpu" else GPU_PIECE_ELEMENTS
    return max(size, h.shape[1])


def _buffers(h: Tensor, count: int) -> list[Tensor]:
    """`count` buffers for a piece of h in the dtype of its statistics."""
    elements = min(_piece_elements(h), h[0].numel())
    return [h.new_empty(elements, dtype=accumulation_dtype(h)) for _ in range(count)]


def norm_statistics(h: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Implements vae.ops.norm.norm_statistics.

    Deviations of each piece are taken from its own mean. Means and squared deviations are then merged (Chan,
    Golub and LeVeque, 1983).
    """
    batch, channels, pixels = h.shape[0], h.shape[1], h.shape[2] * h.shape[3]
    moments: dict[tuple[int, int], list[tuple[int, Tensor, Tensor]]] = {}
    (buffer,) = _buffers(h, 1)
    for piece in pieces(h):
        values = piece.converted(0, buffer)
        mean = values.mean(piece.pixel_dim, keepdim=True)
        squares = torch.sub(values, mean, out=piece.view_of(buffer)).square_().sum(piece.pixel_dim)
        key = (piece.image, piece.channels.start)
        count = values.shape[piece.pixel_dim]
        moments.setdefault(key, []).append((count, mean.squeeze(piece.pixel_dim), squares))
    means, squares = h.new_empty(2, batch, channels, dtype=torch.float64)
    for (image, first), parts in moments.items():
        counts = torch.tensor([count for count, _, _ in parts], dtype=torch.float64, device=h.device)[:, None]
        each = torch.stack([mean for _, mean, _ in parts]).double()  # (pieces, C')
        mean = (each * counts).sum(0) / pixels
        some = slice(first, first + len(mean))
        means[image, some] = mean
        squares[image, some] = torch.stack([square for _, _, square in parts]).double().sum(0)
        squares[image, some] += ((each - mean).square() * counts).sum(0)
    means, squares = means.view(batch, groups, -1), squares.view(batch, groups, -1)
    mean = means.mean(-1, keepdim=True)
    variance = squares.mean(-1) / pixels + (means - mean).square().mean(-1)
    dtype = accumulation_dtype(h)
    return mean.squeeze(-1).to(dtype), (variance + eps).rsqrt().to(dtype)


def normalize(h: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, silu: bool) -> Tensor:
    """Implements vae.ops.norm.normalize."""
    out = torch.empty_like(h)
    scale, shift = _affine(mean, rstd, weight, bias)
    (buffer,) = _buffers(h, 1)
    for piece in pieces(h, out):
        values = piece.affine(piece.converted(0, buffer), scale, shift, buffer)
        piece.views[1].copy_(F.silu(values, inplace=True) if silu else values)
    return out


def normalize_backward(
    grad_out: Tensor,
    h: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    silu: bool,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Implements vae.ops.norm.normalize_backward; grad_out has h's layout."""
    if _native_backward_is_faster(h):
        return _native_backward(grad_out, h, mean, rstd, weight, bias, silu, in_place)
    batch, channels = h.shape[:2]
    grad_h = grad_out if in_place else torch.empty_like(h)  # each piece is read before it is written
    sums = h.new_zeros(2, batch, channels, dtype=torch.float64)  # of grad * unit and of grad
    buffers = _buffers(h, 3 if silu else 2)
    rstds, shift = _per_channel(rstd, channels), _per_channel(-mean * rstd, channels)
    weights, biases = (p.to(mean.dtype).expand(batch, channels) for p in (weight, bias))
    for piece in pieces(h, grad_out, grad_h):
        unit = piece.affine(piece.converted(0, buffers[0]), rstds, shift, buffers[0])
        grad = piece.converted(1, buffers[1])  # of the output; without SiLU also of unit * weight + bias
        if silu:
            affine = piece.affine(unit, weights, biases, buffers[2])
            grad = _silu_backward(grad, affine, piece.view_of(buffers[1]))
            piece.views[2].copy_(grad)  # in h's dtype, as autograd would pass it on
        sums[1, piece.image, piece.channels] += grad.sum(piece.pixel_dim)
        sums[0, piece.image, piece.channels] += unit.mul_(grad).sum(piece.pixel_dim)
    grouped = (sums * weight).view(2, batch, mean.shape[1], -1)
    grad_unit_mean, grad_mean = (grouped.sum(-1) / (h[0].numel() // mean.shape[1])).to(mean.dtype)  # (B, G)
    # grad_h = (grad * weight - grad_mean - unit * grad_unit_mean) * rstd, with unit = (h - mean) * rstd
    gain = rstds * weight
    slope = _per_channel(-grad_unit_mean * rstd.square(), channels)
    offset = _per_channel((grad_unit_mean * mean * rstd - grad_mean) * rstd, channels)
    for piece in pieces(h, grad_h if silu else grad_out, grad_h):
        values = piece.affine(piece.converted(0, buffers[0]), slope, offset, buffers[0])
        grad = piece.converted(1, buffers[1])
        values += torch.mul(grad, piece.coefficients(gain), out=piece.view_of(buffers[1]))
        piece.views[2].copy_(values)
    return grad_h, sums[0].sum(0), sums[1].sum(0)


def _native_backward_is_faster(h: Tensor) -> bool:
    """Whether PyTorch's kernel is faster than two rounds of pieces, by layout and size, on a CPU.

    Measured on one core of an AMD EPYC with AVX-512, in ms: pieces alone, this whole backward, and the kernel
    within it. Contiguous, bf16: 512 channels at 64 px 6.9, 3.8 and 2.8; 128 at 128 px 6.0, 3.5 and 2.8.
    Channels last, bf16: 512 at 32 px 2.6, 1.9 and 0.7. In channels_last layout the kernel is slow for more
    than 1,024 pixels: 128 at 128 px take 5.6 in pieces and 17 in the kernel alone.
    """
    return h.device.type == "cpu" and (h.is_contiguous() or h.shape[2] * h.shape[3] <= 1024)


def _native_backward(
    grad_out: Tensor,
    h: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    silu: bool,
    in_place: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """normalize_backward with PyTorch's kernel; SiLU's gradient is computed in pieces first."""
    grad = grad_out
    if silu:
        grad = grad_out if in_place else torch.empty_like(h)
        scale, shift = _affine(mean, rstd, weight, bias)
        buffers = _buffers(h, 2)
        for piece in pieces(h, grad_out, grad):
            affine = piece.affine(piece.converted(0, buffers[0]), scale, shift, buffers[0])
            piece_grad = piece.converted(1, buffers[1])
            piece.views[2].copy_(_silu_backward(piece_grad, affine, piece.view_of(buffers[1])))
    (batch, channels), pixels = h.shape[:2], h.shape[2] * h.shape[3]
    grad_h, *sums = torch.ops.aten.native_group_norm_backward(
        grad, h, mean, rstd, weight.to(mean.dtype), batch, channels, pixels, mean.shape[1], (True, True, True)
    )
    return (grad_out.copy_(grad_h) if in_place else grad_h), *sums


def _silu_backward(grad: Tensor, h: Tensor, out: Tensor) -> Tensor:
    """Gradient of SiLU's argument h from that of its result, written to `out`, which may be `grad`."""
    return torch.ops.aten.silu_backward.grad_input(grad, h, grad_input=out)


def _affine(mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """scale and shift (B, C) with (h - mean) * rstd * weight + bias = h * scale + shift."""
    scale = _per_channel(rstd, len(weight)) * weight
    return scale, bias - _per_channel(mean, len(weight)) * scale


def _per_channel(per_group: Tensor, channels: int) -> Tensor:
    """(B, G) repeated to (B, C)."""
    return per_group.repeat_interleave(channels // per_group.shape[1], dim=1)
