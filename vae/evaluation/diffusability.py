"""Measures of latents for diffusion models: PSNR after decoding with noise, and networks trained on them.

Shapes: N latents of C channels, H x W positions. Values of VAEs are comparable only for equal shapes and the
same images.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from vae.evaluation.velocity import (
    MAX_CROP,
    NEIGHBORS,
    coverage,
    distance_of_features,
    held_out_loss,
    image_features,
    is_held_out,
    middle,
    samples_of,
    thumbnails,
    trained_networks,
)
from vae.images.pixels import to_float
from vae.images.psnr import MAX_PSNR_DB, psnr
from vae.inference.codec import decode_latents, encode_images
from vae.losses.latent_statistics import MIN_STD_SHARE
from vae.model.autoencoder import AutoencoderKL
from vae.ops.noise import keyed_normal

MAX_SIDE = 32  # positions that are kept: the latents of all images are in memory
MAX_DECODED = 64  # images of the noise curve
MAX_SAMPLES = 1000  # of a network; the distance of 400 varies by a tenth
DECODED_AT_ONCE = 32 * 128**2  # pixels of samples
# Of the channels. In benchmarks/results/diffusability, VAEs below it (2.2 to 4.3 of 16 channels) had a low
# velocity loss and bad samples or reconstructions; the next one (6.8) had the best samples.
MIN_RANK_SHARE = 1 / 3
NOISE_SEED = 0
RANK = "effective rank"
# of the networks of vae/evaluation/velocity.py, and the standard deviations over their seeds
VELOCITY, VELOCITY_SPREAD = "velocity loss", "± of losses"
DISTANCE, DISTANCE_SPREAD = "sample distance", "± of distances"
RECONSTRUCTION = "reconstruction distance"  # the part of a sample distance that the VAE alone causes
COVERAGE = "coverage"
# Between the 0.98 of other crops of photographs and the 0.26 of 20 of them that are repeated (400 crops).
MIN_COVERAGE = 0.5
SPREAD_OF = {VELOCITY: VELOCITY_SPREAD, DISTANCE: DISTANCE_SPREAD}
ENDS = {VELOCITY: "easier to model", DISTANCE: "decoded from samples to textures nearer to the real ones"}
VELOCITY_SEEDS = 3
TAUS = (0.05, 0.1, 0.2, 0.4, 0.8)  # of a latent's standard deviation

Measures = Mapping[str, float | None]  # by title


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
    model: AutoencoderKL, batches: Iterable[Tensor], dtype: torch.dtype, velocity_steps: int = 0
) -> dict[str, float | None]:
    """Every measure for uint8 images (B, 3, H, W) of one size, by its title.

    All but the noise curve see the middle of large latents. The noise curve decodes the first images only.
    With `velocity_steps`, networks are trained for so many steps, for the velocity loss and the sample
    distance, and their spreads over seeds. Latents are the posterior's mode. A measure is None if a decoded
    image is not finite; there are none at all if a latent is not.
    """
    device = next(model.parameters()).device
    middles: list[Tensor] = []
    decoded: list[tuple[Tensor, Tensor]] = []  # on the CPU: at 2048 px, 64 images would fill GiB of a card
    crops: list[Tensor] = []
    for images in batches:
        latents = encode_images(model, to_float(images.to(device)), dtype=dtype).mode().cpu()
        middles.append(middle(latents, MAX_SIDE).clone())  # a view would keep all of a large image
        if velocity_steps:
            crops.append(middle(images, MAX_CROP * model.downsampling).clone())
        if sum(len(kept) for kept, _ in decoded) < MAX_DECODED:
            decoded.append((latents, images))
    raw = torch.cat(middles)
    if not raw.isfinite().all():
        return {}
    normalised = normalise(raw)
    measures: dict[str, float | None] = {RANK: effective_rank(normalised)}
    curves = []
    std, mean = torch.std_mean(raw.double(), (0, 2, 3), correction=0, keepdim=True)
    std, mean = (values.to(device, raw.dtype) for values in (std, mean))
    for number, (latents, images) in enumerate(decoded):
        noise = keyed_normal(latents.shape, NOISE_SEED, number).to(std) * std
        decode = partial(decode_latents, model, size=images.shape[2:], dtype=dtype)
        curves.append(noise_curve(decode, latents.to(device), noise, to_float(images.to(device))))
    means = torch.cat(curves, dim=1).mean(1).tolist()
    measures |= {f"noise {tau:g} dB": value for tau, value in zip(TAUS, means, strict=True)}
    if velocity_steps:
        images = torch.cat(crops)
        decode = partial(decode_latents, model, size=images.shape[2:], dtype=dtype)
        measures |= _measures_of_networks(
            normalised.to(device, torch.float32), images, lambda z: decode(z * std + mean), velocity_steps
        )
    return {name: value if math.isfinite(value or 0) else None for name, value in measures.items()}


def _measures_of_networks(
    normalised: Tensor, images: Tensor, decode: Callable[[Tensor], Tensor], steps: int
) -> dict[str, float | None]:
    """Velocity loss, distances and coverage of networks on the latents, whose middles are those of `images`.

    Of few images there is no coverage.
    """
    networks = trained_networks(normalised, VELOCITY_SEEDS, steps)
    unseen = is_held_out(len(images))
    latents, others = (middle(normalised[chosen], MAX_CROP) for chosen in (unseen, ~unseen))
    real = to_float(images[unseen][:MAX_SAMPLES])
    at_once = max(1, DECODED_AT_ONCE // real[0, 0].numel())
    features, small = image_features(real), thumbnails(real)

    def compared(sampled: Tensor) -> tuple[float, float]:
        """Distance and coverage of the decoded images."""
        parts = []
        for part in sampled.split(at_once):
            decoded = decode(part).clamp(-1, 1).cpu()
            parts.append((image_features(decoded), thumbnails(decoded)))
        of_samples, small_samples = map(torch.cat, zip(*parts, strict=True))
        covered = coverage(small_samples, small) if len(small) > NEIGHBORS else math.nan
        return distance_of_features(of_samples, features), covered

    shape = (len(real), *latents.shape[1:])
    noises = [keyed_normal(shape, NOISE_SEED, seed).to(latents) for seed in range(VELOCITY_SEEDS)]
    pairs = [compared(samples_of(*pair)) for pair in zip(networks, noises, strict=True)]
    distances, covered = zip(*pairs, strict=True)
    losses = [held_out_loss(network, latents) for network in networks]
    table = torch.tensor([losses, distances], dtype=torch.float64)
    values = torch.stack([table.mean(1), table.std(1)], dim=1).flatten().tolist()
    names = (VELOCITY, VELOCITY_SPREAD, DISTANCE, DISTANCE_SPREAD)
    measures: dict[str, float | None] = dict(zip(names, values, strict=True))
    measures[COVERAGE] = math.fsum(covered) / len(covered)
    return measures | {RECONSTRUCTION: compared(others[: len(real)])[0]}


def lowest(key: str, vaes: Mapping[str, Measures]) -> tuple[list[str], bool]:
    """The two VAEs with the lowest VELOCITY or DISTANCE, and whether they differ by more than the seeds."""
    ordered = sorted(
        (value, name) for name, measures in vaes.items() if (value := measures.get(key)) is not None
    )
    if len(ordered) < 2:
        return [name for _, name in ordered], False
    (low, best), (high, second) = ordered[:2]
    spread = math.hypot(*(vaes[name][SPREAD_OF[key]] or 0 for name in (best, second)))
    return [best, second], high - low > 2 * spread


def verdicts(vaes: Mapping[str, Measures]) -> list[str]:
    """Which of the VAEs has the better samples, and which latents are easier to model, or that seeds hide it.

    Their latents have one shape. Nothing if fewer than two VAEs have a value.
    """
    lines = []
    for key in (DISTANCE, VELOCITY):
        names, is_significant = lowest(key, vaes)
        if len(names) < 2:
            continue
        if not is_significant:
            lines.append(f"latents of {' and '.join(names)}: no difference in {key} beyond that of the seeds")
            continue
        low, high = (f"{vaes[name][key]:.3f} ± {vaes[name][SPREAD_OF[key]]:.3f}" for name in names)
        lines.append(f"latents of {names[0]} are {ENDS[key]}: {key} {low} against {high} of {names[1]}")
    return lines


def rank_warning(name: str, rank: float | None, channels: int) -> str | None:
    """A line about latents whose channels repeat each other; None if they do not."""
    if rank is None or rank >= MIN_RANK_SHARE * channels:
        return None
    return (
        f"latents of {name}: the effective rank is {rank:.1f} of {channels} channels, which repeat each "
        f"other: a low {VELOCITY} then says nothing; compare the {DISTANCE} of --diffusion_probe"
    )


def coverage_warning(name: str, covered: float | None) -> str | None:
    """A line about samples that repeat few images; None if they do not."""
    if covered is None or covered >= MIN_COVERAGE:
        return None
    return (
        f"latents of {name}: samples cover {covered:.2f} of the held-out images (real images 0.97), so they "
        f"repeat each other or lack contrast: a low {DISTANCE} then says nothing"
    )
