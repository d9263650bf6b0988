"""A scale of the activations within the networks, so that fp16, which ends at 65,504, contains them.

Norms remove it: with each convolution before a norm multiplied by the scale, and each norm's epsilon by its
square, a network computes the same images and the same gradients of its parameters, which stay as they are.
A power of two changes no rounding while weights stay above fp16's smallest normal number, 6.1e-5. SDXL's
decoder is known to exceed fp16.
"""

import math

from torch import nn

from vae.model.autoencoder import Decoder, Encoder
from vae.model.layers import NORM_EPS, Attention, Downsample, GroupNorm, ResnetBlock, Scaled, Upsample

FP16_MAX = 65504.0
TARGET = FP16_MAX / 8  # of the largest activation: other images and further training need the rest
MIN_SCALE = 2.0**-7  # the least that costs no precision: benchmarks/LOG.md, "Activations scaled for fp16"
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
