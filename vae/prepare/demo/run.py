"""Writing the demo's images: whole files only, in parallel, and only those that are missing."""

import json
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path

from PIL import Image
from tqdm import tqdm

from vae.config.errors import UserError
from vae.data.workers import signals_held, start_worker
from vae.files import atomic_path
from vae.prepare.demo.draw import draw_image

SETTINGS_NAME = "demo_settings.json"
JPEG_QUALITY = 95


@dataclass(frozen=True)
class DemoSettings:
    """What decides the pixels of a demo image; a folder holds images of one such setting only."""

    target_size: int  # px
    seed: int
    format: str  # png or jpeg


def write_demo(output_dir: str | os.PathLike, count: int, settings: DemoSettings, num_workers: int) -> int:
    """Draw demo images 0 to count-1 into `output_dir`, except those that are there; returns how many.

    Raises UserError when the folder cannot be written or holds demo images of other settings.
    """
    folder = Path(output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _claim_folder(folder, settings)
        missing = [index for index in range(count) if not (folder / _file_name(index, settings)).exists()]
        draw = partial(_draw_and_save, folder, settings)
        with tqdm(total=count, initial=count - len(missing), unit="image", desc="demo") as bar:
            for _ in _map(draw, missing, num_workers):
                bar.update()
    except OSError as error:
        raise UserError(f"--output_dir {output_dir} cannot be written: {error.strerror or error}") from error
    return len(missing)


def _claim_folder(folder: Path, settings: DemoSettings) -> None:
    """Note the settings beside the images; refuse a folder where others were used."""
    record = folder / SETTINGS_NAME
    mine = asdict(settings)
    if not record.exists():
        text = json.dumps(mine, indent=1) + "\n"
        with atomic_path(record) as temporary:
            temporary.write_text(text, encoding="utf-8")
        return
    try:
        theirs = json.loads(record.read_text(encoding="utf-8"))
    except ValueError:
        theirs = None
    if theirs != mine:
        held = " ".join(
            f"--{key} {value}" for key, value in (theirs if isinstance(theirs, dict) else {}).items()
        )
        raise UserError(
            f"--output_dir {folder} holds demo images of other settings ({held or 'unreadable'}): "
            "give another folder or delete this one"
        )


def _file_name(index: int, settings: DemoSettings) -> str:
    return f"demo_{index:05d}.{'jpg' if settings.format == 'jpeg' else 'png'}"


def _draw_and_save(folder: Path, settings: DemoSettings, index: int) -> None:
    image = Image.fromarray(draw_image(settings.target_size, settings.seed, index))
    if settings.format == "jpeg":
        options = {"format": "JPEG", "quality": JPEG_QUALITY, "subsampling": 0}
    else:
        options = {"format": "PNG"}
    with atomic_path(folder / _file_name(index, settings)) as temporary:
        image.save(temporary, **options)


def _start_drawing() -> None:
    start_worker(0)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent_process().join()  # returns when it was killed, too
    os._exit(1)


def _map(draw, indices: list[int], num_workers: int):
    workers = min(num_workers, len(indices))
    if workers <= 1:
        yield from map(draw, indices)
        return
    # spawn, as on Windows: forking a process that runs threads may lock up
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start_drawing)
    try:
        with signals_held("spawn"):
            results = pool.map(draw, indices)  # starts the processes
        yield from results
    finally:
        pool.shutdown(cancel_futures=True)
