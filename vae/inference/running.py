"""A command of infer_vae.py, top to bottom: plan, load, then one file after the other."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm

from vae.config.errors import EXIT_DATA
from vae.config.infer_flags import InferConfig
from vae.data.decoding import parse_background
from vae.data.formats import BadImageError
from vae.device import is_out_of_memory
from vae.inference.files import Task, plan_tasks, read_image_tensor, write_png
from vae.inference.latent_file import BadLatentsError, load_latents, save_latents
from vae.inference.session import Session, open_session
from vae.noise import keyed_normal


def infer(config: InferConfig, load_vae: Callable[..., Any]) -> int:
    """Do what the command says; returns the exit code. A file that cannot be used costs only itself.

    `load_vae` is that of vae.interop, which this room does not know.
    """
    parse_background(config.background)  # raises UserError before any work
    tasks = plan_tasks(config)
    session = open_session(config, load_vae)
    print(session.headline, flush=True)
    failed = 0
    for task in tqdm(tasks, desc=config.mode, unit="file", disable=None):
        reason = _attempt(session, task)
        if reason is not None:
            failed += 1
            tqdm.write(f"{task.name}: {reason}", file=sys.stderr)
    bad = f", {failed} failed" if failed else ""
    print(
        f"{config.mode}: {len(tasks) - failed} of {len(tasks)} done{bad}; results are in {config.output_dir}"
    )
    return EXIT_DATA if failed else 0


def _attempt(session: Session, task: Task) -> str | None:
    """Do one task; the reason why it cannot be done, or None."""
    try:
        _WORK[session.config.mode](session, task)
    except (BadImageError, BadLatentsError) as error:
        return str(error)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return f"out_of_memory: does not fit into memory on {session.device.type}: {_smaller(session)}"
    return None


def _smaller(session: Session) -> str:
    """What takes less memory than the command that has failed."""
    if not session.tile:
        return "add --tile"
    return "lower --tile_size" if session.device.type == "cuda" else "add --dtype bf16, or shrink the image"


def _reconstruct(session: Session, task: Task) -> None:
    latents = session.encode(read_image_tensor(task.inputs[0], session.config))
    write_png(task.outputs[0], session.decode(latents.posterior.mode(), latents.size))


def _encode(session: Session, task: Task) -> None:
    image = task.inputs[0]
    latents = session.encode(read_image_tensor(image, session.config))
    save_latents(task.outputs[0], latents, session.source, image.name)


def _decode(session: Session, task: Task) -> None:
    latents = load_latents(task.inputs[0], session.source, session.config.any_vae)
    write_png(task.outputs[0], session.decode(latents.posterior.mode(), latents.size))


def _interpolate(session: Session, task: Task) -> None:
    """Straight line between two modes: the field's latents lie around their mean, on no sphere."""
    start, end = (session.read(path) for path in task.inputs)
    if start.size != end.size:
        sizes = " and ".join(f"{width}x{height}" for height, width in (start.size, end.size))
        raise BadLatentsError("sizes_differ", f"{sizes} px: bring both to one size first")
    for share, output in zip(torch.linspace(0, 1, len(task.outputs)), task.outputs, strict=True):
        latents = torch.lerp(start.posterior.mode(), end.posterior.mode(), share)
        write_png(output, session.decode(latents, start.size))


def _vary(session: Session, task: Task) -> None:
    latents = session.read(task.inputs[0])
    for index, output in enumerate(task.outputs):
        noise = _noise(latents.posterior.mean, session.config.seed, task.name, index)
        sample = latents.posterior.sample(noise * session.config.noise_scale)
        write_png(output, session.decode(sample, latents.size))


_WORK = {
    "reconstruct": _reconstruct,
    "encode": _encode,
    "decode": _decode,
    "interpolate": _interpolate,
    "variations": _vary,
}


def _noise(like: torch.Tensor, seed: int, name: str, index: int) -> torch.Tensor:
    """Standard normal noise of `like`'s shape that depends on (seed, name, index) alone, not on the order."""
    return keyed_normal(like.shape, seed, index, name).to(like.device)
