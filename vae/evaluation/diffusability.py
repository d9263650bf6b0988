"""Measures of latents that may tell how easily a diffusion model learns them.

Shapes: N latents of C channels, H x W positions, S = H W. Every function takes latents that are normalised
per channel (`normalise`). Values of VAEs are comparable only for equal shapes and the same images.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from vae.evaluation.neighbours import feature_distance, interpolated, same_label_share
from vae.evaluation.sample_distance import distance_of_features, image_features, samples_of
from vae.evaluation.velocity import MAX_CROP, held_out_loss, is_held_out, middle, trained_networks
from vae.images.pixels import to_float, to_uint8
from vae.images.psnr import MAX_PSNR_DB, psnr
from vae.inference.codec import decode_latents, encode_images
from vae.model.autoencoder import AutoencoderKL
from vae.ops.noise import keyed_normal

FLIP_FLOP_ROUNDS = 5
RIDGE = 1e-6  # of the mean eigenvalue, so that a covariance of few latents can be inverted
RHOS = (0.25, 0.5)
BANDS = 16
MAX_SIDE = 32  # positions: the covariance of more takes minutes
MAX_DECODED = 64  # images of the noise curve
MAX_SAMPLES = 1000  # of a network; the distance of 400 varies by a tenth
DECODED_AT_ONCE = 32 * 128**2  # pixels of samples
MIN_STD_SHARE = 1e-3  # of the strongest channel: one with less is dead
NOISE_SEED = 0
# of the networks of vae/evaluation/velocity.py, and the standard deviations over their seeds
VELOCITY, VELOCITY_SPREAD = "velocity loss", "± of losses"
DISTANCE, DISTANCE_SPREAD = "sample distance", "± of distances"
RECONSTRUCTION = "reconstruction distance"  # the part of a sample distance that the VAE alone causes
VELOCITY_SEEDS = 3
TAUS = (0.05, 0.1, 0.2, 0.4, 0.8)  # of a latent's standard deviation


def normalise(latents: Tensor) -> Tensor:
    """Latents (N, C, H, W) with mean 0 and standard deviation 1 of each channel, in fp64.

    Dead channels keep less: they would count as noise.
    """
    wide = latents.double()
    std, mean = torch.std_mean(wide, dim=(0, 2, 3), correction=0, keepdim=True)
    least = (MIN_STD_SHARE * std.max()).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide - mean) / std.clamp(min=least)


def viv(latents: Tensor) -> float | None:
    """Mean over eigenvalues of (π/2) sqrt(λ) (arXiv 2606.03578): π/2 for white noise, else less.

    λ are the eigenvalues of Σ_s ⊗ Σ_c, the Kronecker covariance over positions and channels that the
    flip-flop algorithm estimates (Dutilleul 1999). The latents are one class: see `viv_of_classes`.
    None if there are too few latents for the covariance of their S positions.
    """
    tokens = latents.flatten(2).mT  # (N, S, C)
    count, positions, channels = tokens.shape
    if (count - 1) * channels < 2 * positions or (count - 1) * positions < 2 * channels:
        return None
    space, channel = (eigenvalues.clamp(min=0).sqrt().mean() for eigenvalues in _kronecker_spectrum(tokens))
    return math.pi / 2 * (space * channel).item()


def viv_of_classes(latents: Tensor, labels: Sequence[str | None]) -> tuple[float | None, int]:
    """The mean VIV of the classes that have enough latents, as in the paper, and their number.

    If fewer than two have enough, all latents are one class.
    """
    positions: dict[str, list[int]] = {}
    for position, label in enumerate(labels):
        if label is not None:
            positions.setdefault(label, []).append(position)
    found = [value for rows in positions.values() if (value := viv(latents[rows])) is not None]
    return (statistics.fmean(found), len(found)) if len(found) > 1 else (viv(latents), 1)


def _kronecker_spectrum(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues of Σ_s (S,) and Σ_c (C,) of tokens (N, S, C); their products have the variance as mean."""
    centred = tokens - tokens.mean(0)
    count, positions, channels = centred.shape
    space = torch.eye(positions, dtype=centred.dtype)
    for _ in range(FLIP_FLOP_ROUNDS):
        whitened = _solve(space, centred)
        channel = torch.einsum("nsc,nsd->cd", centred, whitened) / (count * positions)
        whitened = _solve(channel, centred.mT)
        space = torch.einsum("nsc,nct->st", centred, whitened) / (count * channels)
        space = space * (positions / space.trace())
    variance = centred.square().mean()
    channel = channel * (channels * variance / channel.trace())
    return torch.linalg.eigvalsh(space), torch.linalg.eigvalsh(channel)


def _solve(covariance: Tensor, values: Tensor) -> Tensor:
    """covariance^-1 values, for a batch of values (N, D, K) and a covariance (D, D)."""
    size = len(covariance)
    ridge = RIDGE * covariance.trace() / size * torch.eye(size, dtype=covariance.dtype)
    factor = torch.linalg.cholesky(covariance + ridge)
    columns = values.transpose(0, 1).reshape(size, -1)  # (D, N K)
    solved = torch.cholesky_solve(columns, factor)
    return solved.reshape(size, len(values), -1).transpose(0, 1)


def high_frequency_share(latents: Tensor, rho: float) -> float:
    """Share of the energy of the DCT at frequencies u + v > rho (H + W - 2).

    Known as SEC (arXiv 2606.03578). White noise has the share of these frequencies; smooth latents less.
    """
    return (high_frequency_energy(latents, rho).sum() / latents.square().sum()).item()


def spectrum(latents: Tensor) -> list[float]:
    """Mean energy of a coefficient of the DCT in each of BANDS bands of u + v, from low to high.

    White noise has 1 everywhere. None of the latents' sides is below 2.
    """
    coefficients, frequency = _dct(latents)
    energy = coefficients.square().mean((0, 1))
    band = (frequency * BANDS // (frequency.max() + 1)).flatten()
    sums, counts = (torch.zeros(BANDS, dtype=torch.float64) for _ in range(2))
    sums.index_add_(0, band, energy.flatten())
    counts.index_add_(0, band, torch.ones_like(energy.flatten()))
    return [value for value, count in zip((sums / counts).tolist(), counts.tolist(), strict=True) if count]


def high_frequency_energy(latents: Tensor, rho: float) -> Tensor:
    """The energy of each channel (C,) at these frequencies; latents in fp64 that need not be normalised."""
    coefficients, frequency = _dct(latents)
    is_high = (frequency > rho * frequency.max()).to(latents.device, torch.float64)
    return torch.einsum("nchw,hw->c", coefficients.square(), is_high)


def _dct(latents: Tensor) -> tuple[Tensor, Tensor]:
    """The coefficients of latents (N, C, H, W), and the frequency u + v of each (H, W), on the CPU."""
    height, width = latents.shape[2:]
    rows, columns = (_dct_matrix(side).to(latents.device) for side in (height, width))
    return rows @ latents @ columns.T, torch.arange(height)[:, None] + torch.arange(width)


def _dct_matrix(size: int) -> Tensor:
    """The orthonormal DCT-II (size, size)."""
    grid = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * (grid + 0.5) * grid[:, None]) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix


def local_similarity(latents: Tensor) -> float:
    """LDS: mean cosine of neighbouring tokens minus that of tokens at least half the longer side apart.

    The tokens of each latent are centred. Independent tokens have 0.
    """
    height, width = latents.shape[2:]
    tokens = latents.flatten(2).mT  # (N, S, C)
    tokens = torch.nn.functional.normalize(tokens - tokens.mean(1, keepdim=True), dim=2)
    rows, columns = torch.arange(height).repeat_interleave(width), torch.arange(width).repeat(height)
    distance = (rows[:, None] - rows).abs() + (columns[:, None] - columns).abs()
    cosines = torch.einsum("nsc,ntc->st", tokens, tokens) / len(tokens)
    return (cosines[distance == 1].mean() - cosines[distance >= max(height, width) / 2].mean()).item()


def effective_rank(latents: Tensor) -> float:
    """exp(entropy) of the shares of the channel covariance's eigenvalues (Roy & Vetterli 2007): 1 to C."""
    shares = torch.linalg.eigvalsh(_channel_covariance(latents)).clamp(min=0)
    shares = shares / shares.sum()
    return torch.special.entr(shares).sum().exp().item()


def channel_correlation(latents: Tensor) -> float:
    """Mean absolute correlation of two different channels; 0 for a single one."""
    covariance = _channel_covariance(latents).abs()
    pairs = len(covariance) * (len(covariance) - 1)
    return ((covariance.sum() - covariance.trace()) / pairs).item() if pairs else 0.0


def _channel_covariance(latents: Tensor) -> Tensor:
    tokens = latents.transpose(0, 1).flatten(1)  # (C, N S)
    return tokens @ tokens.T / tokens.shape[1]


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
    model: AutoencoderKL,
    batches: Iterable[Tensor],
    dtype: torch.dtype,
    velocity_steps: int = 0,
    labels: Sequence[str | None] = (),
    features: Callable[[Tensor], Tensor] | None = None,
) -> tuple[dict[str, float | None], list[float]]:
    """Every measure for uint8 images (B, 3, H, W) of one size, by its title, and the spectrum.

    All but the noise curve see the middle of large latents. The noise curve decodes the first images only.
    With `velocity_steps`, networks are trained for so many steps, for the velocity loss and its spread over
    seeds. `labels` of the images give LNC, and VIV as a mean over classes. `features` (B, D) of uint8 images
    give iFID or iKID. Latents are the posterior's mode. A measure is None if a decoded image is not finite;
    there are none at all if a latent is not.
    """
    device = next(model.parameters()).device
    middles: list[Tensor] = []
    decoded: list[tuple[Tensor, Tensor]] = []  # on the CPU: at 2048 px, 64 images would fill GiB of a card
    real: list[Tensor] = []
    crops: list[Tensor] = []
    for images in batches:
        latents = encode_images(model, to_float(images.to(device)), dtype=dtype).mode().cpu()
        middles.append(middle(latents, MAX_SIDE).clone())  # a view would keep all of a large image
        shown = middle(images, MAX_SIDE * model.downsampling)
        if features is not None:
            real.append(features(shown.to(device)).cpu())
        if velocity_steps:
            crops.append(middle(images, MAX_CROP * model.downsampling).clone())
        if sum(len(kept) for kept, _ in decoded) < MAX_DECODED:
            decoded.append((latents, images))
    raw = torch.cat(middles)
    if not raw.isfinite().all():
        return {}, []
    normalised = normalise(raw)
    measures = _measures_of_latents(normalised, labels, device)
    curves = []
    std, mean = torch.std_mean(raw.double(), (0, 2, 3), correction=0, keepdim=True)
    std, mean = (values.to(device, raw.dtype) for values in (std, mean))
    for number, (latents, images) in enumerate(decoded):
        noise = keyed_normal(latents.shape, NOISE_SEED, number).to(std) * std
        decode = partial(decode_latents, model, size=images.shape[2:], dtype=dtype)
        curves.append(noise_curve(decode, latents.to(device), noise, to_float(images.to(device))))
    means = torch.cat(curves, dim=1).mean(1).tolist()
    measures |= {f"noise {tau:g} dB": value for tau, value in zip(TAUS, means, strict=True)}
    if features is not None and len(raw) > 1:
        paths = interpolated(normalised.to(device, torch.float32), NOISE_SEED) * std + mean
        decode = partial(decode_latents, model, size=shown.shape[2:], dtype=dtype)
        parts = paths.split(len(middles[0]))
        between = torch.cat([features(to_uint8(decode(part))).cpu() for part in parts])
        measures |= [feature_distance(torch.cat(real), between)]
    if velocity_steps:
        images = torch.cat(crops)
        decode = partial(decode_latents, model, size=images.shape[2:], dtype=dtype)
        measures |= _measures_of_networks(
            normalised.to(device, torch.float32), images, lambda z: decode(z * std + mean), velocity_steps
        )
    finite = {name: value if math.isfinite(value or 0) else None for name, value in measures.items()}
    return finite, spectrum(normalised)


def _measures_of_latents(
    normalised: Tensor, labels: Sequence[str | None], device: torch.device
) -> dict[str, float | None]:
    """The measures that decode nothing; LNC and the number of classes only with several labels."""
    labelled = [position for position, label in enumerate(labels) if label is not None]
    known = [label for label in labels if label is not None]
    is_labelled = len(set(known)) > 1
    is_live = normalised.square().mean((0, 2, 3)) > 0.5  # dead channels would make it smaller
    value, classes = viv_of_classes(normalised[:, is_live], labels)
    measures: dict[str, float | None] = {"VIV": value}
    if is_labelled:
        measures["VIV classes"] = classes
    measures |= {f"SEC {rho:g}": high_frequency_share(normalised, rho) for rho in RHOS}
    measures["LDS"] = local_similarity(normalised)
    if is_labelled:
        measures["LNC"] = same_label_share(normalised[labelled].to(device, torch.float32), known)
    measures["effective rank"] = effective_rank(normalised)
    measures["channel correlation"] = channel_correlation(normalised)
    return measures


def _measures_of_networks(
    normalised: Tensor, images: Tensor, decode: Callable[[Tensor], Tensor], steps: int
) -> dict[str, float | None]:
    """Velocity loss and distances of networks on the latents, whose middles are those of `images`."""
    networks = trained_networks(normalised, VELOCITY_SEEDS, steps)
    unseen = is_held_out(len(images))
    latents, others = (middle(normalised[chosen], MAX_CROP) for chosen in (unseen, ~unseen))
    real = to_float(images[unseen][:MAX_SAMPLES])
    reference, at_once = image_features(real), max(1, DECODED_AT_ONCE // real[0, 0].numel())

    def distance(sampled: Tensor) -> float:
        decoded = (decode(part).clamp(-1, 1).cpu() for part in sampled.split(at_once))
        return distance_of_features(torch.cat([image_features(part) for part in decoded]), reference)

    shape = (len(real), *latents.shape[1:])
    noises = [keyed_normal(shape, NOISE_SEED, seed).to(latents) for seed in range(VELOCITY_SEEDS)]
    distances = [distance(samples_of(*pair)) for pair in zip(networks, noises, strict=True)]
    losses = [held_out_loss(network, latents) for network in networks]
    found = torch.tensor([losses, distances], dtype=torch.float64)
    values = torch.stack([found.mean(1), found.std(1)], dim=1).flatten().tolist()
    names = (VELOCITY, VELOCITY_SPREAD, DISTANCE, DISTANCE_SPREAD)
    return dict(zip(names, values, strict=True)) | {RECONSTRUCTION: distance(others[: len(real)])}


def compared(
    name: str, measures: Mapping[str, float | None], other: str, others: Mapping[str, float | None]
) -> list[str]:
    """Which of two VAEs has latents whose velocity is easier to predict, and which the better samples."""
    return [
        _ordered(key, spread, ends, {name: measures, other: others})
        for key, spread, ends in (
            (VELOCITY, VELOCITY_SPREAD, "easier to model"),
            (DISTANCE, DISTANCE_SPREAD, "decoded from samples to images nearer to the real ones"),
        )
        if None not in (measures[key], others[key])
    ]


def _ordered(key: str, spread: str, ends: str, vaes: Mapping[str, Mapping[str, float | None]]) -> str:
    values = {name: (float(found[key] or 0), float(found[spread] or 0)) for name, found in vaes.items()}
    (best, (low, low_spread)), (other, (high, high_spread)) = sorted(values.items(), key=lambda item: item[1])
    if high - low <= 2 * math.hypot(low_spread, high_spread):
        return f"latents of {' and '.join(vaes)}: no difference in {key} beyond that of the seeds"
    return (
        f"latents of {best} are {ends}: {key} {low:.3f} ± {low_spread:.3f} against "
        f"{high:.3f} ± {high_spread:.3f} of {other}"
    )
