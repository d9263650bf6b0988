"""A scale of the activations within the networks, so that fp16, which ends at 65,504, contains them.

Norms remove it: with each convolution before a norm multiplied by the scale, and each norm's epsilon by its
square, a network computes the same images and the same gradients of its parameters, which stay as they are.
A power of two changes no rounding while weights stay above fp16's smallest normal number, 6.1e-5. SDXL's
decoder is known to exceed fp16.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from vae.model.autoencoder import AutoencoderKL, Decoder, Encoder
from vae.model.layers import NORM_EPS, Attention, Downsample, GroupNorm, ResnetBlock, Scaled, Upsample

FP16_MAX = 65504.0
TARGET = FP16_MAX / 8  # of the largest activation: other images and further training need the rest
MIN_SCALE = 2.0**-7  # the least that costs no precision: benchmarks/LOG.md, "Activations scaled for fp16"
SAFE_FRACTION = 0.5  # of FP16_MAX: other images, and sums before the next rounding, need the rest
UNKNOWN = 2.0**-6  # where nothing was measured: it contains activations of 4 million


def scale_for(largest: float) -> float:
    """The power of two with which activations of at most `largest` are far from fp16's maximum.

    It is at least MIN_SCALE, with which activations can still be too large.
    """
    return max(MIN_SCALE, 2.0 ** math.floor(math.log2(TARGET / largest)))


def scale_activations(network: nn.Module, scale: float) -> None:
    """Let all encoders and decoders in `network` compute with `scale`; 1 is what they begin with.

    A tiny decoder has no norms, and is not changed.
    """
    for module in network.modules():
        if isinstance(module, Encoder | Decoder):
            _scale(module, scale)


def _scale(network: Encoder | Decoder, scale: float) -> None:
    # Images, latents and what a norm returns are not scaled, so the weights that read them are.
    reads_unscaled: list[Scaled] = [network.conv_in]
    reads_scaled: list[Scaled] = []
    for module in network.modules():
        if isinstance(module, ResnetBlock):
            reads_unscaled += [module.conv1, module.conv2]
            reads_scaled += [] if module.conv_shortcut is None else [module.conv_shortcut]
        elif isinstance(module, Attention):
            reads_unscaled.append(module.to_out[0])
        elif isinstance(module, Upsample | Downsample):
            reads_scaled.append(module.conv)
        elif isinstance(module, GroupNorm):
            module.eps = NORM_EPS * scale**2
    for layer in reads_unscaled:
        layer.weight_scale = layer.bias_scale = scale
    for layer in reads_scaled:
        layer.bias_scale = scale


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
