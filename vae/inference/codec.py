"""Encode, decode and reconstruct with any sides, in any dtype, whole or in tiles.

Shapes: B images, H x W pixels of any size from 8 px on, f the downsampling, Z latent channels; the latent has
h = ceil(H/f) rows and w = ceil(W/f) columns. Results lie where the input lies, at least in fp32; the network
computes where its weights lie.
"""

from collections.abc import Callable

import torch

from vae.inference.padding import crop_back, pad_to_multiple
from vae.inference.tiled import decode_in_tiles, encode_in_tiles
from vae.model.autoencoder import AutoencoderKL, Posterior


def _nothing(done: int, total: int) -> None:
    """Progress that nobody asked for."""


@torch.no_grad()
def encode_images(
    model: AutoencoderKL,
    images: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    tile: int | None = None,
    on_step: Callable[[int, int], None] = _nothing,
) -> Posterior:
    """Posterior (B, Z, h, w) of images (B, 3, H, W) in [-1, 1], padded where H or W is no multiple of f.

    `tile`: side of the tiles, px; None runs the whole image at once. `on_step(done, total)` hears of tiles.
    """
    padded = pad_to_multiple(images, model.downsampling)
    device = next(model.parameters()).device
    if tile is None:
        posterior = model.encode(_to_network(padded, device, dtype))
    else:
        posterior = Posterior.of_moments(encode_in_tiles(model, padded, dtype, tile, on_step))
    return Posterior(posterior.mean.to(images.device), posterior.logvar.to(images.device))


@torch.no_grad()
def decode_latents(
    model: AutoencoderKL,
    latents: torch.Tensor,
    size: tuple[int, int] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    tile: int | None = None,
    on_step: Callable[[int, int], None] = _nothing,
) -> torch.Tensor:
    """Images (B, 3, H, W), about [-1, 1] and not clamped, of latents (B, Z, h, w) as the encoder gave them.

    `size` is the (H, W) before padding; None keeps the whole (h f, w f). `tile` and `on_step` as above.
    """
    device = next(model.parameters()).device
    if tile is None:
        images = model.decode(_to_network(latents, device, dtype))
    else:
        images = decode_in_tiles(model, latents, dtype, tile, on_step)
    images = images if size is None else crop_back(images, size)
    return images.to(latents.device, images.dtype if images.dtype == torch.float64 else torch.float32)


def reconstruct(
    model: AutoencoderKL,
    images: torch.Tensor,
    noise: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    tile: int | None = None,
) -> torch.Tensor:
    """Reconstructed images (B, 3, H, W) in [-1, 1], of the posterior's mode, or of a sample by `noise`."""
    posterior = encode_images(model, images, dtype=dtype, tile=tile)
    latents = posterior.mode() if noise is None else posterior.sample(noise)
    return decode_latents(model, latents, images.shape[2:], dtype=dtype, tile=tile)


def _to_network(values: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return values.to(device, dtype, memory_format=torch.channels_last)
