"""`--mode demo`: draw the missing demo images in parallel; each file is written atomically."""

from contextlib import closing
from functools import partial
from pathlib import Path

from vae.config.prepare_flags import DemoConfig
from vae.data.workers import resolve_num_workers
from vae.prepare.draw import draw_image
from vae.prepare.encode import EXTENSIONS, encode
from vae.prepare.folders import output_folder
from vae.prepare.pool import Failure, Limits, run_tasks
from vae.progress import Progress
from vae.system import console
from vae.system.errors import DataError, UserError
from vae.system.files import read_json, remove_temporary, replace_bytes, write_json

SETTINGS_NAME = "demo_settings.json"
SETTINGS = ("target_size", "seed", "format")  # flags that decide the pixels; the same for a whole folder
JPEG_QUALITY = 95
DRAWING_SECONDS = 600.0  # for one image: minutes at tens of thousands of pixels


def run_demo(config: DemoConfig) -> int:
    """Draw the demo images that are missing in the output folder; returns the exit code.

    UserError if the folder cannot be written, or contains other files or demo images with other settings.
    """
    num_workers = max(1, resolve_num_workers(config.num_workers))
    with output_folder(config.output_dir, "demo") as folder:
        _compare_settings(folder, config)
        missing = [index for index in range(config.count) if not _path(folder, config, index).exists()]
        draw = partial(_draw_and_save, folder, config)
        workers = max(1, min(num_workers, len(missing)))
        try:
            results = run_tasks(draw, missing, workers, Limits(DRAWING_SECONDS))
            done = config.count - len(missing)
            with Progress("demo", config.count, "image", done=done) as bar, closing(results):
                for _, failure in results:
                    if isinstance(failure, Failure):
                        raise DataError(f"an image cannot be drawn: {failure.detail}: lower --num_workers")
                    bar.update()
        finally:
            remove_temporary(folder)  # of processes that were ended while they wrote
    console.info(f"{folder}: {config.count} images, {len(missing)} of them drawn now")
    return 0


def _compare_settings(folder: Path, config: DemoConfig) -> None:
    """Write the settings beside the images; UserError for a folder with other settings."""
    record = folder / SETTINGS_NAME
    ours = {name: getattr(config, name) for name in SETTINGS}
    if not record.exists():
        write_json(record, ours, indent=1)
        return
    try:
        theirs = read_json(record)
    except ValueError:
        theirs = None
    if theirs != ours:
        pairs = theirs.items() if isinstance(theirs, dict) else ()
        flags = " ".join(f"--{name} {value}" for name, value in pairs)
        raise UserError(
            f"--output_dir {folder} contains demo images with other settings ({flags or 'unreadable'}): "
            "give another folder or delete this one"
        )


def _path(folder: Path, config: DemoConfig, index: int) -> Path:
    return folder / f"demo_{index:05d}{EXTENSIONS[config.format]}"


def _draw_and_save(folder: Path, config: DemoConfig, index: int) -> None:
    image = draw_image(config.target_size, config.seed, index)
    replace_bytes(_path(folder, config, index), bytes(encode(image, config.format, JPEG_QUALITY)))
