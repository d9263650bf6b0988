"""Measuring the exported weights and two baselines on the validation images, and the results over a run."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from vae.config.options import DataConfig
from vae.data.dataset import Batch
from vae.data.exclude_list import Excluded
from vae.data.image_files import ImageSet
from vae.data.loading import load_validation
from vae.evaluation.latents import NOISE_SEED, NoiseSums, noise_curve
from vae.evaluation.metrics import Sums, baseline_sums, reconstruction_sums
from vae.evaluation.results import METRICS
from vae.images.pixels import OFF_BY_ONE_DB, to_float
from vae.inference.codec import decode_latents, encode_images
from vae.model.autoencoder import AutoencoderKL
from vae.ops.noise import keyed_normal
from vae.step import Networks, network_input
from vae.system import console
from vae.system.console import printable
from vae.training.distributed import Distributed

NOISE_IMAGES = 4  # images that are decoded with noise
NOISES = (0.1, 0.2, 0.4)  # this noise, in standard deviations of each channel
FEW_IMAGES = 32  # up to this number, starting worker processes takes longer than decoding

Metrics = dict[str, float]


@dataclass(frozen=True)
class ValidationSet:
    """The validation images of a run: those at `indices` of a set."""

    images: ImageSet
    indices: Sequence[int]
    data: DataConfig = field(default_factory=DataConfig)
    channels: int = 3  # of an image
    num_workers: int = 0
    reported: set[str] = field(default_factory=set)  # unusable files that were reported
    excluded: Excluded = Excluded()  # noqa: RUF009 - never modified

    @property
    def count(self) -> int:
        """The number of the images."""
        return len(self.indices)

    def sample(self, count: int) -> "ValidationSet":
        """Choose at most `count` of the images."""
        return replace(self, indices=self.images.sample(min(count, self.count)).tolist())

    def record(self) -> Any:
        """Return the entry of the images in `split.json`."""
        record = self.images.record()
        if isinstance(record, dict):
            return self.excluded.without({**record, "used": self.count})
        return self.excluded.without([record[index] for index in self.indices])

    def share(self, dist: Distributed) -> Sequence[int]:
        """Return the indices of this process's images."""
        indices = [index for index in self.indices if index not in self.excluded]
        return indices[dist.rank :: dist.world_size]

    def batches(
        self, image_size: int, batch_size: int, dist: Distributed, while_waiting: Callable[[], None]
    ) -> Iterator[Batch]:
        """Yield centre crops of this process's share: uint8 (B, C, S, S).

        `while_waiting` is called during waits for images, and may end them with an exception.
        """
        indices = self.share(dist)
        loader = load_validation(
            self.images,
            indices,
            self.data,
            image_size=image_size,
            batch_size=batch_size,
            channels=self.channels,
            num_workers=self.num_workers if len(indices) > FEW_IMAGES else 0,
            while_waiting=while_waiting,
        )
        for batch in loader:
            for rejection in batch.rejected:
                if rejection.name not in self.reported:
                    self.reported.add(rejection.name)
                    console.info(f"validation image skipped: {rejection}")
            if len(batch.images):
                yield batch


def mode_reconstruction(
    model: AutoencoderKL, networks: Networks, noise: NoiseSums | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from images (B, C, H, W) in [-1, 1] to reconstructions by the posterior's mode.

    `noise` gets the posteriors.
    """

    @torch.no_grad()
    def reconstruct(images: torch.Tensor) -> torch.Tensor:
        recon, mean, logvar = model(network_input(images, networks, networks.eval_dtype))
        if noise is not None:
            noise.add(mean, logvar)
        return recon

    return reconstruct


MAX_SLICES = 100  # more labels are names of single images rather than of groups


@dataclass
class Slices:
    """The labels of the validation images."""

    labels: list[str] = field(default_factory=list)  # of all processes, sorted; empty: no slices
    of_image: dict[int, str] = field(default_factory=dict)  # by index, of this process's images

    @classmethod
    def of(cls, labels_of_images: dict[int, str | None], dist: Distributed) -> "Slices":
        """Return the slices of all processes, from the labels of this one's images."""
        of_image = {index: label for index, label in labels_of_images.items() if label}
        labels = dist.all_gather_set(set(of_image.values()))
        if not 1 < len(labels) <= MAX_SLICES:
            return cls()
        return cls(sorted(labels), of_image)

    def sums(self, indices: Sequence[int], psnr: Sequence[float]) -> Sums:
        """Sum the PSNR of the images at these indices by label."""
        totals = dict.fromkeys(self.labels, (0.0, 0))
        for index, value in zip(indices, psnr, strict=True):
            if label := self.of_image.get(index):
                total, count = totals[label]
                totals[label] = total + value, count + 1
        return totals


def slice_record(sums: Sums) -> dict[str, float | str]:
    """Record the number of slices, the mean over their PSNRs, and the worst one, from their sums."""
    psnr = {label: total / count for label, (total, count) in sums.items() if count}
    if not psnr:
        return {}
    worst = min(psnr, key=lambda label: (psnr[label], label))
    return {
        "slices": len(psnr),
        "slice_mean_psnr": sum(psnr.values()) / len(psnr),
        "slice_worst_psnr": psnr[worst],
        "worst_slice": worst,
    }


def slice_text(record: dict[str, float | str]) -> str:
    """Return the worst slice, for the line of a validation."""
    if not record:
        return ""
    worst = printable(str(record["worst_slice"]))
    psnr = record["slice_worst_psnr"]
    return f" | worst of {record['slices']} labels: {worst}, {psnr:.2f} dB"


# ---- Sums over the images of batches; all processes add theirs ---------------------------------------


@dataclass(frozen=True)
class ReconstructionSums:
    """Sums over the validation images of the metrics, of the PSNR by label, and of the latents' noise."""

    metrics: Sums
    psnr_by_label: Sums
    noise: NoiseSums

    def all_reduced(self, dist: Distributed) -> "ReconstructionSums":
        """Add the sums of all processes."""
        noise = NoiseSums(
            dist.all_reduce(self.noise.sums.cpu()), int(dist.all_reduce_scalars(self.noise.count)[0])
        )
        return ReconstructionSums(
            all_reduce_sums(self.metrics, dist), all_reduce_sums(self.psnr_by_label, dist), noise
        )


def sums_of_reconstructions(
    model: AutoencoderKL, networks: Networks, slices: Slices, batches: Iterable[Batch]
) -> ReconstructionSums:
    """Measure the reconstructions of the images, and the noise of their latents."""
    each_psnr: list[float] = []
    indices: list[int] = []
    noise = NoiseSums.begin(model.config.z_channels)

    def images() -> Iterator[torch.Tensor]:
        for batch in batches:
            indices.extend(batch.indices.tolist())
            yield to_float(batch.images)

    reconstruct = mode_reconstruction(model, networks, noise)
    sums = reconstruction_sums(reconstruct, images(), networks.terms, each_psnr)
    return ReconstructionSums(sums, slices.sums(indices, each_psnr), noise)


def sums_with_noise(
    model: AutoencoderKL, dtype: torch.dtype, channel_std: torch.Tensor, batches: Iterable[Batch]
) -> Sums:
    """Sum the PSNR of images decoded from latents with noise, as the errors of a diffusion model leave it.

    `channel_std`: (C,) of the latents. Each image has the same noise every time.
    """
    totals = {f"psnr_noise_{tau:g}": (0.0, 0) for tau in NOISES}
    for batch in batches:
        images = to_float(batch.images)
        latents = encode_images(model, images, dtype=dtype).mode().float()
        draws = [
            keyed_normal(latents.shape[1:], NOISE_SEED, index, device=latents.device)
            for index in batch.indices.tolist()
        ]
        noise = torch.stack(draws) * channel_std[:, None, None].to(latents)
        decode = partial(decode_latents, model, size=images.shape[2:], dtype=dtype)
        curve = noise_curve(decode, latents, noise, images, NOISES).clamp(max=OFF_BY_ONE_DB)
        for name, value in zip(totals, curve.sum(1).tolist(), strict=True):
            totals[name] = totals[name][0] + value, totals[name][1] + len(images)
    return totals


def sums_of_baselines(networks: Networks, factor: int, batches: Iterable[Batch]) -> dict[str, Sums]:
    """Measure two baselines: the mean colour, and area reduction by `factor` with bicubic enlargement."""
    return baseline_sums((to_float(batch.images) for batch in batches), networks.terms, factor)


def all_reduce_sums(sums: Sums, dist: Distributed) -> Sums:
    """Add the sums of all processes, which have the same names."""
    names = sorted(sums)
    if not names:
        return {}
    totals = dist.all_reduce_scalars(*(number for name in names for number in sums[name]))
    pairs = zip(totals[::2], totals[1::2], strict=True)
    return {name: (total, int(count)) for name, (total, count) in zip(names, pairs, strict=True)}


def validation_line(when: str, metrics: Metrics, precision: str, baseline: Metrics, factor: int) -> str:
    """One line that compares a validation with the bicubic baseline of the same downsampling factor."""
    vae, bicubic = (metrics_text(values, ", ") or "no usable image" for values in (metrics, baseline))
    return f"{when}: VAE {vae}, {precision} | {factor}x bicubic {bicubic}"


def metrics_text(metrics: Metrics, separator: str) -> str:
    """Return the loss and the metrics of a validation with their names and units; empty without images."""
    parts = [f"loss {metrics['loss']:.4f}"] if "loss" in metrics else []
    for name, metric in METRICS.items():
        if name in metrics:
            title, unit, _ = metric.title.partition(" dB")
            parts.append(f"{title} {metrics[name]:5.{metric.decimals}f}{unit}")
    return separator.join(parts)


# ---- Results over the run ------------------------------------------------------------------------------


SMALL_RISE = 0.01  # of the loss above the start of a stage: no reason to change anything (docs/training.md)


@dataclass
class History:
    """The results of a run so far; the validation with the lowest loss is the best one."""

    best: dict[str, float] = field(default_factory=dict)  # metrics of the best validation, with its epoch
    best_is_start: bool = False  # of a stage: before its first step
    loss: str = ""  # the weighted terms whose sum they compare
    best_checkpoint: str | None = None  # file name of the saved epoch, or of the start, with the lowest loss
    best_checkpoint_loss: float | None = None
    planned_step: int = -1  # optimizer step of the last one that was due
    before_adversarial: str | None = None  # the best checkpoint before the adversarial phase
    without_gain: int = 0  # validations since the best one, for --early_stopping
    start: dict[str, float] = field(default_factory=dict)  # metrics before the first step of stage or phase
    is_adversarial: bool = False  # whether the adversarial phase has begun
    rise_reported: bool = False  # since `start`
    quick_best: dict[str, float] = field(default_factory=dict)  # of the quick validations
    quick_has_risen: bool = False  # the loss of the last one

    def begin_stage(self) -> None:
        """Forget what belongs to the previous stage."""
        self.without_gain, self.rise_reported = 0, False
        self.start = {}

    def begin_phase(self, is_adversarial: bool, metrics: Metrics) -> None:
        """Begin the adversarial phase, or end it, with the validation before its first step."""
        self.is_adversarial, self.rise_reported = is_adversarial, False
        self.start = metrics

    def add_start(self, metrics: Metrics, checkpoint: str | None) -> None:
        """Add the validation before the stage's first step, below which later ones must be.

        `checkpoint` is the file in the output folder with the weights that the stage begins with.
        """
        self.start = metrics
        self._add(metrics, is_start=True)
        if checkpoint is not None:
            self.add_checkpoint(checkpoint, metrics)

    def add_epoch(self, metrics: Metrics) -> bool:
        """Add the validation at the end of an epoch; whether it is the best one."""
        is_best = self._add(metrics, is_start=False)
        if is_best or not is_in_ramp(metrics):
            self.without_gain = 0 if is_best else self.without_gain + 1
        return is_best

    def _add(self, metrics: Metrics, is_start: bool) -> bool:
        """Whether a validation is the best one of its image size and phase; none is within the ramp."""
        if is_in_ramp(metrics):
            return False
        if self.is_comparable(metrics):
            if loss_of(metrics) >= loss_of(self.best):
                return False
        else:
            if adversarial_share(metrics) and not adversarial_share(self.best):
                self.before_adversarial = self.best_checkpoint
            self.best_checkpoint_loss = None
        self.best, self.best_is_start = metrics, is_start
        return True

    def is_comparable(self, metrics: Metrics) -> bool:
        """Whether a validation has the image size and the phase of the best one."""
        same_size = self.best.get("image_size") == metrics.get("image_size")
        return same_size and adversarial_share(self.best) == adversarial_share(metrics)

    def add_checkpoint(self, name: str, metrics: Metrics) -> None:
        """Add a checkpoint with the validation of its weights."""
        best = math.inf if self.best_checkpoint_loss is None else self.best_checkpoint_loss
        if loss_of(metrics) < best and not is_in_ramp(metrics):
            self.best_checkpoint = name
            self.best_checkpoint_loss = metrics["loss"]

    def rise_warning(self, metrics: Metrics, remedy: str, limit: float) -> str | None:
        """Return the warning that training has raised the loss above the start, once in a stage or phase.

        An adversarial phase costs PSNR and SSIM: if LPIPS is not measured, a rise by a share `limit` counts.
        """
        is_adversarial = adversarial_share(metrics) > 0
        rise = limit if is_adversarial and "lpips" not in metrics else SMALL_RISE
        if (
            not self.start
            or self.rise_reported
            or "loss" not in metrics
            or not is_worse(metrics, self.start, rise)
        ):
            return None
        self.rise_reported = True
        if is_adversarial:
            return (
                "the adversarial loss has made every metric worse: before it, "
                f"{metrics_text(self.start, ', ')}; now {metrics_text(metrics, ', ')}: lower "
                "--adversarial_weight, or train without it"
            )
        return (
            f"the validation loss {metrics['loss']:.4f} is above the {self.start['loss']:.4f} at the start "
            f"of this stage: if this persists, {remedy}"
        )

    def regression_warning(self, metrics: Metrics, limit: float) -> str | None:
        """Add a quick validation; the warning if its loss has just risen by more than a share `limit`.

        The best one is replaced if it is of another image size, phase or number of images.
        """
        was_adversarial, is_adversarial = (adversarial_share(m) > 0 for m in (self.quick_best, metrics))
        other = any(self.quick_best.get(name) != metrics[name] for name in ("image_size", "images"))
        if other or was_adversarial != is_adversarial:
            self.quick_best, self.quick_has_risen = metrics, False
            return None
        rose_before = self.quick_has_risen
        best = loss_of(self.quick_best)
        self.quick_has_risen = is_worse(metrics, self.quick_best, limit)
        if loss_of(metrics) < best:
            self.quick_best = metrics
        if rose_before or not self.quick_has_risen:
            return None
        return (
            f"the loss of the quick validation is {loss_of(metrics):.4f}, more than --regression_share "
            f"{limit:g} above its lowest ({best:.4f}): all validation images are measured now; if they "
            "confirm it, lower --learning_rate, or resume from the best checkpoint"
        )


def adversarial_share(metrics: Metrics) -> float:
    """Return the adversarial share of the last step of the validated weights: 0 before the phase."""
    return metrics.get("adversarial_share", 0.0)


def is_in_ramp(metrics: Metrics) -> bool:
    """Whether the adversarial loss was on its way to its weight: nothing is compared then."""
    return 0 < adversarial_share(metrics) < 1


def is_worse(metrics: Metrics, before: Metrics, rise: float) -> bool:
    """Whether the loss is higher by more than the share `rise`.

    In an adversarial phase, which raises it on purpose, also PSNR, SSIM and LPIPS must all be worse.
    """
    if loss_of(metrics) <= loss_of(before) * (1 + rise):
        return False
    measured = [name for name in ("psnr", "ssim", "lpips") if name in metrics and name in before]
    signs = {"psnr": -1, "ssim": -1, "lpips": 1}
    all_worse = all(not signs[name] * (metrics[name] - before[name]) <= 0 for name in measured)  # also NaN
    return all_worse or not adversarial_share(metrics)


def loss_of(metrics: Metrics) -> float:
    """Return the loss for comparisons: above all others if no image was usable or a value was not finite."""
    loss = metrics.get("loss", math.nan)
    return math.inf if math.isnan(loss) else loss
