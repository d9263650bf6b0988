"""Pretrained networks that see pixels and reconstructions: the reference of a probe.

Shapes: B images, D features.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import models

from vae.losses.trunk_weights import cached_file, verified_weights
from vae.system.console import fetch_command
from vae.system.errors import UserError

SIDE = 224  # px: both networks were trained with it
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of both networks
# Parts of a ConvNeXt block in the files of Liu et al. 2022, and their names in torchvision.
BLOCK_NAMES = {
    "dwconv": "block.0",
    "norm": "block.2",
    "pwconv1": "block.3",
    "pwconv2": "block.5",
    "gamma": "layer_scale",
}
Pretrained = Callable[[Tensor], Tensor]  # floats (B, 3, H, W) in [-1, 1] -> (B, D, 1, 1) on the CPU


def _resnet50(tensors: Mapping[str, Any]) -> nn.Module:
    network = models.resnet50()
    network.load_state_dict(tensors)
    network.fc = nn.Identity()
    return network


def _convnext(content: Mapping[str, Any]) -> nn.Module:
    network = models.convnext_tiny()
    network.classifier[2] = nn.Identity()  # the file's has 21 841 classes
    tensors = {_torchvision_name(name): value for name, value in content["model"].items()}
    tensors = {name: value for name, value in tensors.items() if not name.startswith("head.")}
    scales = {name: value[:, None, None] for name, value in tensors.items() if name.endswith("layer_scale")}
    network.load_state_dict(tensors | scales)
    return network


def _torchvision_name(name: str) -> str:
    """torchvision's name of a parameter in a file of Liu et al. 2022."""
    if match := re.fullmatch(r"downsample_layers\.(\d)\.(.+)", name):
        return f"features.{2 * int(match[1])}.{match[2]}"
    if match := re.fullmatch(r"stages\.(\d)\.(\d+)\.(\w+)(.*)", name):
        part = BLOCK_NAMES.get(match[3], match[3])
        return f"features.{2 * int(match[1]) + 1}.{match[2]}.{part}{match[4]}"
    return re.sub(r"^norm\.", "classifier.0.", name)


class Source(NamedTuple):
    """Where the weights of a network are, and how they become a network without its last layer."""

    title: str
    url: str
    build: Callable[[Mapping[str, Any]], nn.Module]

    @property
    def path(self) -> Path:
        """The file in PyTorch's cache folder."""
        return cached_file(self.url)


# Choices of --probe_reference; auto takes the first one whose file is on disk.
SOURCES = {
    "resnet50": Source("ResNet-50 (ImageNet-1k)", models.ResNet50_Weights.IMAGENET1K_V2.url, _resnet50),
    "convnext_22k": Source(
        "ConvNeXt-T (ImageNet-22k)",
        "https://dl.fbaipublicfiles.com/convnext/convnext_tiny_22k_224.pth",
        _convnext,
    ),
}


def choose_reference(choice: str) -> str | None:
    """The key in SOURCES for --probe_reference; None: the heads of latents see the pixels.

    A network that is named is downloaded if its file is missing. Raises UserError if the file is not usable.
    """
    if choice == "auto":
        choice = next((name for name, source in SOURCES.items() if source.path.is_file()), "none")
    if choice == "none":
        return None
    try:
        verified_weights(SOURCES[choice].url)
    except OSError as error:
        raise _unusable(choice, str(error)) from error
    return choice


def load_reference(name: str, device: torch.device) -> Pretrained:
    """The features of a network, from its file; UserError if the file is damaged or of another network."""
    source = SOURCES[name]
    try:
        network = source.build(torch.load(source.path, map_location="cpu", weights_only=True))
    except Exception as error:  # a damaged file raises anything: RuntimeError, UnpicklingError, KeyError, ...
        reason = f"{source.path} is damaged, or contains the weights of another network"
        raise _unusable(name, reason) from error
    network.eval().requires_grad_(False).to(device)
    mean, std = (
        torch.tensor(values, device=device)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD)
    )

    def features(images: Tensor) -> Tensor:
        scaled = F.interpolate(images, size=SIDE, mode="bicubic", antialias=True)
        return network(((scaled + 1) / 2 - mean) / std).flatten(1)[:, :, None, None].cpu()

    return features


def describe(name: str | None, choice: str) -> str:
    """One line about what sees pixels and reconstructions."""
    if name is not None:
        return f"pixels and reconstructions: features of a pretrained {SOURCES[name].title}"
    if choice == "none":
        return "pixels and reconstructions: small heads"
    missing = " and ".join(source.path.name for source in SOURCES.values())
    return (
        f"pixels and reconstructions: small heads, because {missing} are not in "
        f"{SOURCES['resnet50'].path.parent}; --probe_reference resnet50 or convnext_22k downloads one"
    )


def _unusable(name: str, reason: str) -> UserError:
    source = SOURCES[name]
    return UserError(
        f"--probe_reference {name}: {reason}: fetch it with {fetch_command(source.url, source.path)}, or use "
        "--probe_reference none"
    )
