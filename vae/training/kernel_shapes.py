"""The shapes that our kernels get in the steps of a run, which its test of the kernels tries first."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from vae.losses.dino import DinoDistance
from vae.losses.perceptual import PerceptualLoss
from vae.memory.plan import META, StepSpec, meta_networks, zero_inputs
from vae.model.layers import Attention, GroupNorm, NormSiLU, ResnetBlock
from vae.model.rms_norm import RMSNorm, RMSNormSiLU
from vae.ops.kernel_check import AttentionShape, FeatureShape, NormShape, RmsShape, Shape
from vae.step import compute_gradients


def kernel_shapes(specs: Iterable[StepSpec]) -> list[Shape]:
    """Each shape of the steps once: a step of one image of each spec runs without data.

    The images are square. With --buckets there are other widths, which run the same kernel code.
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
    """The shapes of the norms and the attention in a module, without those of its parts."""
    if isinstance(module, ResnetBlock):
        first = _norm(module.norm1, inputs[0])
        channels = module.norm2.num_channels
        return [first, first._replace(channels=channels, has_h_bias=True)]
    if isinstance(module, GroupNorm | RMSNorm):
        return [_norm(module, inputs[0])]
    if isinstance(module, Attention):
        _, channels, height, width = inputs[0].shape
        return [AttentionShape(height * width, channels)]
    return []


def _norm(norm: GroupNorm | RMSNorm, h: Tensor) -> NormShape | RmsShape:
    _, channels, height, width = h.shape
    silu = isinstance(norm, NormSiLU | RMSNormSiLU)
    if isinstance(norm, RMSNorm):
        return RmsShape(channels, height, width, silu, has_h_bias=False)
    return NormShape(channels, height, width, norm.num_groups, silu, has_h_bias=False)


def _compared(module: nn.Module) -> Iterable[nn.Module]:
    """The modules whose results a perceptual term compares."""
    if isinstance(module, PerceptualLoss):
        return module.slices
    return module.network.blocks if isinstance(module, DinoDistance) else ()


def _features(out: Any) -> FeatureShape:
    """The shape of features (B, C, h, w), or of tokens (B, N, C), compared as (B, C, N, 1)."""
    return FeatureShape(*out.shape[1:]) if out.dim() == 4 else FeatureShape(out.shape[2], out.shape[1], 1)
