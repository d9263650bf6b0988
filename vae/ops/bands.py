"""Large images in bands of rows: what convolutions take at once, and what lies at a band's edges.

Libraries of convolutions count elements in 32 bits in places, and 4096 x 4096 px of 128 channels are 2**31.
With channels last a band of one image is a dense view, so cutting copies nothing but rows of zeros at the
image's edges; and what is made for a convolution alone, an activation, is never there as a whole.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from vae.ops.layout import accumulation_dtype

WHOLE_ELEMENTS = 2**30  # up to here a tensor is taken whole: half of what 32 bits with a sign count
# 256 MiB in bf16: hundreds of rows, so that the rows read twice are few; a share of memory that is small
# beside the tensor it is cut from. Its speed is not measured yet.
BAND_ELEMENTS = 2**27

Activation = Callable[[torch.Tensor, slice], torch.Tensor]  # (rows of some images, which images) to the same


class Band(NamedTuple):
    """Rows `first` up to `last` of some images."""

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
        """The band in t (B, C, H, W), or activation of it, with rows more `above` and `below`.

        t has `scale` rows for one of the band's. Rows beyond the edges of t are zero, after the activation.
        """
        first, last = self.first * scale - above, self.last * scale + below
        rows = t[self.images, :, max(first, 0) : min(last, t.shape[2])]
        if activation is not None:
            rows = activation(rows, self.images)
        missing = (max(-first, 0), max(last - t.shape[2], 0))
        return F.pad(rows, (0, 0, *missing)) if any(missing) else rows


def bands(batch: int, rows: int, *tensors: torch.Size | tuple[int, ...]) -> list[Band]:
    """Bands of the `rows` of each image, for an operation over tensors of these shapes; [] if taken whole."""
    elements = max(map(_elements, tensors))
    if elements <= WHOLE_ELEMENTS:
        return []
    step = max(1, BAND_ELEMENTS * batch * rows // elements)
    return [
        Band(slice(image, image + 1), first, min(first + step, rows))
        for image in range(batch)
        for first in range(0, rows, step)
    ]


def parameter_sums(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros for the gradients of weight and bias that bands add to, fp32 at least."""
    wide = accumulation_dtype(weight)
    return torch.zeros_like(weight, dtype=wide), weight.new_zeros(len(weight), dtype=wide)


def add_to(sums: Iterable[torch.Tensor], grads: Iterable[torch.Tensor]) -> None:
    """Add a band's gradients to the sums, one to one."""
    for total, grad in zip(sums, grads, strict=True):
        total += grad


def _elements(shape: torch.Size | tuple[int, ...]) -> int:
    batch, channels, height, width = shape
    return batch * channels * height * width
