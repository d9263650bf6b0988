"""The shapes that our kernels get in the steps of a run, which its test of the kernels tries first."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from vae.losses.dino import DinoDistance
from vae.losses.perceptual import PerceptualLoss
from vae.memory.plan import META, StepSpec, meta_networks, zero_inputs
from vae.model.layers import Attention, GroupNorm, NormSiLU, ResnetBlock
from vae.ops.kernel_check import AttentionShape, FeatureShape, NormShape, Shape
from vae.step import compute_gradients


def kernel_shapes(specs: Iterable[StepSpec]) -> list[Shape]:
    """Each shape of the steps once: a step of one image of each spec runs without data.

    The images are square: --buckets also has other widths, of which the kernels are the same code.
    """
    shapes: dict[Shape, None] = {}  # in the order of the steps
    for spec in specs:
        networks = meta_networks(spec)
        modules = [networks.autoencoder, networks.discriminator, *networks.terms.networks()]
        for module in (part for network in modules if network is not None for part in network.modules()):
            module.register_forward_pre_hook(lambda *call: shapes.update(dict.fromkeys(_norms(*call))))
            for features in _compared(module):
                features.register_forward_hook(lambda _, __, out: shapes.update({_features(out): None}))
        compute_gradients(networks, zero_inputs(spec, 1, META), [1])
    return [*shapes]


def _norms(module: nn.Module, inputs: tuple[Any, ...]) -> list[Shape]:
    """Of the norms and the attention in a module, without those of its parts."""
    if isinstance(module, ResnetBlock):
        _, channels, *sides = inputs[0].shape
        norms = ((channels, module.norm1, False), (module.conv1.out_channels, module.norm2, True))
        return [NormShape(width, *sides, norm.num_groups, True, h_bias) for width, norm, h_bias in norms]
    if isinstance(module, GroupNorm):
        return [NormShape(*inputs[0].shape[1:], module.num_groups, isinstance(module, NormSiLU), False)]
    if isinstance(module, Attention):
        _, channels, height, width = inputs[0].shape
        return [AttentionShape(height * width, channels)]
    return []


def _compared(module: nn.Module) -> Iterable[nn.Module]:
    """The modules whose results a perceptual term compares."""
    if isinstance(module, PerceptualLoss):
        return module.slices
    return module.network.blocks if isinstance(module, DinoDistance) else ()


def _features(out: Any) -> FeatureShape:
    """Of features (B, C, h, w), or of tokens (B, N, C), which are compared as (B, C, N, 1)."""
    return FeatureShape(*out.shape[1:]) if out.dim() == 4 else FeatureShape(out.shape[2], out.shape[1], 1)
