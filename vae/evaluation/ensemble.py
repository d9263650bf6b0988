"""An ensemble of VAEs: the weighted mean of their reconstructions.

It works for VAEs of any shape and start, because nothing but pixels is averaged. It costs the time of all of
them, and there is no one latent to store: it shows what a combination could gain, and is no VAE.

Shapes: B images of H x W px.
"""

from collections.abc import Sequence

import torch

from vae.evaluation.measure import Reconstruct, VaeCodec
from vae.images.pixels import as_uint8
from vae.interop.vae_files import LoadedVae


def ensemble(
    vaes: Sequence[LoadedVae],
    weights: Sequence[float],
    device: torch.device,
    dtype: torch.dtype,
    sample_seed: int | None,
) -> Reconstruct:
    """The mean of the 8-bit reconstructions, rounded to 8 bit; all VAEs stay on the device."""
    shares = [weight / sum(weights) for weight in weights]
    codecs: list[VaeCodec] = []  # built once: the first call of each is slower

    def reconstruct(images: torch.Tensor, indices: range) -> list[torch.Tensor | None]:
        models = [vae.autoencoder.to(device).to(memory_format=torch.channels_last) for vae in vaes]
        if not codecs:
            codecs.extend(VaeCodec(model, dtype, sample_seed) for model in models)
        means: list[torch.Tensor | None] = [torch.zeros_like(image, dtype=torch.float32) for image in images]
        for codec, share in zip(codecs, shares, strict=True):
            for number, recon in enumerate(codec(images, indices)):
                mean = means[number]
                if recon is None or mean is None:
                    means[number] = None
                else:
                    means[number] = mean + share * as_uint8(recon).cpu()
        return [None if mean is None else mean.round().to(torch.uint8) for mean in means]

    return reconstruct
