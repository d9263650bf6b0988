"""The results of a comparison as plain data, from which tables, JSON, CSV and the page are made.

A value that is not available is None, never zero, and `missing` contains the reason. Sample images are files
in a folder beside the results; the data contains their paths.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

SCHEMA_VERSION = 1
ERROR_GAIN = 8  # brightness factor of error maps, as on the trainer's sample grids; also in report.css


@dataclass(frozen=True)
class Metric:
    """A column of every table of quality: in the terminal, the CSV files and the report."""

    title: str
    decimals: int
    better: Literal["higher", "lower"]
    per_image: bool = True  # False: one value for the whole set


# In the order of the columns. vae/evaluation/measure.py measures them.
METRICS = {
    "psnr": Metric("PSNR dB", 2, "higher"),
    "psnr_alpha": Metric("PSNR of alpha dB", 2, "higher"),
    "ssim": Metric("SSIM", 4, "higher"),
    "ms_ssim": Metric("MS-SSIM", 4, "higher"),
    "lpips": Metric("LPIPS", 4, "lower"),
    "rfid": Metric("rFID", 3, "lower", per_image=False),
}
PER_IMAGE = tuple(name for name, metric in METRICS.items() if metric.per_image)


@dataclass(frozen=True)
class Protocol:
    """The settings with which every VAE was measured."""

    data_path: str
    images: int  # the same images for every size and every VAE
    sizes: tuple[int, ...]  # side of the square crops, px; 0: whole images
    crop: str  # description of how an image becomes a square
    posterior: str  # "mode" or "sample"
    dtype: str
    device: str  # name of the device
    batch_size: int  # images encoded and decoded at once; it affects speed and memory
    perceptual_net: str | None  # network of LPIPS; None: not measured
    seed: int
    exclude: str | None = None  # SHA-256 of the list of --exclude


@dataclass
class LatentFacts:
    """Statistics of one VAE's latents over all images at the last size."""

    channels: int
    downsampling: int
    mean: list[float]  # per channel, of sampled latents
    std: list[float]
    kl_nats_per_pixel: float | None  # of the image, mean over images; None: an encoder without a variance
    sigma_over_std: float  # posterior noise beside the spread of the means: see vae/evaluation/latents.py
    dead_channels: list[int]  # channels without information: see vae/evaluation/latents.py
    dead_share: float  # share of dead channels


@dataclass
class SizeResult:
    """One VAE at one size."""

    size: int  # px; 0: whole images
    metrics: dict[str, float | None]  # all METRICS; those of PER_IMAGE as means over images
    per_image: dict[str, dict[str, float | None]]  # image's name -> metric of PER_IMAGE -> value
    encode_images_per_s: float | None = None
    decode_images_per_s: float | None = None
    encode_peak_bytes: int | None = None
    decode_peak_bytes: int | None = None


@dataclass
class Sample:
    """One sample image as 8-bit PNG files at the last size; the same images for every VAE."""

    name: str  # name of the image file; not escaped
    original: Path
    recon: Path
    error: Path  # |recon - original| * ERROR_GAIN
    latents: list[Path]  # one grey image per channel; none without a network
    metrics: dict[str, float | None]
    why: str  # "worst", "typical" or "best" by the mean PSNR of all VAEs


@dataclass
class VaeResult:
    """One VAE, or a reconstruction without a network to compare it with: bicubic, JPEG or WebP."""

    name: str  # unique in the comparison
    path: str
    kind: str  # checkpoint, diffusers, compvis; without a network: baseline or codec
    sizes: list[SizeResult] = field(default_factory=list)
    latents: LatentFacts | None = None
    diffusability: dict[str, float | None] = field(default_factory=dict)  # by measure
    diagnosis: dict[str, float | None] = field(default_factory=dict)  # by vae.evaluation.diagnose.DEFECTS
    samples: list[Sample] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)  # the model's shape

    @property
    def is_network(self) -> bool:
        """Whether this is a VAE: only VAEs are ranked, timed and used to choose images."""
        return self.kind not in ("baseline", "codec")


@dataclass
class Results:
    """One comparison."""

    protocol: Protocol
    environment: dict[str, str]  # torch, device, date, versions
    vaes: list[VaeResult]
    missing: dict[str, str]  # metric -> why it is not available, and the remedy
    unusable: dict[str, str]  # image name -> why it was left out
    schema_version: int = SCHEMA_VERSION

    @property
    def networks(self) -> list[VaeResult]:
        """The VAEs, without what they are compared with."""
        return [vae for vae in self.vaes if vae.is_network]


def mean_of(values: Sequence[float | None]) -> float | None:
    """The mean of values; None if one of them is missing."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if len(known) == len(values) else None


def mean_psnr(values: Sequence[float | None]) -> float:
    """Mean over several VAEs for one image; -1 if one of them has no value, which ranks the image hardest."""
    mean = mean_of(values)
    return -1.0 if mean is None else mean


def as_json(results: Results, folder: Path) -> dict[str, Any]:
    """Results as plain JSON values, with paths relative to `folder`."""
    return _plain(asdict(results), folder)


def _plain(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner, folder) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, folder) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no NaN
    return value.relative_to(folder).as_posix() if isinstance(value, Path) else value
