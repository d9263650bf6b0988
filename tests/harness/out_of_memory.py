"""Simulate a device that runs out of memory."""

from collections.abc import Callable

import pytest
import torch

from vae.model.autoencoder import AutoencoderKL


def run_out_of_memory(
    monkeypatch: pytest.MonkeyPatch, fails: Callable[[AutoencoderKL, list[int]], bool]
) -> list[int]:
    """Training passes of the autoencoder raise OutOfMemoryError if `fails(autoencoder, sizes)`.

    Returns `sizes`, the number of images of each training pass, the current one included.
    """
    forward = AutoencoderKL.forward
    sizes: list[int] = []

    def limited(
        self: AutoencoderKL, images: torch.Tensor, noise: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if torch.is_grad_enabled() and images.device.type == "cpu":  # the memory plan runs on the meta device
            sizes.append(len(images))
            if fails(self, sizes):
                raise torch.OutOfMemoryError("injected")
        return forward(self, images, noise)

    monkeypatch.setattr(AutoencoderKL, "forward", limited)
    return sizes
