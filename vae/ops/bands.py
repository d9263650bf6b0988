"""Large images in bands of rows: how a convolution's input is cut, with padding rows at each band's edges.

Convolution libraries count elements in 32 bits in places, and 4096 x 4096 px of 128 channels are 2**31
elements. In channels_last layout a band of one image is a dense view, so cutting copies only the zero rows
at the image's edges. An activation that only a convolution needs never exists for the whole image.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from vae.ops.library import accumulation_dtype

WHOLE_ELEMENTS = 2**30  # larger tensors are cut: half of what a signed 32-bit integer counts
# 256 MiB in bf16. A band has hundreds of rows, so few rows are read twice, and it is small beside the tensor
# it is cut from. Its speed is not measured yet.
BAND_ELEMENTS = 2**27

# Takes rows of some images and the slice of these images; returns a tensor of the same shape.
Activation = Callable[[torch.Tensor, slice], torch.Tensor]


class Band(NamedTuple):
    """Rows from `first` up to, not including, `last` of some images."""

    images: slice
    first: int
    last: int

    def of(
        self,
        t: torch.Tensor,
        above: int = 0,
        below: int = 0,
        scale: int = 1,
        activation: Activation | None = None,
    ) -> torch.Tensor:
        """The band of t (B, C, H, W) after `activation`, with `above` and `below` padding rows.

        t has `scale` rows for each row of the band. Rows beyond the edges of t are zero after the activation.
        """
        first, last = self.first * scale - above, self.last * scale + below
        rows = t[self.images, :, max(first, 0) : min(last, t.shape[2])]
        if activation is not None:
            rows = activation(rows, self.images)
        missing = (max(-first, 0), max(last - t.shape[2], 0))
        return F.pad(rows, (0, 0, *missing)) if any(missing) else rows


def bands(batch: int, rows: int, *shapes: torch.Size | tuple[int, ...]) -> list[Band]:
    """Bands of the `rows` of each image, for an operation on tensors of these shapes; [] if none is large."""
    elements = max(map(_elements, shapes))
    if elements <= WHOLE_ELEMENTS:
        return []
    step = max(1, BAND_ELEMENTS * batch * rows // elements)
    return [
        Band(slice(image, image + 1), first, min(first + step, rows))
        for image in range(batch)
        for first in range(0, rows, step)
    ]


def write(target: torch.Tensor, values: torch.Tensor, accumulate: bool) -> torch.Tensor:
    """Copy the values into the target, or add them to it; return the target."""
    return target.add_(values) if accumulate else target.copy_(values)


def parameter_sums(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros, in at least fp32, to which bands add the gradients of weight and bias."""
    dtype = accumulation_dtype(weight)
    return torch.zeros_like(weight, dtype=dtype), weight.new_zeros(len(weight), dtype=dtype)


def add_to(sums: Iterable[torch.Tensor], grads: Iterable[torch.Tensor]) -> None:
    """Add each gradient of a band to its sum."""
    for total, grad in zip(sums, grads, strict=True):
        total += grad


def _elements(shape: torch.Size | tuple[int, ...]) -> int:
    batch, channels, height, width = shape
    return batch * channels * height * width
