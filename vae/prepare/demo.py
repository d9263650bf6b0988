"""`--mode demo`: draw the missing demo images in parallel; each file is written atomically."""

from contextlib import closing
from functools import partial
from pathlib import Path

from vae.config.prepare_flags import DemoConfig
from vae.data.workers import resolve_num_workers
from vae.prepare.draw import draw_image
from vae.prepare.folders import claim_settings, output_folder
from vae.prepare.pool import Failure, Limits, run_tasks
from vae.prepare.resize import encode
from vae.progress import Progress
from vae.system import console
from vae.system.errors import DataError
from vae.system.files import remove_temporary, replace_bytes

SETTINGS_NAME = "demo_settings.json"
SETTINGS = ("target_size", "seed")  # flags that decide the pixels; the same for a whole folder
DRAWING_SECONDS = 600.0  # for one image: minutes at tens of thousands of pixels


def run_demo(config: DemoConfig) -> int:
    """Draw the demo images that are missing in the output folder; returns the exit code.

    UserError if the folder cannot be written, or contains other files or demo images with other settings.
    """
    num_workers = max(1, resolve_num_workers(config.num_workers))
    with output_folder(config.output_dir, "demo") as folder:
        settings = {name: getattr(config, name) for name in SETTINGS}
        claim_settings(folder / SETTINGS_NAME, settings, f"--output_dir {folder}")
        missing = [index for index in range(config.count) if not _path(folder, index).exists()]
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


def _path(folder: Path, index: int) -> Path:
    return folder / f"demo_{index:05d}.png"


def _draw_and_save(folder: Path, config: DemoConfig, index: int) -> None:
    image = draw_image(config.target_size, config.seed, index)
    replace_bytes(_path(folder, index), bytes(encode(image, "png")))
