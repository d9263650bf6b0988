"""Measures of latents for diffusion models: PSNR after decoding with noise, and the effective rank.

Shapes: N latents of C channels, H x W positions. Values of VAEs are comparable only for equal shapes and the
same images.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from vae.images.pixels import to_float
from vae.images.psnr import MAX_PSNR_DB, psnr
from vae.inference.codec import decode_latents, encode_images
from vae.losses.latent_statistics import MIN_STD_SHARE
from vae.model.autoencoder import AutoencoderKL
from vae.ops.noise import keyed_normal

MAX_SIDE = 32  # positions that are kept: the latents of all images are in memory
MAX_DECODED = 64  # images of the noise curve
# Of the channels. In benchmarks/results/diffusability, VAEs below it (2.2 to 4.3 of 16 channels) had a low
# velocity loss and bad samples or reconstructions; the next one (6.8) had the best samples.
MIN_RANK_SHARE = 1 / 3
NOISE_SEED = 0
RANK = "effective rank"
TAUS = (0.05, 0.1, 0.2, 0.4, 0.8)  # of a latent's standard deviation


def normalise(latents: Tensor) -> Tensor:
    """Latents (N, C, H, W) with mean 0 and standard deviation 1 of each channel, in fp64.

    Dead channels keep less: they would count as noise.
    """
    wide = latents.double()
    std, mean = torch.std_mean(wide, dim=(0, 2, 3), correction=0, keepdim=True)
    least = (MIN_STD_SHARE * std.max()).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide - mean) / std.clamp(min=least)


def effective_rank(latents: Tensor) -> float:
    """exp(entropy) of the shares of the channel covariance's eigenvalues (Roy & Vetterli 2007): 1 to C.

    Of normalised latents.
    """
    tokens = latents.transpose(0, 1).flatten(1)  # (C, N H W)
    shares = torch.linalg.eigvalsh(tokens @ tokens.T / tokens.shape[1]).clamp(min=0)
    shares = shares / shares.sum()
    return torch.special.entr(shares).sum().exp().item()


def noise_curve(
    decode: Callable[[Tensor], Tensor],
    latents: Tensor,
    noise: Tensor,
    images: Tensor,
    taus: Sequence[float] = TAUS,
) -> Tensor:
    """PSNR in dB of decoded latents with each of `taus` times the noise: (T, N) for T values of tau.

    `latents` (N, C, H, W) are those of the VAE, not normalised; `noise` has the standard deviation of each of
    their channels. `decode` returns images (N, 3, H f, W f).
    """
    recons = (decode(latents + tau * noise) for tau in taus)
    return torch.stack([psnr(recon, images).clamp(max=MAX_PSNR_DB) for recon in recons])


@torch.no_grad()
def diffusability(
    model: AutoencoderKL, batches: Iterable[Tensor], dtype: torch.dtype
) -> dict[str, float | None]:
    """Every measure for uint8 images (B, 3, H, W) of one size, by its title.

    The effective rank sees the middle of large latents, and the noise curve decodes the first images only.
    Latents are the posterior's mode. A measure is None if a decoded image is not finite; there are none at
    all if a latent is not.
    """
    device = next(model.parameters()).device
    middles: list[Tensor] = []
    decoded: list[tuple[Tensor, Tensor]] = []  # on the CPU: at 2048 px, 64 images would fill GiB of a card
    for images in batches:
        latents = encode_images(model, to_float(images.to(device)), dtype=dtype).mode().cpu()
        middles.append(_middle(latents).clone())  # a view would keep all of a large image
        if sum(len(kept) for kept, _ in decoded) < MAX_DECODED:
            decoded.append((latents, images))
    raw = torch.cat(middles)
    if not raw.isfinite().all():
        return {}
    measures: dict[str, float | None] = {RANK: effective_rank(normalise(raw))}
    curves = []
    std = raw.double().std((0, 2, 3), correction=0, keepdim=True).to(device, raw.dtype)
    for number, (latents, images) in enumerate(decoded):
        noise = keyed_normal(latents.shape, NOISE_SEED, number).to(std) * std
        decode = partial(decode_latents, model, size=images.shape[2:], dtype=dtype)
        curves.append(noise_curve(decode, latents.to(device), noise, to_float(images.to(device))))
    means = torch.cat(curves, dim=1).mean(1).tolist()
    measures |= {f"noise {tau:g} dB": value for tau, value in zip(TAUS, means, strict=True)}
    return {name: value if math.isfinite(value or 0) else None for name, value in measures.items()}


def _middle(latents: Tensor) -> Tensor:
    """The middle positions of latents (B, C, H, W), at most MAX_SIDE along each side."""
    top, left = (max(0, side - MAX_SIDE) // 2 for side in latents.shape[2:])
    return latents[:, :, top : top + MAX_SIDE, left : left + MAX_SIDE]


def rank_warning(name: str, rank: float | None, channels: int) -> str | None:
    """A line about latents whose channels repeat each other; None if they do not."""
    if rank is None or rank >= MIN_RANK_SHARE * channels:
        return None
    return (
        f"latents of {name}: the effective rank is {rank:.1f} of {channels} channels, which repeat each other"
    )
