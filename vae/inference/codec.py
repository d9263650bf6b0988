"""Encode, decode and reconstruct images of any size, in any dtype, whole, in exact or in blended tiles.

Shapes: B images, H x W pixels of any size from 8 px on, f the downsampling, Z latent channels; the latent has
h = ceil(H/f) rows and w = ceil(W/f) columns. Results are on the device of the input, in fp32 or wider; the
network computes on the device of its weights.
"""

from collections.abc import Callable, Sequence

import torch

from vae.inference.blended import latents_per_tile, run_blended
from vae.inference.padding import crop_back, pad_to_multiple
from vae.inference.tiled import run_in_tiles
from vae.model.autoencoder import AutoencoderKL, Posterior
from vae.system.host import GIB, free_memory

# The least bytes alive at once in main memory, per pixel, channel of the first level and byte of the dtype.
# Whole images: counted by vae.memory.live_bytes. Tiles: the feature maps (docs/infer.md has measurements).
# A level keeps its input until its last block ends: with more than one block, one more map.
_WHOLE = {"encode": 3.0, "decode": 5.5}
_TILED = {"encode": 2.0, "decode": 3.0}


def check_main_memory(
    model: AutoencoderKL,
    operation: str,
    pixels: int,
    dtype: torch.dtype,
    tile: int | None,
    blended: bool = False,
) -> None:
    """Raise MemoryError if an operation on that many pixels needs more main memory than is free.

    `operation` is "encode" or "decode". Without this check, Linux ends the process without a message. Memory
    of a GPU needs no check: PyTorch reports it.
    """
    is_whole = tile is None or blended  # each blended tile is computed as a whole image
    if is_whole and next(model.parameters()).device.type != "cpu":
        return
    if tile is not None and blended:
        side = latents_per_tile(tile, model.downsampling) * model.downsampling
        pixels = min(pixels, side**2)
    factor = (_WHOLE if is_whole else _TILED)[operation]
    if is_whole and operation == "encode" and model.config.layers_per_block > 1:
        factor += 1
    config = model.config
    if operation == "decode" and config.decoder == "tiny":  # three maps; its tiles have 3 channels
        factor = 3.0 if is_whole else 0.0
    width = (config.channels if operation == "encode" else config.up_channels)[0]
    needed = int(factor * pixels * width * dtype.itemsize)
    free = free_memory()
    if needed > free:
        raise MemoryError(f"{operation} needs at least {needed / GIB:.1f} GiB, and {free / GIB:.1f} are free")


def _ignore_progress(done: int, total: int) -> None:
    """The default `on_step`."""


@torch.no_grad()
def encode_images(
    model: AutoencoderKL,
    images: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    tile: int | None = None,
    blended: bool = False,
    on_step: Callable[[int, int], None] = _ignore_progress,
) -> Posterior:
    """Posterior (B, Z, h, w) of images (B, 3, H, W) in [-1, 1], padded to multiples of f.

    `tile` is the side of the tiles in px; None computes the whole image at once. `blended` tiles are
    approximate, and need memory for one of them only. `on_step(done, total)` is called after each tile, with
    FLOPs or numbers of tiles. Raises MemoryError if the main memory is too small.
    """
    padded = pad_to_multiple(images, model.downsampling)
    check_main_memory(model, "encode", padded[:, 0].numel(), dtype, tile, blended)
    device = next(model.parameters()).device
    if tile is None:
        posterior = model.encode(_to_network(padded, device, dtype))
    else:
        run = run_blended if blended else run_in_tiles
        posterior = Posterior.from_moments(run(model, "encode", padded, dtype, tile, on_step))
    return Posterior(posterior.mean.to(images.device), posterior.logvar.to(images.device))


@torch.no_grad()
def decode_latents(
    model: AutoencoderKL,
    latents: torch.Tensor,
    size: Sequence[int] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    tile: int | None = None,
    blended: bool = False,
    on_step: Callable[[int, int], None] = _ignore_progress,
) -> torch.Tensor:
    """Images (B, 3, H, W) in about [-1, 1], not clamped, from the encoder's latents (B, Z, h, w).

    `size` is the (H, W) before padding; None returns all (h f, w f) pixels. For `tile`, `blended` and
    `on_step`, see `encode_images`. Raises MemoryError if the main memory is too small.
    """
    check_main_memory(model, "decode", latents[:, 0].numel() * model.downsampling**2, dtype, tile, blended)
    device = next(model.parameters()).device
    if tile is None:
        images = model.decode(_to_network(latents, device, dtype))
    else:
        run = run_blended if blended else run_in_tiles
        images = run(model, "decode", latents, dtype, tile, on_step)
    images = images if size is None else crop_back(images, size)
    return images.to(latents.device, images.dtype if images.dtype == torch.float64 else torch.float32)


def _to_network(values: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return values.to(device, dtype, memory_format=torch.channels_last)
