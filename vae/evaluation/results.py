"""Everything one comparison measured, as plain data: what tables, JSON, CSV and the page are made from.

A value that could not be had is None, and `missing` says why: never zero. Pictures for the page lie as files
in a folder beside the results and are named here by their path.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Protocol:
    """How every VAE was measured, the same for all."""

    data_path: str
    images: int
    sizes: tuple[int, ...]  # px, side of the square crops; one table each
    crop: str  # how a picture becomes a square, in words
    posterior: str  # "mode" or "sample"
    rounding: str  # in words
    dtype: str
    device: str  # its name
    perceptual_net: str | None  # of LPIPS; None: not measured
    seed: int


@dataclass
class LatentFacts:
    """The latent of one VAE over all images of the largest size."""

    channels: int
    downsampling: int
    mean: list[float]  # per channel
    std: list[float]
    kl_nats: float | None  # per image, mean over images
    dead_share: float | None  # channels that carry nothing: their mean hardly varies over the data


@dataclass
class SizeResult:
    """One VAE at one size."""

    size: int  # px
    metrics: dict[str, float | None]  # psnr, ssim, ms_ssim, lpips, rfid: mean over images, rfid over the set
    per_image: dict[str, dict[str, float | None]]  # picture's name -> metric -> value
    encode_images_per_s: float | None = None
    decode_images_per_s: float | None = None
    encode_peak_bytes: int | None = None
    decode_peak_bytes: int | None = None


@dataclass
class Sample:
    """One picture kept for the page, 8-bit PNG files of the largest size."""

    name: str  # the picture's name, as given by the user: to be escaped
    original: Path
    recon: Path
    error: Path  # |recon - original|, brightened
    latents: list[Path]  # one grey picture per channel
    metrics: dict[str, float | None]
    why: str  # "worst", "best" or "typical"


@dataclass
class VaeResult:
    """One VAE, or one classic codec as a sanity row."""

    name: str  # unique in the comparison
    path: str
    kind: str  # checkpoint, diffusers, compvis, or codec
    sizes: list[SizeResult] = field(default_factory=list)
    latents: LatentFacts | None = None
    equivariance: dict[str, float | None] = field(default_factory=dict)  # transform -> PSNR in dB, see docs
    grid_artefact: dict[str, float | None] = field(default_factory=dict)  # colour -> share, see docs
    samples: list[Sample] = field(default_factory=list)
    curves: list[dict[str, Any]] = field(default_factory=list)  # records of metrics.jsonl beside a checkpoint
    config: dict[str, Any] = field(default_factory=dict)  # the model's shape


@dataclass
class Results:
    """One comparison."""

    protocol: Protocol
    environment: dict[str, str]  # torch, device, date, versions
    vaes: list[VaeResult]
    missing: dict[str, str]  # metric -> why it could not be had and what would mend it
    unusable: dict[str, str]  # picture's name -> why it was left out
    schema_version: int = SCHEMA_VERSION


def as_json(results: Results) -> dict[str, Any]:
    """Results as plain JSON values, paths as text."""
    return _plain(asdict(results))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value
