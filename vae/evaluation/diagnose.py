"""Visible defects of reconstructions: a grid, speckles, a colour cast, a border.

The error is reconstruction minus image, in levels of 8-bit values. A grid and speckles are measured where the
image is smooth: there they are visible, and there is little detail that a VAE could have lost instead.
Shapes: an RGB image is (3, H, W), like its reconstruction.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vae.evaluation.measure import Reconstruct
from vae.images.composites import as_rgb
from vae.images.pixels import as_float, as_uint8

# A pixel is smooth if the RMS of the image minus its mean over 5 x 5 px is at most this around it, in levels:
# the noise of a camera is 1 to 3 levels, an edge 10 and more.
SMOOTH_RMS = 3.0
SMOOTH_SHARE = 0.9  # of the pixels of a block of the spectrum
BLOCK = 32  # px, side of a block: four periods of 8 px
PERIODS = (2, 4, 8)  # px; an upsampling layer repeats its pattern with one of them
SPECKLE = 16.0  # levels by which a speckle differs from the median error around it
WINDOW = 5  # px, side of the surroundings of a speckle
AT_ONCE = 2**18  # pixels whose surroundings are in memory
BORDER = 8  # px
ROUNDS = 10  # of encoding and decoding
ROUND_IMAGES = 4  # so many images go through all rounds
ROUND_SIDE = 256  # px at most: the center of a larger image


@dataclass(frozen=True)
class Defect:
    """A measure, and the value from which on it is a defect."""

    title: str
    unit: str
    limit: float
    remedy: str


_GRID_REMEDY = "an upsampling layer repeats it: train on with LPIPS, and with a lower --adversarial_weight"
# docs/evaluate.md has what photographs reach without a defect.
DEFECTS = {
    **{f"grid_{p}": Defect(f"grid of {p} px", "levels", 0.5, _GRID_REMEDY) for p in PERIODS},
    "speckles": Defect("speckles", "per megapixel", 30.0, "use --dtype fp32; if they stay, train with mse"),
    "cast": Defect("colour cast", "levels", 2.5, "train on: the pixel loss removes it"),
    "cast_after_rounds": Defect(f"cast after {ROUNDS} rounds", "levels", 30.0, "encode once, or train on"),
    "border": Defect("border", "times the error inside", 1.2, "train on larger crops, or whole images"),
}


class DefectMeter:
    """Accumulates the measures of one VAE over images."""

    def __init__(self) -> None:
        self._power = torch.zeros(BLOCK, BLOCK, dtype=torch.float64)  # spectrum of the error
        self._blocks = 0  # of one channel
        self._speckles = 0
        self._smooth = 0  # pixels
        self._error = torch.zeros(3, dtype=torch.float64)
        self._pixels = 0
        self._border = 0.0  # sum of the logarithms of ratios
        self._images = 0

    def add(self, recon: Tensor, image: Tensor) -> None:
        """Add one image and its reconstruction, in [-1, 1]."""
        error = (recon - image) * 127.5
        grey = image.mean(0, keepdim=True) * 127.5
        detail = grey - _mean(grey, 5)
        smooth = (_mean(detail.square(), 9).sqrt() <= SMOOTH_RMS)[0]  # (H, W)
        self._error += error.double().sum((1, 2)).cpu()
        self._pixels += smooth.numel()
        self._smooth += int(smooth.sum())
        self._add_speckles(error, grey, smooth)
        if min(smooth.shape) >= BLOCK:
            self._add_spectra(error, smooth)
        if min(smooth.shape) > 4 * BORDER:
            self._border += _border_ratio(error, detail)
            self._images += 1

    def _add_speckles(self, error: Tensor, grey: Tensor, smooth: Tensor) -> None:
        spread = (_peak(error) + _peak(-error)).amax(0)  # at least the height; a median takes long
        height = _height(error, (spread >= SPECKLE) & (_peak(smooth[None].float())[0] > 0))
        found = (height >= SPECKLE) & (height == _peak(height[None])[0]) & smooth
        self._speckles += int((found & (_height(grey, found) < SPECKLE / 4)).sum())  # a star is no speckle

    def _add_spectra(self, error: Tensor, smooth: Tensor) -> None:
        window = torch.hann_window(BLOCK, device=error.device)
        window = window[:, None] * window
        for top in range(0, len(smooth) - BLOCK + 1, BLOCK // 2):
            share = smooth[top : top + BLOCK].float().mean(0).unfold(0, BLOCK, BLOCK // 2).mean(1)
            blocks = error[:, top : top + BLOCK].unfold(2, BLOCK, BLOCK // 2)[:, :, share >= SMOOTH_SHARE]
            blocks = blocks.transpose(1, 2).flatten(0, 1)  # of all channels: (3 * blocks, BLOCK, BLOCK)
            if not len(blocks):  # an FFT of none is an error
                continue
            spectra = torch.fft.fft2((blocks - blocks.mean((1, 2), keepdim=True)) * window)
            self._power += spectra.abs().square().double().sum(0).cpu() / window.sum().item() ** 2
            self._blocks += len(blocks)

    def measures(self) -> dict[str, float | None]:
        """The value of each of DEFECTS but `cast_after_rounds`; None if no image could be measured for it."""
        grids = _grids(self._power / self._blocks) if self._blocks else dict.fromkeys(PERIODS)
        return {
            **{f"grid_{period}": grids[period] for period in PERIODS},
            "speckles": self._speckles / self._smooth * 1e6 if self._smooth else None,
            "cast": (self._error / self._pixels).abs().max().item() if self._pixels else None,
            "border": math.exp(self._border / self._images) if self._images else None,
        }


def diagnose(reconstruct: Reconstruct, batches: Iterable[Tensor]) -> dict[str, float | None]:
    """The value of each of DEFECTS over images, uint8 (B, C, H, W), of which the first ones go all rounds."""
    meter = DefectMeter()
    after_rounds: list[Tensor] = []
    first = 0
    for images in batches:
        recons = reconstruct(images, range(first, first + len(images)))
        first += len(images)
        for image, recon in zip(images, recons, strict=True):
            if recon is None:
                continue
            meter.add(_rgb(recon), _rgb(image).to(recon.device))
            if len(after_rounds) < ROUND_IMAGES:
                after_rounds += _error_after_rounds(reconstruct, image)
    values = meter.measures()
    if after_rounds:
        values["cast_after_rounds"] = torch.stack(after_rounds).mean(0).abs().max().item()
    return {name: values.get(name) for name in DEFECTS}


def _error_after_rounds(reconstruct: Reconstruct, image: Tensor) -> list[Tensor]:
    """The mean error of each channel of the image's center after all rounds; empty if one of them fails."""
    top, left = (max(0, side - ROUND_SIDE) // 2 for side in image.shape[1:])
    center = image[:, top : top + ROUND_SIDE, left : left + ROUND_SIDE]
    result = center
    for _ in range(ROUNDS):
        (recon,) = reconstruct(result[None], range(1))
        if recon is None:
            return []
        result = as_uint8(recon).cpu()
    return [(_rgb(result) - _rgb(center.cpu())).double().mean((1, 2)) * 127.5]


def _rgb(image: Tensor) -> Tensor:
    """An image (C, H, W), uint8 or floats, as RGB in [-1, 1]; one with alpha is over black."""
    return as_rgb(as_float(image)[None])[0].clamp(-1, 1)


def _mean(values: Tensor, side: int) -> Tensor:
    """The mean of the square around each pixel, without what is outside the image: (C, H, W)."""
    return F.avg_pool2d(values[None], side, 1, side // 2, count_include_pad=False)[0]


def _padded(values: Tensor) -> Tensor:
    return F.pad(values[None], (WINDOW // 2,) * 4, mode="replicate")[0]


def _peak(values: Tensor) -> Tensor:
    """The maximum of the surroundings of each pixel: (C, H, W)."""
    rows = _padded(values).unfold(1, WINDOW, 1).amax(-1)
    return rows.unfold(2, WINDOW, 1).amax(-1)  # on a CPU six times as fast as max_pool2d


def _height(values: Tensor, at: Tensor) -> Tensor:
    """The difference from the median around each pixel of `at` (H, W), the largest channel; 0 elsewhere."""
    windows = _padded(values).unfold(1, WINDOW, 1).unfold(2, WINDOW, 1)  # a view
    heights = values.new_zeros(at.shape)
    for pixels in at.nonzero().split(AT_ONCE):
        y, x = pixels.unbind(1)
        medians = windows[:, y, x].flatten(2).median(2).values
        heights[y, x] = (values[:, y, x] - medians).abs().amax(0)
    return heights


def _grids(power: Tensor) -> dict[int, float]:
    """RMS of the grid of each period: its frequencies of a spectrum (BLOCK, BLOCK) above those around."""
    offsets = range(-2, 3)  # a Hann window spreads a frequency by one
    ring = [(i, j) for i in offsets for j in offsets if max(abs(i), abs(j)) == 2]
    excess = power - torch.stack([power.roll(offset, (0, 1)) for offset in ring]).mean(0)
    excess[0, 0] = 0.0
    grids = {}
    for period in PERIODS:
        at = excess[:: BLOCK // period, :: BLOCK // period]
        grids[period] = math.sqrt(max(0.0, at.sum().item()))
        at.zero_()  # the frequencies of 2 px are those of 4 px too
    return grids


def _border_ratio(error: Tensor, detail: Tensor) -> float:
    """The logarithm of the RMS error of the outer 8 px over that inside, each beside the image's detail."""
    squares = torch.stack([error.square().mean(0), detail[0].square() + 1]).double()  # 1: where all is flat
    inside = squares[:, BORDER:-BORDER, BORDER:-BORDER].sum((1, 2))
    outside = squares.sum((1, 2)) - inside
    if min(inside[0], outside[0]) <= 0:
        return 0.0
    return 0.5 * torch.log(outside[0] / outside[1] / (inside[0] / inside[1])).item()
