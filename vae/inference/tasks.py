"""The tasks of a command: inputs are listed, results are named, and conflicts are found before any work.

Needs no PyTorch, so mistakes are reported at once.
"""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from vae.config.trained_vae_flags import InferConfig
from vae.images.decoding import parse_background
from vae.images.folder import Skips, no_images, print_skips, walk_images
from vae.interop.vae_path import locate_vae
from vae.system.errors import DataError, UserError
from vae.system.files import check_folder, shortened

COMMAND = "infer"  # in the marker of the output folder
LATENTS = ".safetensors"
# Some modes read images alone or latents alone; the others read both.
_IMAGES = "reads images: use --mode decode for latent files"
_READS = {
    "reconstruct": _IMAGES,
    "encode": _IMAGES,
    "decode": f"reads latent files ({LATENTS}), which --mode encode writes: use --mode reconstruct or "
    "--mode encode for images",
}


@dataclass(frozen=True)
class Task:
    """One input (interpolation: two) and the files that are made from it."""

    name: str  # for messages, and part of the key of its noise
    inputs: tuple[Path, ...]
    outputs: tuple[Path, ...]


def plan_tasks(config: InferConfig) -> list[Task]:
    """Every input with its results, checked before any work.

    Raises DataError if there is nothing to do. Raises UserError for a wrong colour or a missing VAE, if two
    inputs would write the same result, if a result would replace an input, or if results exist and
    --overwrite is not given.
    """
    parse_background(config.background)
    locate_vae(Path(config.vae), "--vae")
    output_dir = Path(config.output_dir)
    check_folder(output_dir, COMMAND)
    inputs = [pair for given in config.input for pair in _list(given, config.mode, output_dir)]
    if config.mode == "interpolate":
        tasks = [_interpolation(config, inputs, output_dir)]
    else:
        tasks = [
            Task(name, (path,), tuple(_output(output_dir, stem, end) for end in _endings(config)))
            for (name, path), stem in zip(inputs, _stems(inputs), strict=True)
        ]
    _check_outputs(tasks, config.overwrite)
    return tasks


def _list(given: str, mode: str, output_dir: Path) -> list[tuple[str, Path]]:
    """(name, path) of one --input: the file itself, or each file in the folder that the mode reads."""
    path = Path(given)
    if not path.is_dir():
        if not path.is_file():
            raise DataError(f"--input {given} does not exist: give a file or a folder on this machine")
        if not _is_read(path.name, mode):
            raise DataError(f"--input {given}: --mode {mode} {_READS[mode]}")
        return [(path.name, path)]
    if output_dir.resolve().is_relative_to(path.resolve()):
        raise UserError(f"--output_dir {output_dir} is inside --input {given}: give a folder outside of it")
    skips = Skips()
    names = sorted(walk_images(given, flag="--input", extensions=(LATENTS,), on_skip=skips.add))
    read = [name for name in names if _is_read(name, mode)]
    if not names and mode != "decode":
        raise no_images(given, "--input", skips)
    if not read:
        raise DataError(f"--input {given} has no such files: --mode {mode} {_READS[mode]}")
    if mode != "decode":
        print_skips(skips, f"--input {given}")
    return [(name, path / name) for name in read]


def _is_read(name: str, mode: str) -> bool:
    """Whether the mode reads a file with this name."""
    return mode not in _READS or (mode == "decode") == name.lower().endswith(LATENTS)


def _interpolation(config: InferConfig, inputs: list[tuple[str, Path]], output_dir: Path) -> Task:
    if len(inputs) != 2:
        raise UserError(
            f"--mode interpolate needs exactly two files, but --input names {len(inputs)}: give two files"
        )
    (first, start), (second, end) = inputs
    stem = f"{Path(first).stem}_to_{Path(second).stem}"
    digits = max(3, len(str(config.steps - 1)))
    endings = [f"_{step:0{digits}}.{config.format}" for step in range(config.steps)]
    outputs = tuple(_output(output_dir, stem, ending) for ending in endings)
    return Task(f"{first} to {second}", (start, end), outputs)


def _output(output_dir: Path, stem: str, ending: str) -> Path:
    folder, name = os.path.split(stem)
    return output_dir / folder / (shortened(name, name) + ending)


def _endings(config: InferConfig) -> list[str]:
    if config.mode == "variations":
        digits = max(2, len(str(config.count - 1)))
        return [f"_{index:0{digits}}.{config.format}" for index in range(config.count)]
    return [LATENTS if config.mode == "encode" else f".{config.format}"]


def _stems(inputs: list[tuple[str, Path]]) -> list[str]:
    """The result's name without its extension.

    It includes the input's extension if two would be the same, and a hash if the names differ only in case.
    """
    names = [name for name, _ in inputs]
    stems = [os.path.splitext(name)[0] for name in names]
    whole = [stem + name[len(stem) :].replace(".", "_") for name, stem in zip(names, stems, strict=True)]
    hashed = [shortened(stem, name, hashed=True) for name, stem in zip(names, whole, strict=True)]
    for longer in (whole, hashed):
        counts = Counter(stem.casefold() for stem in stems)
        stems = [
            stem if counts[stem.casefold()] == 1 else other for stem, other in zip(stems, longer, strict=True)
        ]
    return stems


def _check_outputs(tasks: list[Task], overwrite: bool) -> None:
    sources = {path.resolve() for task in tasks for path in task.inputs}
    writer: dict[str, str] = {}
    for task in tasks:
        for output in task.outputs:
            if output.resolve() in sources:
                raise UserError(
                    f"--output_dir {output.parent} would replace the input {output.name}: give another folder"
                )
            key = str(output).casefold()  # some file systems do not distinguish upper and lower case
            if key in writer:
                raise UserError(
                    f"--input {writer[key]} and {task.name} would both write {output.name}: "
                    "run them separately with different --output_dir"
                )
            writer[key] = task.name
    existing = [output for task in tasks for output in task.outputs if output.exists()]
    if existing and not overwrite:
        more = f" (and {len(existing) - 1} more)" if len(existing) > 1 else ""
        raise UserError(f"{existing[0]} exists{more}: add --overwrite, or give another --output_dir")
