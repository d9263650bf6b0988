"""Do the measures of evaluate_vae.py --diffusability order VAEs as flow-matching networks do?

    python benchmarks/diffusability.py --photos FOLDER --output_dir DIR            # train, measure, continue
    python benchmarks/diffusability.py --photos FOLDER --output_dir DIR --table    # what is there so far

Small VAEs that differ in one thing are trained on crops of photographs. On their normalised latents, networks
of a million weights learn the velocity, with several seeds. The table has every measure, the velocity loss on
crops of other photographs, and the Spearman correlation of the two with a bootstrap interval over the VAEs.
A VAE or a seed that is done is not done again.
"""

import argparse
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.short_runs import VALIDATION_SHARE, crop_of, measure, read_photos, train  # noqa: E402
from vae.config.options import LossConfig, ModelConfig  # noqa: E402
from vae.evaluation.diffusability import diffusability, normalise  # noqa: E402
from vae.evaluation.velocity import MAX_CROP, held_out_loss, middle  # noqa: E402
from vae.evaluation.velocity import train as train_velocity  # noqa: E402
from vae.images.pixels import to_float  # noqa: E402
from vae.inference.codec import encode_images  # noqa: E402
from vae.model.autoencoder import AutoencoderKL  # noqa: E402
from vae.model.initialization import initialize  # noqa: E402

PEAK, BATCH = 1e-3, 4  # of the VAEs
CROPS = {"train": 1600, "test": 400}  # for the networks
BOOTSTRAPS = 2000


class Variant(NamedTuple):
    """A VAE of the comparison."""

    init: str = "warm"
    z_channels: int = 16
    steps: float = 1.0  # times --vae_steps
    loss: LossConfig = LossConfig(perceptual_weight=0.0)


def with_loss(**changes: float) -> Variant:
    """A VAE with other weights."""
    return Variant(loss=replace(Variant().loss, **changes))


VARIANTS = {
    "linear codec": Variant(steps=0),
    "KL 1e-6": Variant(),
    "KL 1e-4": with_loss(kl_weight=1e-4),
    "KL 1e-3": with_loss(kl_weight=1e-3),
    "KL 1e-2": with_loss(kl_weight=1e-2),
    "random start": Variant(init="default"),
    "random start, KL 1e-3": with_loss(kl_weight=1e-3)._replace(init="default"),
    "variance expansion": with_loss(kl_weight=0.0, variance_weight=1e-2),
    "scale equivariance": with_loss(equivariance_weight=2.0),
    "local correlation": with_loss(local_correlation_weight=0.3),
    "decoder noise": with_loss(decoder_noise=0.5),
    "a quarter of the steps": Variant(steps=0.25),
    "4 channels": Variant(z_channels=4),  # another shape: not in the correlations
}


def crops_of(photos: list[torch.Tensor], count: int, size: int, seed: int) -> torch.Tensor:
    """uint8 (count, 3, size, size)."""
    draw = random.Random(seed)
    return torch.stack([crop_of(draw.choice(photos), size, draw) for _ in range(count)])


def trained_vae(variant: Variant, photos: list[torch.Tensor], given: argparse.Namespace) -> AutoencoderKL:
    """The EMA weights of a variant."""
    shape = ModelConfig(
        channels=(16, 32, 32, 32), layers_per_block=1, norm_groups=8, z_channels=variant.z_channels
    )
    model = AutoencoderKL(shape)
    initialize(model, variant.init, 0)
    steps = round(variant.steps * given.vae_steps)
    options = argparse.Namespace(seed=0, size=given.size, batch=BATCH, optimizer="adamw", start=None)
    model = model.to(memory_format=torch.channels_last)
    return train(model, photos, options, steps, PEAK, variant.loss, torch.float32) if steps else model


@torch.no_grad()
def latents_of(model: AutoencoderKL, crops: torch.Tensor) -> torch.Tensor:
    """The posterior's modes (N, C, h, w) of uint8 crops."""
    parts = [encode_images(model, to_float(part)).mode() for part in crops.split(32)]
    return torch.cat(parts)


def measure_vae(name: str, photos: list[torch.Tensor], given: argparse.Namespace) -> dict[str, Any]:
    """Train a variant, save its weights, and measure it on crops of other photographs."""
    trained, held_out = split(photos)
    model = trained_vae(VARIANTS[name], trained, given)
    torch.save(model.state_dict(), given.output_dir / f"{name}.pt")
    crops = crops_of(held_out, CROPS["test"], given.size, 2)
    facts = measure(model, crops[:64], torch.float32)
    measures, _ = diffusability(model, crops.split(8), torch.float32)
    return {"vae": name, "psnr": facts["psnr"], "sigma_over_std": facts["sigma_over_std"], **measures}


def measure_velocity(
    name: str, seed: int, photos: list[torch.Tensor], given: argparse.Namespace
) -> dict[str, Any]:
    """The velocity loss of one network."""
    variant, (trained, held_out) = VARIANTS[name], split(photos)
    model = trained_vae(variant._replace(steps=0), trained, given)
    model.load_state_dict(torch.load(given.output_dir / f"{name}.pt", weights_only=True))
    parts = [
        crops_of(trained, CROPS["train"], given.size, 1),
        crops_of(held_out, CROPS["test"], given.size, 2),
    ]
    latents = normalise(torch.cat([latents_of(model, part) for part in parts])).float()
    train_latents, held_out_latents = latents.split([len(part) for part in parts])
    network = train_velocity(train_latents, seed, given.steps, lambda: None)
    loss = held_out_loss(network, middle(held_out_latents, MAX_CROP))
    return {"vae": name, "seed": seed, "velocity_loss": loss}


def split(photos: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Photographs for training, and the others."""
    return [p for i, p in enumerate(photos) if i % VALIDATION_SHARE], photos[::VALIDATION_SHARE]


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation of two columns."""
    ranks = [np.argsort(np.argsort(column)) for column in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def print_table(records: list[dict[str, Any]]) -> None:
    """Every VAE with its measures, and the correlations over those of one shape."""
    rows = {record["vae"]: record for record in records if "psnr" in record}
    losses: dict[str, list[float]] = {}
    for record in records:
        if "velocity_loss" in record:
            losses.setdefault(record["vae"], []).append(record["velocity_loss"])
    names = [name for name in rows if name in losses]
    measures = [key for key in next(iter(rows.values())) if key != "vae"]
    print("| VAE | velocity loss |", " | ".join(measures), "|")
    print("|---|---|" + "---|" * len(measures))
    for name in names:
        values = [rows[name][key] for key in measures]
        shown = " | ".join("-" if value is None else f"{value:.4g}" for value in values)
        print(f"| {name} | {np.mean(losses[name]):.4f} ± {np.std(losses[name]):.4f} | {shown} |")
    same = [name for name in names if VARIANTS[name].z_channels == 16]
    target = np.array([np.mean(losses[name]) for name in same])
    draws = np.random.default_rng(0).integers(0, len(same), (BOOTSTRAPS, len(same)))
    draws = draws[[len(set(draw)) > 2 for draw in draws.tolist()]]
    print("\n| measure | Spearman with the velocity loss | 95 % interval |\n|---|---|---|")
    for key in measures:
        values = np.array([rows[name][key] for name in same], dtype=float)
        if np.isfinite(values).all():
            found = [spearman(values[draw], target[draw]) for draw in draws]
            low, high = np.percentile(found, [2.5, 97.5])
            print(f"| {key} | {spearman(values, target):+.2f} | {low:+.2f} to {high:+.2f} |")


def main() -> None:
    """Read the flags, do what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--size", type=int, default=64, help="px of the crops")
    parser.add_argument("--vae_steps", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=5000, help="of each network")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="only print what is there")
    given = parser.parse_args()
    given.output_dir.mkdir(parents=True, exist_ok=True)
    path = given.output_dir / "records.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def add(record: dict[str, Any]) -> None:
        records.append(record)
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    if not given.table:
        photos = read_photos(given.photos, given.size)
        for name in VARIANTS:
            if not any(record["vae"] == name and "psnr" in record for record in records):
                add(measure_vae(name, photos, given))
        for seed in range(given.seeds):
            for name in VARIANTS:
                if not any(record["vae"] == name and record.get("seed") == seed for record in records):
                    add(measure_velocity(name, seed, photos, given))
    print_table(records)


if __name__ == "__main__":
    main()
