"""The weights of the perceptual networks: which file, where to find it, how to read it.

Each failure is one UserError that names the file, its place and the alternatives.
"""

import http.client
import os
import re
import socket
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision import models

from vae.system.console import fetch_command
from vae.system.errors import UserError
from vae.system.files import in_home
from vae.system.script import system_error_line

URLS = {
    "vgg": models.VGG16_Weights.IMAGENET1K_V1.url,
    "alex": models.AlexNet_Weights.IMAGENET1K_V1.url,
    "squeeze": models.SqueezeNet1_1_Weights.IMAGENET1K_V1.url,
    # Apache-2.0, https://github.com/facebookresearch/dinov2#license
    "dinov2-s": "https://dl.fbaipublicfiles.com/dinov2/dinov2_vits14/dinov2_vits14_pretrain.pth",
}
LPIPS_NETS = ("vgg", "alex", "squeeze")
SHA256 = {"dinov2_vits14_pretrain.pth": "b938bf1b"}  # first digits, of files without them in their name
TIMEOUT_SECONDS = 5  # of each address and each read: someone is waiting for the error
WITHOUT_LPIPS = "train without this network with --perceptual_weight 0"  # other scripts replace this phrase
ALTERNATIVES = f"{WITHOUT_LPIPS}, pass the file with --perceptual_weights FILE"


def find_trunk_weights(net: str, weights_path: str | os.PathLike[str] | None) -> Path:
    """The weights file of `net` (a key of URLS): `weights_path`, or that in PyTorch's cache, downloaded once.

    Raises UserError if there is none. Call it before training starts, and first in one process.
    """
    if weights_path is not None:
        given = Path(weights_path)
        if not given.is_file():
            raise UserError(f"--perceptual_weights {weights_path} is not a file: {ALTERNATIVES}")
        return given
    try:
        return cached_or_downloaded(URLS[net])
    except OSError as error:
        fetch = fetch_command(URLS[net], cached_file(URLS[net]))
        remedy = f"{ALTERNATIVES}, or download it: {fetch}"
        raise UserError(f"--perceptual_net {net}: {error}: {remedy}") from error


def load_trunk_weights(network: nn.Module, net: str, weights_path: str | os.PathLike[str] | None) -> None:
    """Give `network`, which is on the meta device, the weights of `net` (see find_trunk_weights)."""
    path = find_trunk_weights(net, weights_path)
    weights = _read(path, net)
    try:
        network.load_state_dict(weights, assign=True)
    except RuntimeError as error:  # names or shapes
        expected = Path(_file_name(URLS[net])).stem
        raise _unusable(path, net, f"is from another network than {expected}") from error


def _read(path: Path, net: str) -> dict[str, Tensor]:
    """The tensors of a .pth, .pt or .safetensors file; for LPIPS the `features.*`, without that prefix."""
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises anything: RuntimeError, KeyError, struct.error, ...
        raise _unusable(path, net, "is not a readable weights file") from error
    tensors = state if isinstance(state, dict) else {}
    prefix = "features." if net in LPIPS_NETS else ""
    # cloned: the memory of safetensors is not aligned, and PyTorch then uses kernels that round differently
    weights = {
        name.removeprefix(prefix): value.clone()
        for name, value in tensors.items()
        if isinstance(name, str) and name.startswith(prefix) and isinstance(value, Tensor)
    }
    if not weights:
        raise _unusable(path, net, f"has no tensors named {prefix}*")
    return weights


def cached_file(url: str) -> Path:
    """The path of the file of `url` in PyTorch's cache; UserError without a home folder and TORCH_HOME."""
    return in_home(torch.hub.get_dir(), "TORCH_HOME") / "checkpoints" / _file_name(url)


def cached_or_downloaded(url: str) -> Path:
    """The file of `url` in PyTorch's cache, where it is downloaded to; OSError, with a reason for a user."""
    path = cached_file(url)
    if not path.is_file():
        try:
            download(url, path)
        except OSError as error:  # no network, refused, timeout, disk full
            reason = system_error_line(error)
            raise OSError(f"{path} is missing and the download failed ({reason})") from error
    return path


def download(url: str, path: Path) -> None:
    """Download `url` to `path`, completely or not at all; raises OSError, also if the SHA-256 is wrong."""
    path.parent.mkdir(parents=True, exist_ok=True)
    digits = re.search(r"-([0-9a-f]{8})\.pth$", path.name)  # the first ones, as in vgg16-397923af.pth
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_SECONDS)
    try:
        torch.hub.download_url_to_file(url, str(path), digits[1] if digits else SHA256.get(path.name))
    except (RuntimeError, http.client.HTTPException) as error:  # another SHA-256, a torn connection
        raise OSError(str(error)) from error
    finally:
        socket.setdefaulttimeout(before)


def _unusable(path: Path, net: str, reason: str) -> UserError:
    return UserError(f"{path} {reason}: {ALTERNATIVES}, or replace the file with {URLS[net]}")


def _file_name(url: str) -> str:
    return url.rsplit("/", 1)[-1]
