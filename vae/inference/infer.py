"""A command of infer_vae.py, from top to bottom: load the VAE, then process the tasks one by one."""

import os
from pathlib import Path

import torch

from vae.config.infer_flags import InferConfig
from vae.device import is_out_of_memory
from vae.images.formats import BadImageError
from vae.inference.image_files import read_image, write_png
from vae.inference.latent_file import BadLatentsError, load_latents, save_latents
from vae.inference.session import Session, open_session
from vae.inference.tasks import COMMAND, Task
from vae.ops.noise import keyed_normal
from vae.progress import track
from vae.system import console
from vae.system.errors import EXIT_DATA
from vae.system.folder_marker import claim_folder


def infer(config: InferConfig, tasks: list[Task]) -> int:
    """Do the tasks of `plan_tasks(config)`; returns the exit code. A bad file does not stop the others."""
    session = open_session(config)
    console.info(session.headline)
    claim_folder(Path(config.output_dir), COMMAND)
    failed = 0
    for task in track(tasks, config.mode, len(tasks), "file"):
        reason = _attempt(session, task)
        if reason is not None:
            failed += 1
            console.error(f"{task.name}: {reason}")
    failures = f", {failed} failed" if failed else ""
    console.info(
        f"{config.mode}: {len(tasks) - failed} of {len(tasks)} done{failures}; results are in "
        f"{config.output_dir}"
    )
    return EXIT_DATA if failed else 0


def _attempt(session: Session, task: Task) -> str | None:
    """Do one task; returns the reason if it cannot be done."""
    if reason := _unusable_name(task):
        return reason
    try:
        _WORK[session.config.mode](session, task)
    except (BadImageError, BadLatentsError) as error:
        return str(error)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        needed = f" ({error})" if isinstance(error, MemoryError) and str(error) else ""
        problem = f"does not fit into memory on {session.device.type}{needed}"
    else:
        return None
    tiles = session.less_memory()
    if tiles == "exact":
        session.tiles = tiles
        console.info(f"{task.name} {problem}: computes in tiles from here on")
        return _attempt(session, task)
    if tiles == "blended":
        console.warning(f"{task.name} {problem}: computes it in blended tiles, which are approximate")
        before, session.tiles = session.tiles, tiles
        reason = _attempt(session, task)
        session.tiles = before  # the next images may fit
        return reason
    return f"out_of_memory: {problem}: {_smaller_setting(session)}"


def _unusable_name(task: Task) -> str | None:
    """Why the file system has no files with the names of the results: one is too long."""
    for output in task.outputs:
        try:
            os.lstat(output)
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{output.name} cannot be written: {error.strerror}"
    return None


def _smaller_setting(session: Session) -> str:
    """The remedy if a command has run out of memory."""
    if session.config.tiles in ("off", "exact"):
        return f"remove --tiles {session.config.tiles}"
    return "lower --tile_size" if session.device.type == "cuda" else "add --dtype bf16, or shrink the image"


def _reconstruct(session: Session, task: Task) -> None:
    latents = session.encode(read_image(task.inputs[0], session.config))
    write_png(task.outputs[0], session.decode(latents.posterior.mode(), latents.size))


def _encode(session: Session, task: Task) -> None:
    path = task.inputs[0]
    latents = session.encode(read_image(path, session.config))
    save_latents(task.outputs[0], latents, session.source, path.name)


def _decode(session: Session, task: Task) -> None:
    latents = load_latents(task.inputs[0], session.source, session.config.any_vae)
    write_png(task.outputs[0], session.decode(latents.posterior.mode(), latents.size))


def _interpolate(session: Session, task: Task) -> None:
    """A straight line between two modes: latents of these VAEs are near their mean, not on a sphere."""
    start, end = (session.read(path) for path in task.inputs)
    if start.size != end.size:
        sizes = " and ".join(f"{width}x{height}" for height, width in (start.size, end.size))
        raise BadLatentsError("sizes_differ", f"{sizes} px: resize both to the same size first")
    for weight, output in zip(torch.linspace(0, 1, len(task.outputs)), task.outputs, strict=True):
        latents = torch.lerp(start.posterior.mode(), end.posterior.mode(), weight)
        write_png(output, session.decode(latents, start.size))


def _vary(session: Session, task: Task) -> None:
    """Samples whose noise depends only on (seed, index, name), not on the order of the files."""
    config = session.config
    latents = session.read(task.inputs[0])
    mean = latents.posterior.mean
    for index, output in enumerate(task.outputs):
        noise = keyed_normal(mean.shape, config.seed, index, task.name).to(mean.device)
        sample = latents.posterior.sample(noise * config.noise_scale)
        write_png(output, session.decode(sample, latents.size))


_WORK = {
    "reconstruct": _reconstruct,
    "encode": _encode,
    "decode": _decode,
    "interpolate": _interpolate,
    "variations": _vary,
}
