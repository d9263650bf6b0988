"""Simulate a device that runs out of memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vae.model.autoencoder import AutoencoderKL


def run_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
    fails: Callable[[AutoencoderKL, list[int]], bool],
    message: str | None = None,
) -> list[int]:
    """Training passes of the autoencoder raise OutOfMemoryError if `fails(autoencoder, sizes)`.

    With a `message`, they raise a RuntimeError, as libraries other than PyTorch's allocator do.

    Returns `sizes`, the number of images of each training pass, the current one included.
    """
    forward = AutoencoderKL.forward
    sizes: list[int] = []

    def limited(self: AutoencoderKL, images: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
        if torch.is_grad_enabled() and images.device.type == "cpu":  # the memory plan runs on the meta device
            sizes.append(len(images))
            if fails(self, sizes):
                raise RuntimeError(message) if message else torch.OutOfMemoryError("injected")
        return forward(self, images, *others)

    monkeypatch.setattr(AutoencoderKL, "forward", limited)
    return sizes
