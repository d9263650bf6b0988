"""Compare VAEs by small diffusion models: train them on the latents, and measure their decoded samples.

    python examples/diffusion_probe.py --vae a/vae b/vae --data photos --output results/probe

Flow-matching networks of a million weights learn the latents of each VAE, with several seeds. Compare only
VAEs whose latents have one shape, by the sample distance, if the coverage is high:

sample distance          how far decoded samples are from held-out images in local texture, by features of a
                         fixed random network: squared maximum mean discrepancy. 0 if both are of one kind,
                         at most 2. It sees no structure above 17 px, and hardly that images repeat
reconstruction distance  that of reconstructions of other images: what the VAE alone loses
coverage                 the share of held-out images with a sample nearby, by thumbnails of 8 px. Real images
                         have about 0.97, less if samples repeat or lack contrast: below 0.5, a low sample
                         distance says nothing. It needs 30 images, and sees no detail
velocity loss            the networks' error on held-out images. It is low also if channels repeat each other,
                         so it says nothing about samples

A fifth of the images is held out: give some hundred. All latents are in memory. benchmarks/LOG.md, "Latents
and small diffusion models", has measurements of 16 VAEs with these networks.

Shapes: N latents of Z channels, h x w positions, normalised per channel; t (N,) in [0, 1]. A latent x and
noise ε are mixed to x_t = (1 - t) x + t ε, and the network predicts the velocity ε - x (Lipman et al. 2023).
For Gaussian latents, its loss is at least the mean of (π/2) sqrt(λ), λ the eigenvalues of their covariance.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev

import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

sys.path.insert(0, os.getcwd())  # the package `vae` is in the repository's root

import vae

WIDTH, BLOCKS, GROUPS = 96, 6, 8  # about a million weights
FREQUENCIES = 32  # of the embedding of t
MAX_CROP = 16  # positions of a training crop along a side
BATCH = 32  # also images at once
RATE = 1e-3
EMA_DECAY = 0.995
HELD_OUT = 5  # every fifth image is held out
MIN_IMAGES = 2 * HELD_OUT
TIMES = 8  # values of t at which each held-out latent is measured
SAMPLE_STEPS = 16  # of Heun's method
LAYERS = ((64, 5), (128, 3), (256, 3))  # filters and kernel size, each with stride 2
THUMBNAIL = 8  # px
NEIGHBORS = 5  # Naeem et al. 2020
MIN_STD = 1 / 255  # of a feature, half an 8-bit level: of a few images, some filters see nothing
MIN_COVERAGE = 0.5  # between 0.98 of other crops of photographs and 0.26 of 20 of them that are repeated

Velocity = Callable[[Tensor, Tensor], Tensor]  # (x_t, t) to the predicted velocity, (N, Z, h, w)


class Block(nn.Module):
    """A residual block with the embedding of t added between its convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, WIDTH)
        self.norm2 = nn.GroupNorm(GROUPS, WIDTH)
        self.conv1, self.conv2 = (nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))
        self.time = nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.conv2.weight)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(embedding)[:, :, None, None]
        return x + self.conv2(F.silu(self.norm2(h)))


class VelocityNetwork(nn.Module):
    """Predicts the velocity of latents with so many channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.embed = nn.Sequential(
            nn.Linear(2 * FREQUENCIES, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU()
        )
        self.conv_in = nn.Conv2d(channels, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm_out = nn.GroupNorm(GROUPS, WIDTH)
        self.conv_out = nn.Conv2d(WIDTH, channels, 3, padding=1)
        nn.init.zeros_(self.conv_out.weight)

    def forward(self, x_t: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * torch.logspace(0, 3, FREQUENCIES, device=t.device)
        embedding = self.embed(torch.cat([angles.sin(), angles.cos()], dim=1))
        h = self.conv_in(x_t)
        for block in self.blocks:
            h = block(h, embedding)
        return self.conv_out(F.silu(self.norm_out(h)))


def velocity_loss(velocity: Velocity, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """Mean squared error of the predicted velocity."""
    weight = t[:, None, None, None]
    predicted = velocity((1 - weight) * latents + weight * noise, t)
    return F.mse_loss(predicted, noise - latents)


@torch.no_grad()
def held_out_loss(velocity: Velocity, latents: Tensor) -> float:
    """Mean of the loss over latents and evenly spread t, with the same noise for all networks and VAEs."""
    generator = torch.Generator().manual_seed(0)
    losses = []
    for step in range(TIMES):
        noise = torch.randn(latents.shape, generator=generator).to(latents)
        times = torch.full((len(latents),), (step + 0.5) / TIMES).to(latents)
        parts = zip(latents.split(BATCH), noise.split(BATCH), times.split(BATCH), strict=True)
        losses += [velocity_loss(velocity, *part).item() * len(part[0]) for part in parts]
    return math.fsum(losses) / (TIMES * len(latents))


@torch.enable_grad()
def train(latents: Tensor, seed: int, steps: int, size: int = BATCH) -> nn.Module:
    """A network trained on the latents, with averaged weights. The seed decides weights and order."""
    torch.manual_seed(seed)
    network = VelocityNetwork(latents.shape[1]).to(latents.device)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    averaged = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(EMA_DECAY))
    for _ in tqdm(range(steps), f"seed {seed}", leave=False):
        batch = _random_crops(latents, size, generator)
        noise = torch.randn(batch.shape, generator=generator).to(batch)
        t = torch.rand(len(batch), generator=generator).to(batch)
        velocity_loss(network, batch, noise, t).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        averaged.update_parameters(network)
    return averaged.module


def _random_crops(latents: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """`size` random latents at one random place: (size, C, h, w) with h and w at most MAX_CROP."""
    batch = latents[torch.randint(len(latents), (size,), generator=generator)]
    for dim in (2, 3):
        side = min(batch.shape[dim], MAX_CROP)
        start = int(torch.randint(batch.shape[dim] - side + 1, (), generator=generator))
        batch = batch.narrow(dim, start, side)
    return batch


def middle(latents: Tensor, side: int) -> Tensor:
    """The middle positions of latents (B, C, H, W), at most `side` along each side."""
    for dim in (2, 3):
        length = min(latents.shape[dim], side)
        latents = latents.narrow(dim, (latents.shape[dim] - length) // 2, length)
    return latents


def is_held_out(count: int) -> Tensor:
    """Which of so many latents no network sees in training."""
    return torch.arange(count) % HELD_OUT == HELD_OUT - 1


@torch.no_grad()
def samples_of(velocity: Velocity, noise: Tensor) -> Tensor:
    """Normalised latents (N, C, H, W) to which Heun's method takes noise of their shape."""

    def at(x: Tensor, step: int) -> Tensor:
        t = torch.full((len(x),), step / SAMPLE_STEPS).to(x)
        return torch.cat([velocity(*part) for part in zip(x.split(BATCH), t.split(BATCH), strict=True)])

    x = noise
    for step in range(SAMPLE_STEPS, 0, -1):
        first = at(x, step)
        second = at(x - first / SAMPLE_STEPS, step - 1)
        x = x - (first + second) / (2 * SAMPLE_STEPS)
    return x


def image_distance(images: Tensor, reference: Tensor) -> float:
    """How far two sets of images (N, 3, H, W) are from each other: 0 if both are of one kind, at most 2.

    The squared maximum mean discrepancy, also a little below 0, with a Gaussian kernel as in CMMD (Jayasumana
    et al. 2024, arXiv 2401.09603), of features of a fixed random network instead of CLIP. The features are in
    standard deviations of the reference, so the result is unbiased only with many images: 20 have about 0.01.
    An image's mean color does not count. Both sets need two images.
    """
    features, reference = image_features(images), image_features(reference)
    std, mean = torch.std_mean(reference, 0)
    ours, theirs = ((values - mean) / std.clamp(min=MIN_STD) for values in (features, reference))

    def similarity(a: Tensor, b: Tensor) -> Tensor:
        return (torch.cdist(a, b).square() / (-2 * a.shape[1])).exp()

    within = sum(
        ((kernel := similarity(part, part)).sum() - kernel.trace()) / (len(part) * (len(part) - 1))
        for part in (ours, theirs)
    )
    return float(within - 2 * similarity(ours, theirs).mean())


@torch.no_grad()
def image_features(images: Tensor) -> Tensor:
    """Mean and standard deviation of each filter's response in each image, (N, 896) on the CPU."""
    generator = torch.Generator().manual_seed(0)
    weights = []
    channels = 3
    for filters, kernel in LAYERS:
        weight = torch.randn(filters, channels, kernel, kernel, generator=generator)
        weights.append(2**0.5 * F.normalize(weight.flatten(1)).view_as(weight).to(images))
        channels = filters
    parts = []
    for part in images.split(BATCH):
        x = part - part.mean((2, 3), keepdim=True)
        statistics = []
        for weight in weights:
            x = F.relu(F.conv2d(x, weight, stride=2, padding=weight.shape[2] // 2))
            statistics += [x.mean((2, 3)), x.std((2, 3), correction=0)]
        parts.append(torch.cat(statistics, 1).cpu())
    return torch.cat(parts)


def coverage(images: Tensor, reference: Tensor) -> float:
    """The share of the reference near which there is one of the images; both are `thumbnails`.

    Naeem et al. 2020 (arXiv 2002.09797), with thumbnails instead of Inception's features: near is no farther
    than the fifth neighbor within the reference. About 0.97 for images of one kind, less if they repeat each
    other; NaN if a value is not finite. The reference needs more than NEIGHBORS.
    """
    if not images.isfinite().all():
        return math.nan
    radii = torch.cdist(reference, reference).kthvalue(NEIGHBORS + 1, dim=1).values  # itself is the first
    return (torch.cdist(reference, images).amin(1) <= radii).double().mean().item()


def thumbnails(images: Tensor) -> Tensor:
    """Mean colors of an even grid of areas of each image (N, 3, H, W): (N, 192) on the CPU."""
    return F.adaptive_avg_pool2d(images, THUMBNAIL).flatten(1).cpu()


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], formatter_class=defaults)
    add = parser.add_argument
    add("--vae", required=True, nargs="+", help="checkpoints, diffusers folders or .safetensors files")
    add("--data", required=True, type=Path, help="folder of images, with subfolders")
    add("--output", required=True, type=Path, help="folder for results.json and samples")
    add("--size", type=int, default=128, help="side of the squares that are encoded, px")
    add("--max_images", type=int, default=2000, help="evenly spread images that are used")
    add("--steps", type=int, default=5000, help="optimizer steps of each network")
    add("--seeds", type=int, default=3, help="networks of each VAE")
    add("--device", default="auto", choices=("auto", "cuda", "cpu"), help="to compute on")
    return parser.parse_args()


def read_squares(arguments: argparse.Namespace) -> list[Image.Image]:
    """The middle squares of the images that can be read."""
    endings = {".png", ".jpg", ".jpeg", ".webp"}
    paths = sorted(path for path in arguments.data.rglob("*") if path.suffix.lower() in endings)
    squares = []
    for path in tqdm(paths[:: -(-len(paths) // arguments.max_images) or 1], "reading", leave=False):
        try:
            (image,) = vae.to_pil(vae.load_images(path))
        except vae.UserError as error:
            print(f"left out: {error}")
            continue
        squares.append(ImageOps.fit(image, (arguments.size, arguments.size), Image.Resampling.BICUBIC))
    if len(squares) < MIN_IMAGES:
        raise vae.UserError(
            f"--data {arguments.data} has {len(squares)} images that can be read: give at least {MIN_IMAGES}"
        )
    return squares


@torch.no_grad()
def measure(model: vae.LoadedVae, squares: Sequence[Image.Image], arguments: argparse.Namespace) -> dict:
    """Every measure of a VAE, and the first decoded samples as "images" (N, 3, H, W)."""
    starts = tqdm(range(0, len(squares), BATCH), "encoding", leave=False)
    raw = torch.cat([vae.encode(model, squares[first : first + BATCH]) for first in starts])
    std, mean = torch.std_mean(raw, (0, 2, 3), keepdim=True)
    std = std.clamp(min=1e-3 * std.max())  # dead channels would count as noise
    latents = (raw - mean) / std
    unseen = is_held_out(len(latents))
    held_out = middle(latents[unseen], MAX_CROP)
    side = held_out.shape[-1] * arguments.size // latents.shape[-1]
    real = middle(vae.load_images([squares[i] for i in unseen.nonzero().flatten().tolist()]), side)

    def decoded(part: Tensor) -> Tensor:
        images = [vae.decode(model, latents * std + mean).clamp(-1, 1).cpu() for latents in part.split(BATCH)]
        return torch.cat(images)

    found: dict[str, list[float]] = {"velocity loss": [], "sample distance": [], "coverage": []}
    for seed in range(arguments.seeds):
        network = train(latents[~unseen], seed, arguments.steps)
        noise = torch.randn(held_out.shape, generator=torch.Generator().manual_seed(seed)).to(latents)
        samples = decoded(samples_of(network, noise))
        found["velocity loss"].append(held_out_loss(network, held_out))
        found["sample distance"].append(image_distance(samples, real))
        if len(real) > NEIGHBORS:
            found["coverage"].append(coverage(thumbnails(samples), thumbnails(real)))
    others = decoded(middle(latents[~unseen][: len(real)], MAX_CROP))
    found["reconstruction distance"] = [image_distance(others, real)]
    return {**{key: values for key, values in found.items() if values}, "images": samples}


def verdict(key: str, found: dict[str, dict]) -> str:
    """Which VAE has the lowest value, or that the seeds do not tell."""
    order = sorted(found, key=lambda name: fmean(found[name][key]))
    best, second = ([*found[name][key]] for name in order[:2])
    gap = fmean(second) - fmean(best)
    if len(best) > 1 and gap > 2 * math.hypot(stdev(best), stdev(second)):
        return f"{order[0]} has the lowest {key}, by {gap:.3f}"
    return f"{order[0]} and {order[1]}: no difference in {key} beyond that of the seeds"


def main() -> None:
    """Train and measure the networks of each VAE; print a table, and write results.json and samples."""
    arguments = parse_arguments()
    squares = read_squares(arguments)
    arguments.output.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict] = {}
    shapes = set()
    for number, path in enumerate(arguments.vae):
        model = vae.load_vae(path, device=arguments.device)
        shapes.add((model.autoencoder.config.z_channels, model.autoencoder.downsampling))
        measures = measure(model, squares, arguments)
        for index, image in enumerate(vae.to_pil(measures.pop("images")[:8])):
            image.save(arguments.output / f"sample_{number}_{index}.png")
        found[path] = measures
        print(path)
        for key, values in measures.items():
            spread = f" ± {torch.tensor(values).std():.3f}" if len(values) > 1 else ""
            print(f"  {key:24}{fmean(values):7.3f}{spread}")
        if fmean(measures.get("coverage", [1.0])) < MIN_COVERAGE:
            print("  samples repeat each other or lack contrast: a low sample distance says nothing")
    if len(found) > 1 and len(shapes) == 1:
        print(verdict("sample distance", found), verdict("velocity loss", found), sep="\n")
    (arguments.output / "results.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except vae.UserError as error:
        sys.exit(str(error))
