"""The grids of sample reconstructions that a run saves and shows in TensorBoard, also of --sample_images.

Shapes: N images of S x S px; T, the side of a tile in the grid.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from vae.device import is_out_of_memory
from vae.evaluation.image_set import square
from vae.evaluation.metrics import bicubic_baseline
from vae.images.decoding import decode_image
from vae.images.folder import list_images
from vae.images.formats import BadImageError
from vae.images.pixels import psnr, to_float, to_uint8
from vae.model.autoencoder import AutoencoderKL
from vae.step import Networks
from vae.system import console
from vae.system.errors import DataError
from vae.training.distributed import Distributed
from vae.training.memory.oom_retry import OomRetry
from vae.training.output.logbook import Logbook
from vae.training.recovery.watchdog import Liveness
from vae.training.state import TrainingState
from vae.training.validation.measure import ValidationSet, mode_reconstruction

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
    networks: Networks
    dist: Distributed
    retry: OomRetry
    logbook: Logbook
    alive: Liveness
    sample_images: dict[int, torch.Tensor]  # of the flag by image size, on the CPU
    validation_set: ValidationSet | None

    def save(self) -> None:
        """Write a grid of the exported weights; if memory runs out, there is none."""
        if not self.dist.is_main:
            return
        state, retry = self.state, self.retry
        try:
            for images in self._images():
                retry.end_graph()
                grid = sample_grid(state.eval_model, self.networks, images.to(self.dist.device))
                self.logbook.image("samples", state.position.step, grid)
            return
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        retry.free_memory()
        console.info(f"out of memory: no sample grid of step {state.position.step}; training is the same")

    def _images(self) -> Iterator[torch.Tensor]:
        """The images of a grid as one uint8 batch (N, 3, S, S); no batch if there are none."""
        size, validation_set = self.state.stage.image_size, self.validation_set
        if self.sample_images:
            yield self.sample_images[size]
        elif validation_set is not None:
            shown = replace(validation_set, count=min(validation_set.count, GRID_IMAGES))
            alone = replace(self.dist, world_size=1)  # the images are not divided among processes
            yield from (b.images for b in shown.batches(size, GRID_IMAGES, alone, self.alive.check))


def sample_grid(model: AutoencoderKL, networks: Networks, images: torch.Tensor) -> np.ndarray:
    """uint8 pixels (H, W, 3) from uint8 images (N, 3, S, S), one row per image.

    The columns are the input, its reconstruction, the error times ERROR_GAIN and the bicubic baseline. The
    captions are PSNRs of the whole crop, as in validation.
    """
    factor = model.downsampling
    titles = ["input", "reconstruction", f"error x{ERROR_GAIN}", f"{factor}x bicubic"]
    rows, captions = [], []
    for image in images:
        original = to_float(image[None])  # (1, 3, S, S)
        recon = mode_reconstruction(model, networks)(original).float().clamp(-1, 1)
        error = ((recon - original).abs() / 2 * ERROR_GAIN).clamp(0, 1) * 2 - 1
        bicubic = bicubic_baseline(original, factor)
        rows.append(_tiles(torch.cat([original, recon, error, bicubic])))
        scores = [f"PSNR {float(psnr(codec, original)):.2f} dB" for codec in (recon, bicubic)]
        captions.append(["", scores[0], "", scores[1]])
    return draw_grid(titles, rows, captions)


def _tiles(columns: torch.Tensor) -> np.ndarray:
    """The centres of (4, 3, S, S) in [-1, 1] as uint8 (4, T, T, 3); small ones are enlarged."""
    start = max(0, (columns.shape[-1] - GRID_SIDE) // 2)
    tiles = to_uint8(columns[..., start : start + GRID_SIDE, start : start + GRID_SIDE])
    scale = -(-MIN_TILE // tiles.shape[-1])
    return tiles.permute(0, 2, 3, 1).cpu().numpy().repeat(scale, axis=1).repeat(scale, axis=2)


def draw_grid(titles: list[str], rows: list[np.ndarray], captions: list[list[str]]) -> np.ndarray:
    """uint8 (H, W, 3): rows of tiles (columns, T, T, 3) below the titles, with a caption below each tile."""
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


def load_sample_images(
    folder: str, image_sizes: Iterable[int], *, background: str, max_pixels: int
) -> dict[int, torch.Tensor]:
    """The first images of `folder` by name, for each image size S: uint8 (N, 3, S, S).

    Each image is scaled by its shorter side, and its centre is cropped. Raises DataError if the folder
    contains no images or one of them cannot be read.
    """
    names = list_images(folder, flag="--sample_images")
    if len(names) > MAX_SAMPLE_IMAGES:
        console.info(
            f"--sample_images {folder}: the grids show the first {MAX_SAMPLE_IMAGES} of {len(names)} images"
        )
    crops: dict[int, list[torch.Tensor]] = {size: [] for size in image_sizes}
    for name in names[:MAX_SAMPLE_IMAGES]:
        try:
            pixels = decode_image(Path(folder) / name, max_pixels=max_pixels, background=background)
        except BadImageError as error:
            raise DataError(
                f"--sample_images {folder}: {console.printable(name)}: {error}: remove or replace this file"
            ) from None
        for size, images in crops.items():
            crop = np.ascontiguousarray(square(pixels, size, "resize").transpose(2, 0, 1))
            images.append(torch.from_numpy(crop))
    return {size: torch.stack(images) for size, images in crops.items()}
