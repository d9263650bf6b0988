"""Trunks with random weights, in files like torchvision's, because the real weights need a download."""

import warnings
from pathlib import Path

import lpips
import pytest
import torch


@pytest.fixture(scope="session")
def packages() -> dict[str, lpips.LPIPS]:
    """LPIPS of the lpips package with each trunk."""
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")  # the package uses a deprecated call of torchvision
        torch.manual_seed(0)
        return {
            net: lpips.LPIPS(net=net, pnet_rand=True, verbose=False).eval()
            for net in ("vgg", "alex", "squeeze")
        }


@pytest.fixture(scope="session")
def weights_files(
    packages: dict[str, lpips.LPIPS], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A weights file of a classifier for each trunk, with the weights of `packages`."""
    folder = tmp_path_factory.mktemp("trunks")
    files = {}
    for net, package in packages.items():
        features = {
            f"features.{name.split('.', 1)[1]}": value for name, value in package.net.state_dict().items()
        }
        files[net] = folder / f"{net}.pth"
        torch.save({**features, "classifier.0.weight": torch.zeros(3)}, files[net])
    return files
