"""Weights of a ConvNeXt-T in the layout of the published files."""

import torch
from torch import Tensor

DEPTHS, WIDTHS = (3, 3, 9, 3), (96, 192, 384, 768)


def convnext_weights() -> dict[str, Tensor]:
    """Random weights of a ConvNeXt-T, with the names of Liu et al. 2022."""
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"downsample_layers.0.0": (96, 3, 4, 4), "head": (5, 768)}
    norms, tensors = {"downsample_layers.0.1": 96, "norm": 768}, {}
    for stage, (depth, width) in enumerate(zip(DEPTHS, WIDTHS, strict=True)):
        if stage:
            norms[f"downsample_layers.{stage}.0"] = width // 2
            shapes[f"downsample_layers.{stage}.1"] = (width, width // 2, 2, 2)
        for block in (f"stages.{stage}.{number}" for number in range(depth)):
            norms[f"{block}.norm"] = width
            shapes[f"{block}.dwconv"] = (width, 1, 7, 7)
            shapes |= {f"{block}.pwconv1": (4 * width, width), f"{block}.pwconv2": (width, 4 * width)}
            tensors[f"{block}.gamma"] = torch.rand(width)
    for name, shape in (shapes | {name: (width,) for name, width in norms.items()}).items():
        tensors[f"{name}.weight"] = 0.05 * torch.randn(shape) + (name in norms)
        tensors[f"{name}.bias"] = 0.05 * torch.randn(shape[0])
    return tensors
