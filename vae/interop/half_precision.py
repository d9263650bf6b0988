"""Whether a VAE can run in fp16: its largest activation on sample images, beside fp16's largest number."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from vae.model.autoencoder import AutoencoderKL

FP16_LARGEST = 65504.0
NEAR = 0.5  # of the largest: other images, and sums before the next rounding, need the rest


@dataclass
class LargestActivation:
    """The largest magnitude that any module put out, and which module it was."""

    value: float = 0.0
    module: str = ""

    @property
    def is_near(self) -> bool:
        """Whether fp16 may overflow."""
        return self.value >= NEAR * FP16_LARGEST

    def line(self) -> str:
        """What to tell."""
        share = f"{self.value:,.0f} ({self.value / FP16_LARGEST:.2%} of fp16's 65,504) in {self.module}"
        if self.is_near:
            return (
                f"WARNING: the largest activation is {share}: run this VAE in bf16 or fp32, fp16 may overflow"
            )
        return f"the largest activation is {share}: fp16 bears it"


@torch.no_grad()
def largest_activation(model: AutoencoderKL, batches: Iterable[torch.Tensor]) -> LargestActivation:
    """Over encoding and decoding images (B, 3, H, W) in [-1, 1], in the dtype of the images."""
    found = LargestActivation()

    def watch(name: str):
        def hook(_module, _inputs, output):
            if isinstance(output, torch.Tensor):
                value = output.abs().max().item()
                if value > found.value:
                    found.value, found.module = value, name

        return hook

    handles = [part.register_forward_hook(watch(name)) for name, part in model.named_modules() if name]
    try:
        for images in batches:
            model.decode(model.encode(images).mode().to(images.dtype))
    finally:
        for handle in handles:
            handle.remove()
    return found
