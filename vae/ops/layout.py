"""What results take from the tensors they are made from: layout, device, a dtype."""

import torch


def layout_of(h: torch.Tensor) -> torch.memory_format:
    """channels_last or contiguous_format: that of h (B, C, H, W), contiguous where it is both."""
    return torch.contiguous_format if h.is_contiguous() else torch.channels_last


def empty_in_layout_of(shape: tuple[int, ...], h: torch.Tensor) -> torch.Tensor:
    """An empty tensor of `shape` in the dtype, on the device and in the layout of h."""
    return torch.empty(shape, dtype=h.dtype, device=h.device, memory_format=layout_of(h))


def accumulation_dtype(h: torch.Tensor) -> torch.dtype:
    """fp32, fp64 for fp64: what statistics and sums are taken in."""
    return torch.promote_types(h.dtype, torch.float32)
