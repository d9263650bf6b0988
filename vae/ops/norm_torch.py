"""GroupNorm(+SiLU) from stock PyTorch operations, in pieces small enough for a processor's cache.

Serves the CPU in every layout, and any GPU where the Triton kernels do not apply. A piece is converted to
the dtype of the statistics, so nothing of full size is allocated but the result. Coefficients are folded
per channel: out = h * scale + shift. All pieces are converted into the same scratch: on a CPU the pages of
new tensors cost as much as the arithmetic (forward of 128 channels at 256 px, bf16, 11.3 ms and not 7.1).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from vae.ops.layout import accumulation_dtype

# Elements of a piece. CPU, per thread: 2 MiB in fp32; measured on one core of an AMD EPYC with AVX-512 (L2 of
# 1 MiB), channels last, bf16, 128 channels at 256 px, ms forward and backward: 2**17 8.4 and 24, 2**18 7.1
# and 20, 2**19 6.4 and 17.7, 2**21 6.1 and 18.9. GPU: 64 MiB in fp32, enough to fill it at every launch.
CPU_PIECE_ELEMENTS = 2**19
GPU_PIECE_ELEMENTS = 2**24


class Piece(NamedTuple):
    """Some pixels of some channels of one image: rows of pixels (R, C) if channels are last, else (C', R)."""

    image: int
    channels: slice
    views: list[torch.Tensor]  # the same piece of each tensor
    pixel_dim: int

    def coefficients(self, values: torch.Tensor) -> torch.Tensor:
        """`values` (B, C) of this piece, shaped to broadcast over its pixels."""
        return values[self.image, self.channels].unsqueeze(self.pixel_dim)

    def wide(self, which: int, room: torch.Tensor) -> torch.Tensor:
        """views[which] in the dtype of `room`, to be read: itself, or copied there."""
        view = self.views[which]
        return view if view.dtype == room.dtype else self.part(room).copy_(view)

    def part(self, room: torch.Tensor) -> torch.Tensor:
        """As many elements of `room` as the piece has, in its shape."""
        return room[: self.views[0].numel()].view(self.views[0].shape)

    def affine(
        self, values: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, room: torch.Tensor
    ) -> torch.Tensor:
        """values * scale + shift, in `room`, where `values` may lie as well."""
        scale, shift, out = self.coefficients(scale), self.coefficients(shift), self.part(room)
        if self.pixel_dim == 0:
            return torch.addcmul(shift, values, scale, out=out)
        return torch.mul(values, scale, out=out).add_(shift)  # addcmul is slow with factors constant in a row


def pieces(*tensors: torch.Tensor) -> Iterator[Piece]:
    """All of `tensors` (B, C, H, W) in the first one's layout, piece by piece; results may be written to."""
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


def _piece_elements(h: torch.Tensor) -> int:
    """The most elements of a piece of h (B, C, H, W); never less than a pixel or a row of a channel has."""
    size = CPU_PIECE_ELEMENTS * torch.get_num_threads() if h.device.type == "cpu" else GPU_PIECE_ELEMENTS
    return max(size, h.shape[1])


def _scratch(h: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Room for `count` pieces of h in the dtype of its statistics."""
    elements = min(_piece_elements(h), h[0].numel())
    return [h.new_empty(elements, dtype=accumulation_dtype(h)) for _ in range(count)]


def statistics(h: torch.Tensor, groups: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and 1/sqrt(variance + eps), (B, G) each: deviations of each piece from its own mean, then merged.

    The merging of means and squared deviations is Chan, Golub and LeVeque's (1983).
    """
    wide = accumulation_dtype(h)
    batch, channels, pixels = h.shape[0], h.shape[1], h.shape[2] * h.shape[3]
    found: dict[tuple[int, int], list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
    (room,) = _scratch(h, 1)
    for piece in pieces(h):
        values = piece.wide(0, room)
        mean = values.mean(piece.pixel_dim, keepdim=True)
        squares = torch.sub(values, mean, out=piece.part(room)).square_().sum(piece.pixel_dim)
        key = (piece.image, piece.channels.start)
        count = values.shape[piece.pixel_dim]
        found.setdefault(key, []).append((count, mean.squeeze(piece.pixel_dim), squares))
    means, squares = h.new_empty(2, batch, channels, dtype=torch.float64)
    for (image, first), parts in found.items():
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
    return mean.squeeze(-1).to(wide), (variance + eps).rsqrt().to(wide)


def forward(
    h: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    silu: bool,
) -> torch.Tensor:
    """What vae.ops.norm.normalize computes."""
    out = torch.empty_like(h)
    scale, shift = _affine(mean, rstd, weight, bias)
    (room,) = _scratch(h, 1)
    for piece in pieces(h, out):
        values = piece.affine(piece.wide(0, room), scale, shift, room)
        piece.views[1].copy_(F.silu(values, inplace=True) if silu else values)
    return out


def backward(
    grad_out: torch.Tensor,
    h: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    silu: bool,
    in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What vae.ops.norm.normalize_backward computes; grad_out has h's layout."""
    if _native_backward_is_faster(h):
        return _native_backward(grad_out, h, mean, rstd, weight, bias, silu, in_place)
    batch, channels = h.shape[:2]
    grad_h = grad_out if in_place else torch.empty_like(h)  # each piece is read before it is written
    sums = h.new_zeros(2, batch, channels, dtype=torch.float64)  # of grad * unit, of grad
    rooms = _scratch(h, 3 if silu else 2)
    rstds, shift = _spread(rstd, channels), _spread(-mean * rstd, channels)
    weights, biases = (p.to(mean.dtype).expand(batch, channels) for p in (weight, bias))
    for piece in pieces(h, grad_out, grad_h):
        unit = piece.affine(piece.wide(0, rooms[0]), rstds, shift, rooms[0])
        grad = piece.wide(1, rooms[1])  # with respect to unit * weight + bias, once SiLU is behind it
        if silu:
            affine = piece.affine(unit, weights, biases, rooms[2])
            grad = _silu_backward(grad, affine, piece.part(rooms[1]))
            piece.views[2].copy_(grad)  # in h's dtype, as autograd would hand it on
        sums[1, piece.image, piece.channels] += grad.sum(piece.pixel_dim)
        sums[0, piece.image, piece.channels] += unit.mul_(grad).sum(piece.pixel_dim)
    grouped = (sums * weight).view(2, batch, mean.shape[1], -1)
    along, level = (grouped.sum(-1) / (h[0].numel() // mean.shape[1])).to(mean.dtype)  # (B, G) each
    # grad_h = (grad * weight - level - unit * along) * rstd, with unit = (h - mean) * rstd
    gain = rstds * weight
    slope = _spread(-along * rstd.square(), channels)
    offset = _spread((along * mean * rstd - level) * rstd, channels)
    for piece in pieces(h, grad_h if silu else grad_out, grad_h):
        values = piece.affine(piece.wide(0, rooms[0]), slope, offset, rooms[0])
        values += torch.mul(piece.wide(1, rooms[1]), piece.coefficients(gain), out=piece.part(rooms[1]))
        piece.views[2].copy_(values)
    return grad_h, sums[0].sum(0), sums[1].sum(0)


def _native_backward_is_faster(h: torch.Tensor) -> bool:
    """Whether PyTorch's kernel beats two rounds of pieces, by layout and size, on a CPU.

    Measured on one core of an AMD EPYC with AVX-512, ms of pieces before, of this whole backward and of the
    kernel in it: pixels last, bf16, 512 channels at 64 px 6.9, 3.8 and 2.8, 128 at 128 px 6.0, 3.5 and 2.8;
    channels last, bf16, 512 at 32 px 2.6, 1.9 and 0.7. Channels last, the kernel's way for more than 1,024
    pixels is slow: 128 at 128 px 5.6 in pieces, 17 the kernel alone.
    """
    return h.device.type == "cpu" and (h.is_contiguous() or h.shape[2] * h.shape[3] <= 1024)


def _native_backward(grad_out, h, mean, rstd, weight, bias, silu, in_place):
    """backward by one kernel; the gradient behind SiLU is made in pieces first."""
    grad = grad_out
    if silu:
        grad = grad_out if in_place else torch.empty_like(h)
        scale, shift = _affine(mean, rstd, weight, bias)
        rooms = _scratch(h, 2)
        for piece in pieces(h, grad_out, grad):
            affine = piece.affine(piece.wide(0, rooms[0]), scale, shift, rooms[0])
            piece.views[2].copy_(_silu_backward(piece.wide(1, rooms[1]), affine, piece.part(rooms[1])))
    (batch, channels), pixels = h.shape[:2], h.shape[2] * h.shape[3]
    found, *sums = torch.ops.aten.native_group_norm_backward(
        grad, h, mean, rstd, weight.to(mean.dtype), batch, channels, pixels, mean.shape[1], (True, True, True)
    )
    return (grad_out.copy_(found) if in_place else found), *sums


def _silu_backward(grad: torch.Tensor, h: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Gradient of SiLU's argument h from that of its result, in `into`, where `grad` may lie as well."""
    return torch.ops.aten.silu_backward.grad_input(grad, h, grad_input=into)


def _affine(mean, rstd, weight, bias):
    """scale and shift (B, C) with (h - mean) * rstd * weight + bias = h * scale + shift."""
    scale = _spread(rstd, len(weight)) * weight
    return scale, bias - _spread(mean, len(weight)) * scale


def _spread(per_group: torch.Tensor, channels: int) -> torch.Tensor:
    """(B, G) as (B, C)."""
    return per_group.repeat_interleave(channels // per_group.shape[1], dim=1)
