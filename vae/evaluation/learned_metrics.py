"""Metrics with trained networks, LPIPS and rFID. Their weights are found before anything is measured.

Shapes: B images of H x W px.
"""

import warnings
from pathlib import Path

import torch

from vae.config.evaluate_flags import EvaluateConfig
from vae.losses.perceptual import PerceptualLoss, build_perceptual
from vae.losses.trunk_weights import WITHOUT_LPIPS, cached_file, find_trunk_weights, verified_weights
from vae.system.errors import UserError

# The weights that torch-fidelity loads: the Inception network of FID (Heusel et al. 2017), for PyTorch.
INCEPTION_URL = (
    "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/"
    "weights-inception-2015-12-05-6726825d.pth"
)
FEATURES = 2048  # outputs of Inception's last pooling layer


def find_perceptual(
    config: EvaluateConfig, device: torch.device, missing: dict[str, str]
) -> tuple[PerceptualLoss | None, str | None]:
    """LPIPS in fp32 and its network's name; both None, with the reason in `missing`, if it is not available.

    Raises UserError if the flags request a network or a file that is not available.
    """
    net = "vgg" if config.perceptual_net == "auto" else config.perceptual_net
    if net == "none":
        missing["lpips"] = "disabled with --perceptual_net none"
        return None, None
    try:
        if net != "random":
            find_trunk_weights(net, config.perceptual_weights)
        return build_perceptual(net, config.perceptual_weights, torch.float32, device), net
    except UserError as error:
        reason = str(error).replace(WITHOUT_LPIPS, "disable LPIPS with --perceptual_net none")
        if config.perceptual_net != "auto" or config.perceptual_weights is not None:
            raise UserError(reason) from None
        missing["lpips"] = reason
        return None, None


class ReconstructionFid:
    """Fréchet distance (Heusel et al. 2017) between images and their reconstructions, from torchmetrics."""

    def __init__(self, weights: Path, device: torch.device):
        from torchmetrics.image.fid import FrechetInceptionDistance

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchmetrics warns about its memory
            self._metric = FrechetInceptionDistance(
                feature=FEATURES, feature_extractor_weights_path=str(weights)
            ).to(device)
        self._metric.set_dtype(torch.float64)  # for the sums: covariances are differences of large numbers
        self._count = 0

    def add(self, images: torch.Tensor, recon: torch.Tensor) -> None:
        """Add uint8 (B, 3, H, W) and their reconstructions."""
        self._metric.update(images, real=True)
        self._metric.update(recon, real=False)
        self._count += len(images)

    def take(self) -> float | None:
        """The distance over all images since the last take; None for fewer than two images."""
        value = self._metric.compute().item() if self._count > 1 else None
        self._metric.reset()
        self._count = 0
        return value


def find_rfid(
    config: EvaluateConfig, device: torch.device, missing: dict[str, str]
) -> ReconstructionFid | None:
    """rFID if --rfid is given. Raises UserError if its weights are not available."""
    if not config.rfid:
        missing["rfid"] = "not requested: add --rfid"
        return None
    return ReconstructionFid(_find_inception(config.inception_weights), device)


def _find_inception(given: str | None) -> Path:
    """The verified file of Inception's weights, downloaded if necessary."""
    fetch = f"download {INCEPTION_URL} to {cached_file(INCEPTION_URL)}"
    remedy = f"{fetch}, give the file with --inception_weights FILE, or remove --rfid"
    if given and not Path(given).expanduser().is_file():
        raise UserError(f"--inception_weights {given} is not a file: {remedy}")
    try:
        path = verified_weights(INCEPTION_URL, Path(given).expanduser() if given else None)
    except OSError as error:
        raise UserError(f"--rfid: {error}: {remedy}") from error
    try:  # torch-fidelity would execute code in a pickle; weights_only accepts only tensors
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        fits = state["fc.weight"].shape == (1008, FEATURES)
    except Exception as error:  # a damaged file can raise any exception
        raise UserError(f"{path} does not contain readable Inception weights: {remedy}") from error
    if not fits:
        raise UserError(f"{path} contains another network than torch-fidelity's Inception: {remedy}")
    return path
