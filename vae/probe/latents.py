"""Latents on disk: each image is encoded once, and read in every epoch.

A cache is two files. `NAME.f16` has the latents one after the other, fp16 (N, V, Z, h, w). `NAME.json`, which
is written after the latents are on disk, has how many images are complete, and which cannot be used. NAME is
a hash of all that decides the latents, so a stopped command continues, and another one makes another cache.

Shapes: N images, V views of each, Z latent channels of h x w.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from vae.config.evaluate_flags import EvaluateConfig
from vae.data.augment import resized_crop
from vae.device import DTYPES
from vae.evaluation.image_set import in_threads
from vae.evaluation.protocols import square
from vae.images.formats import BadImageError
from vae.images.pixels import to_float
from vae.inference.codec import encode_images
from vae.interop.averaging import hash_of_weights
from vae.model.autoencoder import AutoencoderKL
from vae.probe.labels import LabelledSet
from vae.probe.maps import MapSet
from vae.progress import Progress
from vae.system import console
from vae.system.console import printable
from vae.system.errors import DataError, UserError
from vae.system.files import read_json, write_json
from vae.system.host import GIB
from vae.system.lock_file import lock_file

FORMAT = 1  # changes with the meaning of the files
SECONDS_PER_SAVE = 30.0  # a command that is stopped loses at most so much
MAX_UNUSABLE = 0.1  # share of images: above it, the data set is wrong
# Of RandomResizedCrop (Szegedy et al. 2015; torchvision's defaults).
REGION_SCALE, REGION_RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def view_of(pixels: np.ndarray, view: int, index: int, config: EvaluateConfig) -> np.ndarray:
    """A view (S, S, 3) of an image (H, W, 3): the square, its mirror image, then random regions of the image.

    A region depends on (seed, index, view) alone; odd views are mirrored.
    """
    size = config.sizes[0]
    if view < 2:
        if config.crop == "center" and min(pixels.shape[:2]) < size:
            height, width = pixels.shape[:2]
            raise BadImageError("too_small", f"{width}x{height} px with --crop center")
        pixels = square(pixels, size, config.crop)
    else:
        words = np.random.PCG64(np.random.SeedSequence([config.seed, index, view])).random_raw(4).tolist()
        pixels = resized_crop(pixels, words, size, REGION_SCALE, REGION_RATIO, enlarge=True)
    return pixels[:, ::-1] if view % 2 else pixels


def load_views(
    labelled: LabelledSet, config: EvaluateConfig, views: int, start: int
) -> tuple[torch.Tensor, dict[str, str]]:
    """uint8 (B, V, 3, S, S) of the images from `start` on, zeros for unusable ones, and why they are."""
    size = config.sizes[0]
    indices = labelled.indices[start : start + config.batch_size].tolist()
    images, unusable = np.zeros((len(indices), views, size, size, 3), np.uint8), {}
    for position, index in enumerate(indices):
        try:
            pixels = labelled.images.decode(index, max_pixels=config.max_pixels, background=config.background)
            for view in range(views):
                images[position, view] = view_of(pixels, view, index, config)
        except BadImageError as error:
            unusable[str(start + position)] = f"{labelled.images.name(index)}: {error}"
    return torch.from_numpy(images.transpose(0, 1, 4, 2, 3).copy()), unusable


def encode_set(
    labelled: LabelledSet, model: AutoencoderKL, config: EvaluateConfig, views: int, folder: Path
) -> tuple[str, MapSet]:
    """The name and the latents of a set: those on disk, and the rest encoded now, by the VAE on its device.

    Images that cannot be decoded are left out and reported. Raises DataError for too many of them, or for
    unusable latents, and UserError if the disk is too small, or if another process encodes the same.
    """
    identity = {
        "format": FORMAT,
        "vae": hash_of_weights(model.state_dict()),
        "images": labelled.fingerprint(),
        "views": views,
        "size": config.sizes[0],
        "seed": config.seed if views > 2 else None,
        **{name: getattr(config, name) for name in ("crop", "dtype", "background", "max_pixels")},
    }
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    side = -(-config.sizes[0] // model.downsampling)
    shape = (len(labelled.indices), views, model.config.z_channels, side, side)
    path, record_path = folder / f"{name}.f16", folder / f"{name}.json"
    with _locked(folder, name):
        record = _read_record(record_path, path, shape) | {"identity": identity}
        if record["done"] < len(labelled.indices):
            needed, free = (shape[0] - record["done"]) * _row_bytes(shape), shutil.disk_usage(folder).free
            if needed > free:
                raise UserError(
                    f"--probe_cache {folder}: the latents need {needed / GIB:.1f} GiB, and the disk has "
                    f"{free / GIB:.1f} GiB: give a folder on another disk, or fewer --probe_views"
                )
            with path.open("r+b" if path.exists() else "wb") as file:
                _encode(labelled, model, config, shape, file, record_path, record)
    unusable = record["unusable"]
    if unusable:
        example = printable(next(iter(unusable.values())))
        console.warning(f"{labelled.flag}: {len(unusable)} images are left out, for example {example}")
    usable = np.setdiff1d(np.arange(shape[0]), list(map(int, unusable)))
    latents = np.memmap(path, np.float16, "c", shape=shape)
    return name, MapSet(latents, labelled.targets, labelled.groups, usable)


@contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    """Only one process encodes the same latents."""
    locks = lock_file(folder / ".lock")
    if not locks.try_lock(name):
        raise UserError(
            f"--probe_cache {folder}: another process encodes the same latents: wait until it ends"
        )
    try:
        yield
    finally:
        locks.unlock(name)


def _row_bytes(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape[1:])) * np.dtype(np.float16).itemsize


def _read_record(record_path: Path, path: Path, shape: tuple[int, ...]) -> dict[str, Any]:
    """What is on disk; nothing if the latents are fewer than the record says."""
    try:
        record = read_json(record_path)
        if path.stat().st_size >= record["done"] * _row_bytes(shape):
            return {name: record[name] for name in ("done", "unusable")}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return {"done": 0, "unusable": {}}


def _encode(
    labelled: LabelledSet,
    model: AutoencoderKL,
    config: EvaluateConfig,
    shape: tuple[int, ...],
    file: IO[bytes],
    record_path: Path,
    record: dict[str, Any],
) -> None:
    """Encode from the first missing image on; the record follows the latents to the disk."""
    file.truncate(record["done"] * _row_bytes(shape))
    file.seek(0, os.SEEK_END)
    images, saved_at = shape[0], time.monotonic()
    starts = range(record["done"], images, config.batch_size)
    load = partial(load_views, labelled, config, shape[1])
    with Progress(f"encoding {labelled.flag}", images, "image", done=record["done"]) as bar:
        for pixels, unusable in in_threads(load, starts):
            file.write(_latents(model, pixels, config).reshape(len(pixels), *shape[1:]).tobytes())
            record["unusable"] |= unusable
            record["done"] += len(pixels)
            if time.monotonic() - saved_at >= SECONDS_PER_SAVE or record["done"] == images:
                file.flush()
                os.fsync(file.fileno())
                _check_unusable(labelled, record)
                write_json(record_path, record)
                saved_at = time.monotonic()
            bar.update(len(pixels))


def _latents(model: AutoencoderKL, pixels: torch.Tensor, config: EvaluateConfig) -> np.ndarray:
    """The posterior's mode of uint8 (B, V, 3, S, S) in fp16: (B V, Z, h, w)."""
    device = next(model.parameters()).device
    parts = [
        encode_images(model, to_float(part.to(device)), dtype=DTYPES[config.dtype]).mode().half().cpu()
        for part in pixels.flatten(0, 1).split(config.batch_size)
    ]
    latents = torch.cat(parts)
    if not torch.isfinite(latents).all():
        raise DataError(
            "--vae: latents contain NaN, infinity or values above 65504: it cannot be probed in --dtype "
            f"{config.dtype}"
        )
    return latents.numpy()


def _check_unusable(labelled: LabelledSet, record: dict[str, Any]) -> None:
    if len(record["unusable"]) > MAX_UNUSABLE * record["done"]:
        raise DataError(
            f"{labelled.flag} {labelled.images.location}: {len(record['unusable'])} of {record['done']} "
            f"images cannot be used, for example {printable(next(iter(record['unusable'].values())))}: run "
            "prepare_data.py --mode validate"
        )
