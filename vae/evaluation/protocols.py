"""How images are cut and metrics computed: our way, and the ways of published figures, as their code does it.

va-vae  hustvl/LightningDiT, evaluate_tokenizer.py
dc-ae   mit-han-lab/efficientvit, efficientvit/aecore/evaluator.py (DMCrop is the crop of guided-diffusion)
sgm     lavinal712/AutoencoderKL, eval.py, a trainer built on Stability's generative-models

All were read in November 2026. rFID is torch-fidelity's in every protocol; va-vae and sgm use pytorch-fid,
which resizes otherwise, and dc-ae compares with statistics of its own. docs/evaluate.md has the table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torchvision.transforms.functional as TF
from PIL import Image
from torch import Tensor

from vae.evaluation.metrics import ssim
from vae.images.psnr import PEAK, psnr

# (H, W, 3) uint8 and the size -> (3, size, size) uint8, or floats in [-1, 1]
Cut = Callable[[np.ndarray, int], Tensor]


ImageMetric = Callable[[Tensor, Tensor], Tensor]  # reconstructions and images in about [-1, 1] -> (B,)


@dataclass(frozen=True)
class Rules:
    """How an image becomes a square, and which values the metrics see."""

    crop: str  # description of `cut`
    cut: Cut
    rounding: str = "reconstructions clamped and rounded to 8 bit"
    psnr: ImageMetric = psnr
    ssim: ImageMetric = ssim
    lpips_8_bit: bool = True
    enlarges: bool = False  # images that are smaller than the size


def square(pixels: np.ndarray, size: int, crop: str) -> np.ndarray:
    """Center crop (size, size, 3) of (H, W, 3); the short side is first scaled to `size` if `crop` is resize.

    Pillow's bicubic filter averages over areas when it reduces an image.
    """
    height, width = pixels.shape[:2]
    if crop == "resize" and min(height, width) != size:
        width, height = (max(size, round(side * size / min(height, width))) for side in (width, height))
        image = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
        pixels = np.asarray(image)
    top, left = (height - size) // 2, (width - size) // 2
    return pixels[top : top + size, left : left + size]


def _adm_square(pixels: np.ndarray, size: int) -> Tensor:
    """Halved by 2 x 2 means while twice the size is left, then bicubic to the size, then the center."""
    image = Image.fromarray(pixels)
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    width, height = (round(side * scale) for side in image.size)
    scaled = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
    return tensor_of(square(scaled, size, "center"))


def _torchvision_square(pixels: np.ndarray, size: int) -> Tensor:
    """Resize and CenterCrop of a Pillow image: bilinear, 8 bit."""
    image = TF.center_crop(TF.resize(Image.fromarray(pixels), [size]), [size, size])
    return tensor_of(np.asarray(image))


def _float_square(pixels: np.ndarray, size: int) -> Tensor:
    """Resize and CenterCrop after ToTensor: bilinear, not rounded to 8 bit."""
    image = TF.resize(TF.to_tensor(Image.fromarray(pixels)), [size], antialias=True)
    return TF.center_crop(image, [size, size]) * 2 - 1


def tensor_of(pixels: np.ndarray) -> Tensor:
    """uint8 (3, H, W) of (H, W, 3)."""
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


RULES = {
    "resize": Rules(
        "short side scaled to the size (bicubic, area-averaged), center crop",
        lambda pixels, size: tensor_of(square(pixels, size, "resize")),
    ),
    "center": Rules("center crop, unscaled", lambda pixels, size: tensor_of(square(pixels, size, "center"))),
    "va-vae": Rules(
        "short side scaled (bilinear, floats), center crop",
        _float_square,
        "only PSNR of values rounded to 8 bit; SSIM of values from -1 to 1, which counts dark as negative",
        ssim=partial(ssim, rounded=False, reflect=True, zero=PEAK / 2),
        lpips_8_bit=False,
        enlarges=True,
    ),
    "dc-ae": Rules(
        "short side halved by means, then scaled (bicubic), center crop",
        _adm_square,
        ssim=partial(ssim, reflect=True),
        enlarges=True,
    ),
    "sgm": Rules(
        "short side scaled (bilinear), center crop",
        _torchvision_square,
        "nothing rounded to 8 bit; SSIM with uniform windows of 7 px",
        psnr=partial(psnr, rounded=False),
        ssim=partial(ssim, rounded=False, window="uniform"),
        lpips_8_bit=False,
        enlarges=True,
    ),
}


def rules_of(protocol: str, crop: str) -> Rules:
    """The rules of a published protocol, or ours with --crop."""
    return RULES[crop if protocol == "ours" else protocol]
