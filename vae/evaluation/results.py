"""Everything one comparison measured, as plain data: what tables, JSON, CSV and the page are made from.

A value that could not be had is None, and `missing` says why: never zero. Images for the page lie as files
in a folder beside the results and are named here by their path.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
ERROR_GAIN = 8  # brightness factor of error maps, as on the trainer's sample grids; also in report.css


@dataclass(frozen=True)
class Protocol:
    """How every VAE was measured, the same for all."""

    data_path: str
    images: int  # the same ones at every size and for every VAE
    sizes: tuple[int, ...]  # px, side of the square crops; 0: whole images
    crop: str  # how an image becomes a square, in words
    posterior: str  # "mode" or "sample"
    rounding: str  # in words
    dtype: str
    device: str  # its name
    batch_size: int  # images encoded and decoded at once, which speed and memory depend on
    perceptual_net: str | None  # of LPIPS; None: not measured
    seed: int


@dataclass
class LatentFacts:
    """The latent of one VAE over all images of the last size."""

    channels: int
    downsampling: int
    mean: list[float]  # per channel, of sampled latents
    std: list[float]
    kl_nats: float  # per image, mean over images
    dead_channels: list[int]  # that carry nothing: see vae/evaluation/latents.py
    dead_share: float  # of the channels


@dataclass
class Equivariance:
    """What one transform of the latents costs against the same transform of the image; PSNR in dB."""

    latents: float  # decode(transform(encode(x))) against transform(x)
    images: float  # decode(encode(transform(x))) against transform(x), to compare with


@dataclass
class GridArtefact:
    """What the sampling grid adds to an image of one colour: see vae/evaluation/probes.py."""

    levels: float  # root mean square of the pattern that repeats with the grid, in 8-bit levels
    share: float | None  # of all that is no constant; None: the reconstruction is constant


@dataclass
class SizeResult:
    """One VAE at one size."""

    size: int  # px; 0: whole images
    metrics: dict[str, float | None]  # psnr, ssim, ms_ssim, lpips, rfid: mean over images, rfid over the set
    per_image: dict[str, dict[str, float | None]]  # image's name -> metric -> value
    encode_images_per_s: float | None = None
    decode_images_per_s: float | None = None
    encode_peak_bytes: int | None = None
    decode_peak_bytes: int | None = None


@dataclass
class Sample:
    """One image kept for the page, 8-bit PNG files of the last size; the same images for every VAE."""

    name: str  # the image's name, as given by the user: to be escaped
    original: Path
    recon: Path
    error: Path  # |recon - original|, brightened
    latents: list[Path]  # one grey image per channel; none of a codec
    metrics: dict[str, float | None]
    why: str  # "worst", "typical" or "best" by the mean PSNR of all VAEs


@dataclass
class VaeResult:
    """One VAE, or one classic codec as a sanity row."""

    name: str  # unique in the comparison
    path: str
    kind: str  # checkpoint, diffusers, compvis, or codec
    sizes: list[SizeResult] = field(default_factory=list)
    latents: LatentFacts | None = None
    equivariance: dict[str, Equivariance] = field(default_factory=dict)  # turn_90, scale_0.5, ...
    grid_artefacts: dict[str, GridArtefact] = field(default_factory=dict)  # by colour
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
    unusable: dict[str, str]  # image's name -> why it was left out
    schema_version: int = SCHEMA_VERSION


def mean_psnr(values: Sequence[float | None]) -> float:
    """Mean over several VAEs for one image; -1 if one of them has no value, which ranks the image hardest."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else -1.0


def as_json(results: Results, folder: Path) -> dict[str, Any]:
    """Results as plain JSON values, paths as text from `folder` on."""
    return _plain(asdict(results), folder)


def _plain(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner, folder) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, folder) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON knows no NaN
    return value.relative_to(folder).as_posix() if isinstance(value, Path) else value
