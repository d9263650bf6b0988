"""Encode, decode and reconstruct images of any size, in any dtype, whole or in blended tiles.

Shapes: B images, H x W pixels of any size from 8 px on, f the downsampling, Z latent channels; the latent has
h = ceil(H/f) rows and w = ceil(W/f) columns. Results are on the device of the input, in fp32 or wider; the
network computes on the device of its weights.
"""

from collections.abc import Callable, Sequence

import torch

from vae.inference.blended import latents_per_tile, run_blended
from vae.inference.padding import crop_back, pad_to_multiple
from vae.model.autoencoder import AutoencoderKL, Posterior
from vae.system.host import GIB, free_memory

# The least bytes alive at once in main memory, per pixel, channel of the first level and byte of the dtype,
# counted by vae.memory.live_bytes. A level keeps its input until its last block ends: with more than one
# block, one more map.
_MAPS = {"encode": 3.0, "decode": 5.5}


def check_main_memory(
    model: AutoencoderKL, operation: str, pixels: int, dtype: torch.dtype, tile: int | None
) -> None:
    """Raise MemoryError if an operation on that many pixels needs more main memory than is free.

    `operation` is "encode" or "decode". Without this check, Linux ends the process without a message. Memory
    of a GPU needs no check: PyTorch reports it.
    """
    if next(model.parameters()).device.type != "cpu":
        return
    if tile is not None:  # each is computed as a whole image
        pixels = min(pixels, (latents_per_tile(tile, model.downsampling) * model.downsampling) ** 2)
    config, factor = model.config, _MAPS[operation]
    if operation == "encode" and config.layers_per_block > 1:
        factor += 1
    if operation == "decode" and config.decoder == "tiny":
        factor = 3.0
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
    on_step: Callable[[int, int], None] = _ignore_progress,
) -> Posterior:
    """Posterior (B, Z, h, w) of images (B, 3, H, W) in [-1, 1], padded to multiples of f.

    `tile` is the side of the tiles in px, which are approximate and need memory for one of them only; None
    computes the whole image at once. `on_step(done, total)` is called after each tile. Raises MemoryError if
    the main memory is too small.
    """
    padded = pad_to_multiple(images, model.downsampling)
    check_main_memory(model, "encode", padded[:, 0].numel(), dtype, tile)
    device = next(model.parameters()).device
    if tile is None:
        posterior = model.encode(_to_network(padded, device, dtype))
    else:
        posterior = Posterior.from_moments(run_blended(model, "encode", padded, dtype, tile, on_step))
    return Posterior(posterior.mean.to(images.device), posterior.logvar.to(images.device))


@torch.no_grad()
def decode_latents(
    model: AutoencoderKL,
    latents: torch.Tensor,
    size: Sequence[int] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    tile: int | None = None,
    on_step: Callable[[int, int], None] = _ignore_progress,
) -> torch.Tensor:
    """Images (B, 3, H, W) in about [-1, 1], not clamped, from the encoder's latents (B, Z, h, w).

    `size` is the (H, W) before padding; None returns all (h f, w f) pixels. For `tile` and `on_step`,
    see `encode_images`. Raises MemoryError if the main memory is too small.
    """
    check_main_memory(model, "decode", latents[:, 0].numel() * model.downsampling**2, dtype, tile)
    device = next(model.parameters()).device
    if tile is None:
        images = model.decode(_to_network(latents, device, dtype))
    else:
        images = run_blended(model, "decode", latents, dtype, tile, on_step)
    images = images if size is None else crop_back(images, size)
    return images.to(latents.device, images.dtype if images.dtype == torch.float64 else torch.float32)


def _to_network(values: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return values.to(device, dtype, memory_format=torch.channels_last)
