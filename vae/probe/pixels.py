"""Pixels and reconstructions as maps, which are compared with latents.

Shapes: N images of S x S px, f = downsampling factor of a VAE, C channels of h x h.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vae.config.evaluate_flags import EvaluateConfig
from vae.device import DTYPES
from vae.evaluation.image_set import in_threads
from vae.images.pixels import to_float, to_uint8
from vae.inference.codec import decode_latents
from vae.model.autoencoder import AutoencoderKL
from vae.probe.labels import LabelledSet
from vae.probe.latents import load_views
from vae.system.errors import UserError

MAP_SIDE = 16  # larger maps are averaged

MapsOf = Callable[[Tensor], Tensor]  # floats (B, 3, S, S) in [-1, 1] -> (B, C, h, h)


def _half(maps: Tensor) -> np.ndarray:
    return maps.half().cpu().numpy()


def positions_of(images: Tensor, factor: int) -> Tensor:
    """All pixels of each latent position as its channels."""
    maps = F.pixel_unshuffle(images, factor)
    return F.adaptive_avg_pool2d(maps, min(MAP_SIDE, maps.shape[-1]))


def maps_of_pixels(
    labelled: LabelledSet, config: EvaluateConfig, maps_of: MapsOf, device: torch.device
) -> np.ndarray:
    """The maps of all images, fp16 (N, 1, C, h, h)."""
    starts = range(0, len(labelled.indices), config.batch_size)
    loaded = in_threads(partial(load_views, labelled, config, 1), starts)
    return np.concatenate([_half(maps_of(to_float(pixels[:, 0].to(device)))) for pixels, _ in loaded])[
        :, None
    ]


def maps_of_recon(
    latents: np.ndarray, model: AutoencoderKL, config: EvaluateConfig, maps_of: MapsOf, device: torch.device
) -> np.ndarray:
    """The maps of the reconstructions from fp16 latents (N, V, Z, h, w), rounded to 8 bit."""
    parts = []
    for start in range(0, len(latents), config.batch_size):
        part = torch.from_numpy(latents[start : start + config.batch_size, 0]).to(device).float()
        recon = decode_latents(model, part, [config.sizes[0]] * 2, dtype=DTYPES[config.dtype])
        if not torch.isfinite(recon).all():
            raise UserError("--probe: a VAE returns NaN or infinity for some images: it cannot be probed")
        parts.append(_half(maps_of(to_float(to_uint8(recon)))))
    return np.concatenate(parts)[:, None]
