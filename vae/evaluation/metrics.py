"""Metrics of reconstructions, one number per image, their sums over a set of images, and baselines.

Structural similarity is over 8-bit values, as images are displayed. The weights of learned metrics are found
before anything is measured. Shapes: B images of H x W px, three channels, floats in [-1, 1].
Those with alpha are measured over black and over white, and their metrics are the means of both.
"""

import math
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from vae.config.trained_vae_flags import EvaluateConfig
from vae.images.composites import as_rgb, per_image, premultiply, unpremultiply
from vae.images.pixels import OFF_BY_ONE_DB, PEAK, psnr, to_8_bit
from vae.losses.perceptual import PerceptualLoss, build_perceptual
from vae.losses.terms import LossTerms, Term
from vae.losses.trunk_weights import WITHOUT_LPIPS, cached_file, cached_or_downloaded, find_trunk_weights
from vae.step import image_terms
from vae.system.errors import UserError

SSIM_WINDOW = 11  # px; Wang et al. 2004: an 11 x 11 Gaussian with standard deviation 1.5
SSIM_SIGMA = 1.5
SSIM_C1 = (0.01 * PEAK) ** 2
SSIM_C2 = (0.03 * PEAK) ** 2
_GAUSSIAN = [math.exp(-0.5 * ((i - SSIM_WINDOW // 2) / SSIM_SIGMA) ** 2) for i in range(SSIM_WINDOW)]
WEIGHTS = [weight / sum(_GAUSSIAN) for weight in _GAUSSIAN]  # of the window along a side
# Wang, Simoncelli & Bovik 2003, from the full size to the smallest scale
MS_SSIM_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
MS_SSIM_MIN_SIDE = SSIM_WINDOW * 2 ** (len(MS_SSIM_WEIGHTS) - 1)  # px: one window at the smallest scale


def ssim(recon: Tensor, images: Tensor) -> Tensor:
    """Structural similarity of each image (Wang et al. 2004) over 8-bit values: -> (B,) fp64.

    Gaussian window, mean over channels, population covariance. Only windows that are completely inside the
    image count, so its outer 5 px are never a window's centre. scikit-image computes the same with
    `gaussian_weights=True, use_sample_covariance=False`; torchmetrics does not. No side is below 11 px.
    """
    assert recon.shape == images.shape, f"{tuple(recon.shape)} is not {tuple(images.shape)}"
    assert min(images.shape[2:]) >= SSIM_WINDOW, tuple(images.shape)
    values = []
    # one channel at a time, to save memory
    for x, y in zip(recon.flatten(0, 1), images.flatten(0, 1), strict=True):
        values.append(_ssim_of_channel(to_8_bit(x).double(), to_8_bit(y).double())[0])
    return torch.stack(values).view(images.shape[:2]).mean(1)


def ms_ssim(recon: Tensor, images: Tensor) -> Tensor:
    """Structural similarity over five scales (Wang, Simoncelli & Bovik 2003) of each image: -> (B,) fp64.

    Every scale is computed as in `ssim`. The next scale is a 2 x 2 mean, which drops an odd last row or
    column. As in pytorch-msssim, the result is the mean over channels of each channel's weighted product,
    with negative factors as 0. No side is below 176 px.
    """
    assert recon.shape == images.shape, f"{tuple(recon.shape)} is not {tuple(images.shape)}"
    assert min(images.shape[2:]) >= MS_SSIM_MIN_SIDE, tuple(images.shape)
    x, y = to_8_bit(recon).double(), to_8_bit(images).double()
    product = torch.ones(images.shape[:2], dtype=torch.float64, device=images.device)  # (B, 3)
    for scale, weight in enumerate(MS_SSIM_WEIGHTS):
        last = scale == len(MS_SSIM_WEIGHTS) - 1
        parts = [_ssim_of_channel(a, b) for a, b in zip(x.flatten(0, 1), y.flatten(0, 1), strict=True)]
        values = torch.stack([whole if last else structure for whole, structure in parts])
        product = product * values.view(images.shape[:2]).clamp(min=0) ** weight
        if not last:
            x, y = F.avg_pool2d(x, 2), F.avg_pool2d(y, 2)
    return product.mean(1)


def _ssim_of_channel(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Structural similarity of two (H, W) channels, and its contrast and structure factors alone.

    Both are fp64, because variances are differences of large numbers.
    """
    mean_x, mean_y = _blur(x), _blur(y)
    variance_x = _blur(x * x) - mean_x * mean_x
    variance_y = _blur(y * y) - mean_y * mean_y
    covariance = _blur(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + SSIM_C1) / (mean_x * mean_x + mean_y * mean_y + SSIM_C1)
    structure = (2 * covariance + SSIM_C2) / (variance_x + variance_y + SSIM_C2)
    return (luminance * structure).mean(), structure.mean()


def _blur(channel: Tensor) -> Tensor:
    """Weighted mean over every complete window: (H, W) -> (H + 1 - window, W + 1 - window)."""
    for dim in (0, 1):
        # shifted sums, because on a CPU an fp64 conv2d unfolds the image 11 times
        length = channel.shape[dim] - SSIM_WINDOW + 1
        blurred = channel.narrow(dim, 0, length) * WEIGHTS[0]
        for offset in range(1, SSIM_WINDOW):
            blurred.add_(channel.narrow(dim, offset, length), alpha=WEIGHTS[offset])
        channel = blurred
    return channel


# ---- Baselines ---------------------------------------------------------------------------------------------
def mean_colour(images: Tensor) -> Tensor:
    """Each image filled with its mean colour, and its mean alpha: (B, C, H, W) -> (B, C, H, W)."""
    return unpremultiply(premultiply(images).mean((2, 3), keepdim=True)).expand_as(images)


def bicubic_baseline(images: Tensor, factor: int = 8) -> Tensor:
    """Each image area-averaged by `factor`, then enlarged bicubically: (B, C, H, W) -> (B, C, H, W).

    `factor` is the downsampling factor of the autoencoder and must divide both sides. The bicubic filter is
    that of image programs (Keys 1981, a = -0.5), with weights renormalised at the borders. The result is
    clamped to [-1, 1].
    """
    height, width = images.shape[2:]
    assert height % factor == width % factor == 0, f"{width} x {height} px by {factor}"
    images = images.to(torch.promote_types(images.dtype, torch.float32))
    small = F.avg_pool2d(premultiply(images), factor)  # (B, C, H/factor, W/factor)
    # antialias=True selects a = -0.5 instead of -0.75; it smooths nothing in an enlargement
    large = F.interpolate(small, size=(height, width), mode="bicubic", align_corners=False, antialias=True)
    return unpremultiply(large.clamp(-1, 1))


# ---- Metrics with trained networks, LPIPS and rFID ---------------------------------------------------------
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
    weights = _find_inception(config.inception_weights)
    try:
        return ReconstructionFid(weights, device)
    except Exception as error:  # a damaged file raises anything
        flag = "--inception_weights" if config.inception_weights else "--rfid:"
        raise UserError(
            f"{flag} {weights} is damaged, or is not the weights of Inception: use {INCEPTION_URL}"
        ) from error


def _find_inception(given: str | None) -> Path:
    """The file of Inception's weights, downloaded if necessary."""
    fetch = f"download {INCEPTION_URL} to {cached_file(INCEPTION_URL)}"
    remedy = f"{fetch}, give the file with --inception_weights FILE, or remove --rfid"
    if given and not Path(given).is_file():
        raise UserError(f"--inception_weights {given} is not a file: {remedy}")
    try:
        return Path(given) if given else cached_or_downloaded(INCEPTION_URL)
    except OSError as error:
        raise UserError(f"--rfid: {error}: {remedy}") from error


# ---- Sums over a set of images -----------------------------------------------------------------------------
Sums = dict[str, tuple[float, int]]  # metric -> (sum over images, number of images)


def reconstruction_sums(
    reconstruct: Callable[[Tensor], Tensor],
    batches: Iterable[Tensor],
    terms: LossTerms,
    each_psnr: list[float] | None = None,
) -> Sums:
    """Sums of loss, psnr and ssim over all images of `batches`, and of lpips if it is one of the terms.

    `loss` is the weighted sum of the image terms, and `loss_NAME` each of them without its weight.
    Reconstructions are clamped to the range of a saved image. Images with alpha also have psnr_alpha.

    The PSNR of an image counts up to OFF_BY_ONE_DB, also for the baselines.

    `reconstruct` and the terms compute on the device of the batches, (B, C, H, W) in [-1, 1].
    Reconstructions of any dtype are measured in fp32 or wider; a network of a term has its own precision.
    `each_psnr` gets the PSNR of every image, in their order.
    """
    values = _values_of({"recon": reconstruct}, batches, terms)["recon"]
    if each_psnr is not None and values["psnr"]:
        each_psnr += torch.cat(values["psnr"]).tolist()
    return {metric: _total(parts) for metric, parts in values.items()}


def baseline_sums(batches: Iterable[Tensor], terms: LossTerms, factor: int = 8) -> dict[str, Sums]:
    """The sums of reconstruction_sums for the baselines mean_colour and bicubic, by name.

    `factor` is the downsampling factor of the autoencoder.
    """
    baselines = {"mean_colour": mean_colour, "bicubic": lambda images: bicubic_baseline(images, factor)}
    values_of = _values_of(baselines, batches, terms)
    return {
        name: {metric: _total(parts) for metric, parts in values.items()}
        for name, values in values_of.items()
    }


def means(sums: Sums) -> dict[str, float]:
    """Mean of each metric that has values, and `images`, the number of images."""
    means_of: dict[str, float] = {name: value / count for name, (value, count) in sums.items() if count}
    means_of["images"] = max((count for _, count in sums.values()), default=0)
    return means_of


@torch.no_grad()
def _values_of(
    reconstructions: dict[str, Callable[[Tensor], Tensor]], batches: Iterable[Tensor], terms: LossTerms
) -> dict[str, dict[str, list[Tensor]]]:
    """Every metric of all images, on their device: name -> metric -> parts (B,)."""
    metrics = ["loss", "psnr", "ssim", "lpips", "psnr_alpha", *map(_name_of, terms.image)]
    kept: dict[str, dict[str, list[Tensor]]] = {
        name: {metric: [] for metric in metrics} for name in reconstructions
    }
    for images in batches:
        images = images.float()
        for name, reconstruct in reconstructions.items():
            recon = reconstruct(images).float().clamp(-1, 1)  # the range of a saved image
            for metric, values in _measure(recon, images, terms).items():
                kept[name][metric].append(values.double())
    return kept


def _name_of(term: Term) -> str:
    return f"loss_{term.name}"


def _measure(recon: Tensor, images: Tensor, terms: LossTerms) -> dict[str, Tensor]:
    """Every metric of each image: name -> (B,)."""
    loss, values_of = image_terms(terms, recon, images)
    similarity = per_image(ssim(as_rgb(recon), as_rgb(images)), len(images))
    values = {"loss": loss, "psnr": color_psnr(recon, images, OFF_BY_ONE_DB), "ssim": similarity}
    for term in terms.image:
        values[_name_of(term)] = values_of[term.name]
        if isinstance(term.function, PerceptualLoss):
            values["lpips"] = values_of[term.name]
    if (of_alpha := alpha_psnr(recon, images, OFF_BY_ONE_DB)) is not None:
        values["psnr_alpha"] = of_alpha
    return values


def color_psnr(recon: Tensor, images: Tensor, limit: float = math.inf) -> Tensor:
    """PSNR of each image (B, C, H, W) in RGB, each up to a limit in dB: -> (B,) fp64."""
    recon = recon.clamp(-1, 1)  # colors are stored before they are over a background
    return per_image(psnr(as_rgb(recon), as_rgb(images)).clamp(max=limit), len(images))


def alpha_psnr(recon: Tensor, images: Tensor, limit: float = math.inf) -> Tensor | None:
    """PSNR of the alpha of each image (B, C, H, W), each up to a limit in dB: -> (B,) fp64; None without."""
    if images.shape[1] != 4:
        return None
    return psnr(recon[:, 3:], images[:, 3:]).clamp(max=limit)


def _total(values: list[Tensor]) -> tuple[float, int]:
    """Sum and count; only here does the host wait for the device."""
    if not values:
        return 0.0, 0
    whole = torch.cat(values)
    return whole.sum().item(), whole.numel()
