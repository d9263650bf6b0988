"""Whether a VAE can run in fp16: its largest activation on sample images, compared with fp16's maximum."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from vae.model.activation_scale import FP16_MAX
from vae.model.autoencoder import AutoencoderKL
from vae.model.layers import ResnetBlock

SAFE_FRACTION = 0.5  # of FP16_MAX: other images, and sums before the next rounding, need the rest


@dataclass
class LargestActivation:
    """The largest absolute value in the output of any module, and the name of that module."""

    value: float = 0.0
    module: str = ""

    @property
    def may_overflow_fp16(self) -> bool:
        """Whether fp16 may overflow on other images."""
        return self.value >= SAFE_FRACTION * FP16_MAX

    @property
    def text(self) -> str:
        """The value and the module."""
        share = f"{self.value / FP16_MAX:.2%} of fp16's maximum 65,504"
        return f"the largest activation is {self.value:,.0f} ({share}) in {self.module}"

    def summary(self) -> str:
        """One line with the value, the module and the advice."""
        advice = (
            "run this VAE in bf16 or fp32, because fp16 may overflow"
            if self.may_overflow_fp16
            else "fp16 is safe"
        )
        return f"{self.text}: {advice}"


def _call_layers(block: ResnetBlock, inputs: tuple[torch.Tensor], _output: object) -> None:
    """Call the layers of a block one by one, as other programs do: the block itself is one operation."""
    (x,) = inputs
    block.conv2(block.norm2(block.conv1(block.norm1(x))))
    if block.conv_shortcut is not None:
        block.conv_shortcut(x)


@torch.no_grad()
def largest_activation(model: AutoencoderKL, batches: Iterable[torch.Tensor]) -> LargestActivation:
    """Largest activation while images (B, 3, H, W) in [-1, 1] are encoded and decoded in their dtype."""
    largest = LargestActivation()

    def recording_hook(name: str) -> Callable[[torch.nn.Module, object, object], None]:
        def hook(_module: torch.nn.Module, _inputs: object, output: object) -> None:
            if isinstance(output, torch.Tensor):
                value = output.abs().max().item()
                if value > largest.value:
                    largest.value, largest.module = value, name

        return hook

    parts = model.named_modules()
    handles = [part.register_forward_hook(recording_hook(name)) for name, part in parts if name]
    blocks = (part for part in model.modules() if isinstance(part, ResnetBlock))
    handles += [block.register_forward_hook(_call_layers) for block in blocks]
    try:
        for images in batches:
            model.decode(model.encode(images).mode().to(images.dtype))
    finally:
        for handle in handles:
            handle.remove()
    return largest
