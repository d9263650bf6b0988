"""What the heads of a probe see: latents, pixels and reconstructions, as maps of equal size.

Shapes: B images of S x S px, f = downsampling factor of a VAE, Z latent channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vae.config.evaluate_flags import EvaluateConfig
from vae.device import DTYPES
from vae.evaluation.image_set import ImageSet
from vae.evaluation.measure import VaeCodec
from vae.evaluation.probe.reference import Pretrained
from vae.images.pixels import to_float
from vae.interop.vae_files import LoadedVae
from vae.system.errors import UserError

MAP_SIDE = 16  # larger maps are averaged: the heads see no more


def _pooled(maps: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(maps, min(MAP_SIDE, maps.shape[2])).cpu()


def _of_pixels(images: Tensor, factor: int, pretrained: Pretrained | None) -> Tensor:
    """Maps of uint8 (B, 3, S, S): by the pretrained network, else all pixels of each latent position."""
    floats = to_float(images)
    return pretrained(floats) if pretrained else _pooled(F.pixel_unshuffle(floats, factor))


def maps_of_pixels(
    image_set: ImageSet,
    config: EvaluateConfig,
    factor: int,
    pretrained: Pretrained | None,
    device: torch.device,
) -> Tensor:
    """The maps of all images."""
    parts = [
        _of_pixels(images.to(device), factor, pretrained)
        for _, images in image_set.batches(config.sizes[0], config.batch_size)
    ]
    return torch.cat(parts)


def maps_of_vae(
    vae: LoadedVae,
    image_set: ImageSet,
    config: EvaluateConfig,
    pretrained: Pretrained | None,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """The latents (the posterior's mode) and the reconstructions of all images, as maps."""
    codec = VaeCodec(vae.autoencoder.to(device), DTYPES[config.dtype], None)
    latents, recons = [], []
    done = 0
    for _, images in image_set.batches(config.sizes[0], config.batch_size):
        latents.append(_pooled(codec.latents_of(images).float()))
        recon = codec(images, range(done, done + len(images)))
        done += len(images)
        if any(one is None for one in recon):
            raise UserError("--probe: a VAE returns NaN or infinity for some images: it cannot be probed")
        stacked = torch.stack([one for one in recon if one is not None])
        recons.append(_of_pixels(stacked.to(device), vae.autoencoder.downsampling, pretrained))
    vae.autoencoder.cpu()
    return torch.cat(latents), torch.cat(recons)
