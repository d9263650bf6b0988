"""Which files are read and written: inputs listed, results named, images to tensors and back."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vae.config.errors import DataError, UserError
from vae.config.infer_flags import InferConfig
from vae.data.decoding import decode_image
from vae.data.folder import walk_images
from vae.data.formats import BadImageError
from vae.files import atomic_path
from vae.inference.padding import LEAST_SIDE
from vae.pixels import to_float, to_uint8

LATENTS = ".safetensors"


@dataclass(frozen=True)
class Task:
    """One piece of work: it reads one input (interpolation: two) and writes one or several results."""

    name: str  # for people, and the seed of its noise
    inputs: tuple[Path, ...]
    outputs: tuple[Path, ...]


def plan_tasks(config: InferConfig) -> list[Task]:
    """Every input with its results, checked before any work.

    Raises DataError where there is nothing to do, UserError where two inputs would give one result, a result
    would replace an input, or results are there already and --overwrite is not given.
    """
    output_dir = Path(config.output_dir)
    if output_dir.exists() and not output_dir.is_dir():
        raise UserError(f"--output_dir {output_dir} is a file: give a folder")
    found = [pair for given in config.input for pair in _list(given, config.mode, output_dir)]
    if config.mode == "interpolate":
        tasks = [_interpolation(config, found, output_dir)]
    else:
        tasks = [
            Task(name, (path,), tuple(output_dir / (stem + end) for end in _endings(config)))
            for (name, path), stem in zip(found, _stems(found), strict=True)
        ]
    _check_outputs(tasks, config.overwrite)
    return tasks


def _list(given: str, mode: str, output_dir: Path) -> list[tuple[str, Path]]:
    """(name, path) of one --input: a file itself, or the files of a folder that the mode reads."""
    path = Path(given)
    if not path.is_dir():
        if not path.exists():
            raise DataError(f"--input {given} does not exist: give a file or a folder")
        if not path.is_file():
            raise DataError(f"--input {given} is neither file nor folder: give one of these")
        return [(path.name, path)]
    if Path(os.path.realpath(output_dir)).is_relative_to(os.path.realpath(path)):
        raise UserError(f"--output_dir {output_dir} lies in --input {given}: give a folder beside it")
    names = sorted(walk_images(given, flag="--input", extensions=(LATENTS,)))
    if mode in ("reconstruct", "encode"):
        names = [name for name in names if not name.lower().endswith(LATENTS)]
    elif mode == "decode":
        names = [name for name in names if name.lower().endswith(LATENTS)]
    if not names:
        what = {"reconstruct": "images", "encode": "images", "decode": f"latents ({LATENTS})"}
        raise DataError(
            f"--input {given} holds no {what.get(mode, 'images or latents')}: give another folder"
        )
    return [(name, path / name) for name in names]


def _interpolation(config: InferConfig, found: list[tuple[str, Path]], output_dir: Path) -> Task:
    if len(found) != 2:
        raise UserError(
            f"--mode interpolate goes from one input to another: --input names {len(found)} files"
        )
    (first, start), (second, end) = found
    stem = f"{Path(first).stem}_to_{Path(second).stem}"
    digits = max(3, len(str(config.steps - 1)))
    outputs = tuple(output_dir / f"{stem}_{step:0{digits}}.png" for step in range(config.steps))
    return Task(f"{first} to {second}", (start, end), outputs)


def _endings(config: InferConfig) -> list[str]:
    if config.mode == "variations":
        digits = max(2, len(str(config.count - 1)))
        return [f"_{index:0{digits}}.png" for index in range(config.count)]
    return [LATENTS if config.mode == "encode" else ".png"]


def _stems(found: list[tuple[str, Path]]) -> list[str]:
    """Names of results without an ending: the input's, with its own ending where two would be one."""
    plain = [os.path.splitext(name)[0] for name, _ in found]
    counts: dict[str, int] = {}
    for stem in plain:
        counts[stem.casefold()] = counts.get(stem.casefold(), 0) + 1
    return [
        stem if counts[stem.casefold()] == 1 else stem + name[len(stem) :].replace(".", "_")
        for (name, _), stem in zip(found, plain, strict=True)
    ]


def _check_outputs(tasks: list[Task], overwrite: bool) -> None:
    sources = {os.path.realpath(path): path for task in tasks for path in task.inputs}
    writer: dict[str, str] = {}
    for task in tasks:
        for output in task.outputs:
            if os.path.realpath(output) in sources:
                raise UserError(
                    f"--output_dir {output.parent} would replace the input {output.name}: give another folder"
                )
            key = str(output).casefold()  # some file systems take names that differ in case for one
            if key in writer:
                raise UserError(
                    f"--input {writer[key]} and {task.name} would both write {output.name}: "
                    "run them one by one into folders of their own"
                )
            writer[key] = task.name
    there = [output for task in tasks for output in task.outputs if output.exists()]
    if there and not overwrite:
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise UserError(f"{there[0]}{more} exists: add --overwrite, or give another --output_dir")


def read_image_tensor(path: Path, config: InferConfig) -> torch.Tensor:
    """An image file, upright and in sRGB, as fp32 (1, 3, H, W) in [-1, 1], or BadImageError."""
    pixels = decode_image(path, max_pixels=config.max_pixels, background=config.background)
    height, width = pixels.shape[:2]
    if min(height, width) < LEAST_SIDE:
        raise BadImageError("too_small", f"{width}x{height} px, and no side may be below {LEAST_SIDE}")
    return to_float(torch.from_numpy(pixels).permute(2, 0, 1)[None])


def to_pixels(images: torch.Tensor) -> np.ndarray:
    """uint8 (H, W, 3) of one image (1, 3, H, W) about [-1, 1], clamped and rounded to the nearest level."""
    return to_uint8(images[0]).permute(1, 2, 0).cpu().numpy()


def write_png(path: Path, pixels: np.ndarray) -> None:
    """Write uint8 (H, W, 3) pixels as PNG, whole or not at all."""
    with atomic_path(path) as temporary:
        Image.fromarray(pixels).save(temporary, format="PNG")
