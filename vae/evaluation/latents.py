"""Latents over a set of images: statistics, KL divergence, posterior noise, and dead channels.

Shapes: B latents of C channels, h x w.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from vae.evaluation.metrics import color_psnr
from vae.evaluation.results import LatentFacts
from vae.images.pixels import MAX_PSNR_DB, to_float
from vae.inference.codec import decode_latents, encode_images
from vae.interop.latent_statistics import MIN_VARIANCE, LatentSums
from vae.losses.kl import kl_divergence
from vae.losses.variance import MIN_STD_SHARE
from vae.model.autoencoder import AutoencoderKL, Posterior
from vae.ops.noise import keyed_normal

# A channel is dead if the variance of the posterior's mean is less than 1 % of the variance of samples (the
# noise hides the image), or if the mean's standard deviation is at most a thousandth of that of the strongest
# channel. Unlike a fixed variance (Burda et al. 2016: 0.01), both limits do not depend on the latent's scale.
MIN_SIGNAL_SHARE = 0.01


@dataclass
class NoiseSums:
    """Sums over posteriors, which compare their noise with the spread of the latents; processes add theirs.

    The sums stay on the device, so that no batch waits for the host.
    """

    sums: torch.Tensor  # (3, C) fp64: of mean, mean squared and log sigma
    count: int = 0  # values of each channel

    @classmethod
    def begin(cls, channels: int) -> "NoiseSums":
        """Return the sums of no posterior."""
        return cls(torch.zeros(3, channels, dtype=torch.float64))

    def add(self, mean: torch.Tensor, logvar: torch.Tensor) -> None:
        """Add posteriors (B, C, h, w)."""
        means = mean.double()
        log_sigma = 0.5 * logvar.double()
        sums = [part.sum((0, 2, 3)) for part in (means, means.square(), log_sigma)]
        self.sums = self.sums.to(mean.device) + torch.stack(sums)
        self.count += mean.numel() // mean.shape[1]

    def channel_facts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Standard deviation of the means, and mean of log sigma, of each channel: (C,) in fp64."""
        mean, square, log_sigma = self.sums.cpu() / self.count
        return (square - mean.square()).clamp(min=MIN_VARIANCE).sqrt(), log_sigma

    def facts(self) -> dict[str, float]:
        """Return `latent_std` and `sigma_over_std`; nothing if no posterior was added.

        latent_std: standard deviation of the posterior's means, root mean square over the channels.
        """
        if not self.count:
            return {}
        std, log_sigma = self.channel_facts()
        return {
            "latent_std": std.square().mean().sqrt().item(),
            "sigma_over_std": _sigma_over_std(log_sigma, std),
        }


class LatentMeter:
    """Accumulates statistics of posteriors of `channels` and images of any size, in fp64."""

    def __init__(self, channels: int) -> None:
        self._sampled = LatentSums()
        self._noise = NoiseSums.begin(channels)
        self._kl = torch.zeros((), dtype=torch.float64)  # nats per position, summed over images
        self._images = 0

    def add(self, posterior: Posterior) -> None:
        """Add posteriors (B, C, h, w)."""
        mean, logvar = posterior.mean, posterior.logvar
        self._sampled.add(mean, logvar)
        self._noise.add(mean, logvar)
        positions = mean[0, 0].numel()
        self._kl += kl_divergence(mean.double(), logvar.double()).sum().cpu() / positions
        self._images += len(mean)

    def facts(self, model: AutoencoderKL) -> LatentFacts | None:
        """Facts about all latents of `model` that were added; None if there were none."""
        if self._images == 0:
            return None
        sampled = self._sampled.statistics()
        std, log_sigma = self._noise.channel_facts()
        dead = std.square() < MIN_SIGNAL_SHARE * sampled.std.square()
        dead |= std <= MIN_STD_SHARE * std.max()
        kl = (self._kl / self._images).item() / model.downsampling**2
        return LatentFacts(
            channels=model.config.z_channels,
            downsampling=model.downsampling,
            mean=sampled.mean.tolist(),
            std=sampled.std.tolist(),
            kl_nats_per_pixel=kl if model.config.has_posterior else None,
            sigma_over_std=_sigma_over_std(log_sigma, std),
            dead_channels=dead.nonzero().flatten().tolist(),
            dead_share=dead.double().mean().item(),
        )


def _sigma_over_std(log_sigma: torch.Tensor, std: torch.Tensor) -> float:
    """The posterior's sigma over the standard deviation of its means, as a median over the channels.

    `log_sigma` is the mean of log sigma, so that sigma is a geometric mean, and `std` the standard deviation
    of the means, of each channel (C,).
    """
    return (log_sigma.exp() / std).median().item()


# ---- What a diffusion model's errors in the latents cost ---------------------------------------------------
# PSNR after decoding with noise, and the effective rank. Shapes: N latents of C channels, H x W positions.
# Values of VAEs are comparable only for equal shapes and the same images.

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
    their channels. `decode` returns images (N, ., H f, W f).
    """
    recons = (decode(latents + tau * noise) for tau in taus)
    return torch.stack([color_psnr(recon, images, MAX_PSNR_DB) for recon in recons])


@torch.no_grad()
def diffusability(
    model: AutoencoderKL, batches: Iterable[Tensor], dtype: torch.dtype
) -> dict[str, float | None]:
    """Every measure for uint8 images (B, ., H, W) of one size, by its title.

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
