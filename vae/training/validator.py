"""The validations of a stage, quick ones in between, and grids of sample reconstructions."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from vae.config.options import Config, RunConfig
from vae.data.dataset import Batch
from vae.device import is_out_of_memory
from vae.evaluation.image_set import square
from vae.evaluation.metrics import bicubic_baseline, color_psnr, means
from vae.images.composites import alphas, as_rgb, difference, over_checkerboard
from vae.images.decoding import decode_image
from vae.images.folder import list_images
from vae.images.formats import BadImageError
from vae.images.pixels import psnr, to_float, to_uint8
from vae.model.autoencoder import AutoencoderKL
from vae.ops.kernel_check import DTYPE_NAMES
from vae.step import Networks
from vae.system import console
from vae.system.errors import DataError, UserError
from vae.training.liveness import Liveness, LoadingStoppedError
from vae.training.logbook import Logbook
from vae.training.stage_memory import OomRetry
from vae.training.stages import Stage
from vae.training.state import TrainingState
from vae.training.stepper import Stepper
from vae.training.validation import (
    NOISE_IMAGES,
    Metrics,
    Slices,
    ValidationSet,
    all_reduce_sums,
    mode_reconstruction,
    slice_record,
    slice_text,
    sums_of_baselines,
    sums_of_reconstructions,
    sums_with_noise,
    validation_line,
)

# A channel with this noise carries at most 0.5 * log2(1 + 1 / 0.5**2) = 1.2 bit per value (Shannon 1948).
MAX_SIGMA_OVER_STD = 0.5
Source = Callable[[], Iterator[Batch]]  # batches from the first one on; called again if memory runs out
_Measured = TypeVar("_Measured")


@dataclass
class Validator:
    """Validates the weights of a stage, writes records and prints what they mean."""

    images: ValidationSet
    stepper: Stepper
    logbook: Logbook
    alive: Liveness
    options: RunConfig
    baselines: dict[str, Metrics] = field(default_factory=dict)  # by name
    _batch_size: int | None = None  # if memory ran out with the micro-batch
    _slices: Slices | None = None  # from the first validation on
    # On the CPU, by their number and the batch size.
    _few: dict[tuple[int, int], list[Batch]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state = self.stepper.state
        self.schedule = self.stepper.schedule
        self.retry = self.stepper.retry
        self.networks = self.retry.networks
        self.dist = self.retry.dist

    def measure_baselines(self) -> None:
        """Measure both baselines on all validation images, and write their records."""
        compute = partial(sums_of_baselines, self.networks, self.state.autoencoder.downsampling)
        sums = self._measured(compute, self._batches)
        self.baselines = {name: means(all_reduce_sums(sums[name], self.dist)) for name in sorted(sums)}
        val_path = self.images.data.val_path
        if val_path and not any(metrics["images"] for metrics in self.baselines.values()):
            raise DataError(f"--val_path {val_path}: none of its images can be used, see above: give others")
        values = {"image_size": self.state.stage.image_size}
        for name, metrics in self.baselines.items():
            self.logbook.record("baseline", self.state.position.step, {"codec": name, **values, **metrics})

    def validate(self, when: str, epoch: float) -> Metrics:
        """Validate the weights, write a record and print a line; warn if training has made them worse."""
        state = self.state
        started = time.perf_counter()
        model, dtype = state.eval_model, self.networks.eval_dtype
        compute = partial(sums_of_reconstructions, model, self.networks, self._all_slices())
        sums = self._measured(compute, self._batches).all_reduced(self.dist)
        measured = means(sums.metrics) | sums.noise.facts()
        speed = _speed(measured, started)
        of_slices = slice_record(sums.psnr_by_label)
        if sums.noise.count:
            channel_std, _ = sums.noise.channel_facts()
            few = partial(self._few_batches, NOISE_IMAGES)
            noisy = self._measured(partial(sums_with_noise, model, dtype, channel_std), few)
            with_noise = means(all_reduce_sums(noisy, self.dist))
            measured |= {name: with_noise[name] for name in with_noise if name != "images"}
        metrics = {"epoch": epoch, **self._comparable(), **measured}
        state.last_validation = metrics
        state.validated_step = state.position.step
        precision = DTYPE_NAMES[dtype]
        values = {**metrics, "precision": precision, **speed, **of_slices}
        self.logbook.record("validation", state.position.step, values)
        self.logbook.draw_results()
        baseline = self.baselines.get("bicubic", {})
        line = validation_line(when, metrics, precision, baseline, state.autoencoder.downsampling)
        console.info(line + slice_text(of_slices))
        self._warn(metrics)
        return metrics

    def _warn(self, metrics: Metrics) -> None:
        """Warn that the posterior's noise hides the latents, or that the loss is above the stage's start."""
        state = self.state
        loss = self.schedule.loss
        ratio = metrics.get("sigma_over_std", 0.0)
        can_change = self.schedule.optim.train_part != "decoder"
        if ratio > MAX_SIGMA_OVER_STD and can_change and not state.noise_reported:
            state.noise_reported = True
            flag = "variance_target" if loss.variance_weight > 0 else "kl_weight"
            console.warning(
                f"the noise of the latents is {ratio:.2f} times as large as their spread (more than "
                f"{MAX_SIGMA_OVER_STD}), so they lose what the image contains: lower --{flag} (now "
                f"{getattr(loss, flag):g})"
            )
        limit = self.options.regression_share
        if warning := state.history.rise_warning(metrics, self.schedule.remedy, limit):
            console.warning(warning)

    def validate_quickly(self) -> bool:
        """Measure a few images and write a record; whether their loss has just risen: then it warns.

        Their crops stay in main memory from the first time on: decoding would cost more than measuring.
        """
        state = self.state
        started = time.perf_counter()
        compute = partial(sums_of_reconstructions, state.eval_model, self.networks, Slices())
        few = partial(self._few_batches, self.options.quick_val_images)
        sums = self._measured(compute, few).all_reduced(self.dist)
        measured = means(sums.metrics) | sums.noise.facts()
        metrics = {**self._comparable(), **measured}
        values = {**metrics, **_speed(measured, started)}
        self.logbook.record("quick_validation", state.position.step, values)
        warning = state.history.regression_warning(metrics, self.options.regression_share)
        if warning:
            console.warning(f"step {state.position.step}: {warning}")
        return warning is not None

    def _comparable(self) -> Metrics:
        """Values that comparable validations share: image size and, with an adversarial loss, the phase."""
        values: Metrics = {"image_size": self.state.stage.image_size}
        if self.schedule.loss.adversarial_weight:
            share = self.schedule.adversarial_share(self.state.position.step)
            values["adversarial_share"] = share if self.state.history.is_adversarial else 0.0
        return values

    def _all_slices(self) -> Slices:
        """Return the slices of the validation set, whose labels are read once in a stage."""
        if self._slices is None:
            labels = {index: self.images.images.label(index) for index in self.images.share(self.dist)}
            self._slices = Slices.of(labels, self.dist)
        return self._slices

    def _batches(self) -> Iterator[Batch]:
        return map(self._on_device, self._loaded(self.images))

    def _few_batches(self, count: int) -> Iterator[Batch]:
        key = count, self._size()
        if key not in self._few:
            self._few[key] = list(self._loaded(self.images.sample(count)))
        return map(self._on_device, self._few[key])

    def _loaded(self, images: ValidationSet) -> Iterator[Batch]:
        size = self.state.stage.image_size
        for batch in images.batches(size, self._size(), self.dist, self.alive.check):
            self.alive.beat()
            yield batch

    def _on_device(self, batch: Batch) -> Batch:
        self.alive.beat()
        return replace(batch, images=batch.images.to(self.dist.device, non_blocking=True))

    def _size(self) -> int:
        return self._batch_size or self.retry.settings.micro_batch

    def _measured(self, compute: Callable[[Iterable[Batch]], _Measured], source: Source) -> _Measured:
        """Call `compute` with the batches of this process, which become smaller if memory runs out.

        If that fails on one process, all of them raise an error.
        """
        failure = None
        measured = None
        while measured is None and failure is None:
            try:
                self.retry.end_graph()
                measured = compute(source())
                continue
            except (UserError, LoadingStoppedError) as error:
                failure = error
                continue
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            # Not within the except clause: there, the exception keeps the tensors of the batch alive.
            failure = self._reduce_memory()
        if self.dist.all_reduce_scalars(failure is not None)[0] or measured is None:
            raise failure or UserError("validation failed on another process, which reports the reason")
        return measured

    def _reduce_memory(self) -> UserError | None:
        """Halve the batch after memory ran out; the error if it has one image."""
        retry = self.retry
        size = self._size()
        retry.settings.out_of_memory += 1
        if size == 1:
            image_size = self.state.stage.image_size
            line = f"out of memory in a validation with one image of {image_size} px"
            return UserError(f"{line}: lower --image_size, and resume with: {retry.resume_command}")
        self._batch_size = size // 2
        retry.free_memory()
        console.info(f"out of memory: validation batch lowered to {size // 2}; same metrics")
        return None


def _speed(measured: Metrics, started: float) -> dict[str, float]:
    """Return the throughput of a validation that began at `started`, with decoding and all processes."""
    return {"images_per_second": measured["images"] / max(1e-9, time.perf_counter() - started)}


# ---- Sample grids --------------------------------------------------------------------------------------


GRID_IMAGES = 4  # validation images in a grid
GRID_SIDE = 512  # px: of larger crops, the grid shows the centre
MIN_TILE = 160  # px: smaller tiles are enlarged, so that the titles fit
ERROR_GAIN = 8
GAP = 4  # px between columns
TEXT_HEIGHT = 24  # px: the titles above all rows, and the caption below each row
FONT_SIZE = 15

MAX_SAMPLE_IMAGES = 8


@dataclass(frozen=True)
class SampleGrids:
    """Writes grids of the images of --sample_images, or else of the first validation images."""

    state: TrainingState
    retry: OomRetry
    logbook: Logbook
    alive: Liveness
    sample_images: dict[int, torch.Tensor]  # of the flag by image size, on the CPU
    validation_set: ValidationSet | None

    def save(self) -> None:
        """Write a grid of the exported weights; if memory runs out, there is none."""
        state, retry = self.state, self.retry
        if not retry.dist.is_main:
            return
        try:
            for images in self._images():
                retry.end_graph()
                grid = sample_grid(state.eval_model, retry.networks, images.to(retry.dist.device))
                self.logbook.image("samples", state.position.step, grid)
            return
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        retry.free_memory()
        console.info(f"out of memory: no sample grid of step {state.position.step}; training is the same")

    def _images(self) -> Iterator[torch.Tensor]:
        """Yield the images of a grid as one uint8 batch (N, C, S, S); no batch if there are none."""
        size, validation_set = self.state.stage.image_size, self.validation_set
        if self.sample_images:
            yield self.sample_images[size]
        elif validation_set is not None:
            shown = validation_set.sample(GRID_IMAGES)
            alone = replace(self.retry.dist, world_size=1)  # the images are not divided among processes
            yield from (b.images for b in shown.batches(size, GRID_IMAGES, alone, self.alive.check))


def sample_grid(model: AutoencoderKL, networks: Networks, images: torch.Tensor) -> np.ndarray:
    """Draw uint8 images (N, C, S, S) as uint8 pixels (H, W, 3), one row per image.

    The columns are the input, its reconstruction, the error times ERROR_GAIN and the bicubic baseline; images
    with alpha are over a checkerboard, and their alpha follows. The captions are PSNRs of the whole crop, as
    in validation.
    """
    factor = model.downsampling
    titles = ["input", "reconstruction", f"error x{ERROR_GAIN}", f"{factor}x bicubic"]
    titles += ["alpha", "reconstruction of alpha"] * len(alphas(images))
    rows, captions = [], []
    for image in images:
        original = to_float(image[None])  # (1, C, S, S)
        recon = mode_reconstruction(model, networks)(original).float().clamp(-1, 1)
        error = (difference(recon, original) / 2 * ERROR_GAIN).clamp(0, 1) * 2 - 1
        bicubic = bicubic_baseline(original, factor)
        columns = [over_checkerboard(original), over_checkerboard(recon), error, over_checkerboard(bicubic)]
        scores = [_caption(float(color_psnr(codec, original))) for codec in (recon, bicubic)]
        captions.append(["", scores[0], "", scores[1]])
        for pair in zip(alphas(original), alphas(recon), strict=True):
            columns += map(as_rgb, pair)
            captions[-1] += ["", _caption(float(psnr(*pair)))]
        rows.append(_tiles(torch.cat(columns)))
    return draw_grid(titles, rows, captions)


def _caption(value: float) -> str:
    return f"PSNR {value:.2f} dB"


def _tiles(columns: torch.Tensor) -> np.ndarray:
    """Cut the centres of (N, 3, S, S) in [-1, 1] as uint8 (N, T, T, 3); small ones are enlarged."""
    start = max(0, (columns.shape[-1] - GRID_SIDE) // 2)
    tiles = to_uint8(columns[..., start : start + GRID_SIDE, start : start + GRID_SIDE])
    scale = -(-MIN_TILE // tiles.shape[-1])
    return tiles.permute(0, 2, 3, 1).cpu().numpy().repeat(scale, axis=1).repeat(scale, axis=2)


def draw_grid(titles: list[str], rows: list[np.ndarray], captions: list[list[str]]) -> np.ndarray:
    """Draw uint8 (H, W, 3): rows of tiles (columns, T, T, 3) below titles, with a caption below each tile."""
    side = rows[0].shape[1]
    width = len(titles) * (side + GAP) - GAP
    grid = Image.new("RGB", (width, TEXT_HEIGHT + len(rows) * (side + TEXT_HEIGHT)), "white")
    draw, font = ImageDraw.Draw(grid), ImageFont.load_default(FONT_SIZE)
    for column, title in enumerate(titles):
        left = column * (side + GAP)
        centre = left + side / 2
        draw.text((centre, TEXT_HEIGHT / 2), title, fill="black", font=font, anchor="mm")
        for row, tiles in enumerate(rows):
            top = TEXT_HEIGHT + row * (side + TEXT_HEIGHT)
            grid.paste(Image.fromarray(tiles[column]), (left, top))
            middle = top + side + TEXT_HEIGHT / 2
            draw.text((centre, middle), captions[row][column], fill="black", font=font, anchor="mm")
    return np.asarray(grid)


def load_sample_images(config: Config, stages: Iterable[Stage]) -> dict[int, torch.Tensor]:
    """Load the first images of --sample_images by name, for each image size S: uint8 (N, C, S, S).

    Each image is scaled by its shorter side, and its centre is cropped. Raises DataError if the folder
    contains no images or one of them cannot be read.
    """
    folder = config.run.sample_images
    if folder is None:
        return {}
    names = list_images(folder, flag="--sample_images")
    if len(names) > MAX_SAMPLE_IMAGES:
        console.info(
            f"--sample_images {folder}: the grids show the first {MAX_SAMPLE_IMAGES} of {len(names)} images"
        )
    crops: dict[int, list[torch.Tensor]] = {stage.image_size: [] for stage in stages}
    data = config.data
    for name in names[:MAX_SAMPLE_IMAGES]:
        try:
            pixels = decode_image(
                Path(folder) / name,
                max_pixels=data.max_pixels,
                background=data.background,
                channels=config.model.image_channels,
            )
        except BadImageError as error:
            raise DataError(
                f"--sample_images {folder}: {console.printable(name)}: {error}: remove or replace this file"
            ) from None
        for size, images in crops.items():
            crop = np.ascontiguousarray(square(pixels, size, "resize").transpose(2, 0, 1))
            images.append(torch.from_numpy(crop))
    return {size: torch.stack(images) for size, images in crops.items()}
