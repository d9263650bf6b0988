"""Do the measures of evaluate_vae.py --diffusability order VAEs as flow-matching networks do?

    python benchmarks/diffusability.py --photos FOLDER --output_dir DIR            # train, measure, continue
    python benchmarks/diffusability.py --photos FOLDER --output_dir DIR --table    # what is there so far
    python benchmarks/diffusability.py --output_dir benchmarks/results/diffusability --table

Small VAEs that differ in one thing are trained on crops of photographs. On their normalised latents, networks
of a million weights learn the velocity. For every VAE and seed there is a record: its measures, the velocity
loss on crops that none has seen (the right sixth of each photograph), and how far decoded samples, and
reconstructions of other such crops, are from them. The tables are of the means over seeds, with the Spearman
correlation of every measure with the loss and the distance, and a bootstrap interval over families of
VAEs, because those of one family are alike. Recorded measures and VAEs that the code no longer has are in the
tables, too.

A seed decides the weights and the crops of a VAE and its network. Several processes may share DIR: each takes
what no other has done or is doing. On a card: --device cuda --size 256 --batch 64.
"""

import argparse
import json
import random
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from filelock import FileLock, Timeout

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.short_runs import crop_of, measure, read_photos, train  # noqa: E402
from examples.diffusion_probe import (  # noqa: E402
    MAX_CROP,
    VelocityNetwork,
    held_out_loss,
    image_distance,
    middle,
    samples_of,
)
from examples.diffusion_probe import train as train_velocity  # noqa: E402
from vae.config.options import LossConfig, ModelConfig  # noqa: E402
from vae.evaluation.latents import diffusability  # noqa: E402
from vae.images.pixels import to_float  # noqa: E402
from vae.inference.codec import decode_latents, encode_images  # noqa: E402
from vae.model.autoencoder import AutoencoderKL  # noqa: E402
from vae.model.initialization import initialize  # noqa: E402
from vae.system.files import atomic_path, write_json  # noqa: E402

PEAK, BATCH = 1e-3, 4  # of the VAEs
CROPS = {"train": 2000, "test": 400}  # for the networks
HELD_OUT = 6  # the right sixth of each photograph
COMPARABLE_DB = 3.0  # PSNR below the best VAE's
BOOTSTRAPS = 2000
FAMILIES = (
    "KL",
    "scale equivariance",
    "local correlation",
)  # how names of several VAEs begin


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
    "random start": Variant(init="default", steps=2.0),
    "variance expansion": with_loss(kl_weight=0.0, variance_weight=1e-2),
    "scale equivariance": with_loss(equivariance_weight=2.0),
    "a quarter of the steps": Variant(steps=0.25),
    "4 channels": Variant(z_channels=4),  # another shape: not in the correlations
}


def parts_of(photos: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The left of each photograph for training, and the right, which is held out."""
    widths = [photo.shape[2] * (HELD_OUT - 1) // HELD_OUT for photo in photos]
    pairs = list(zip(photos, widths, strict=True))
    return [photo[..., :width] for photo, width in pairs], [photo[..., width:] for photo, width in pairs]


def crops_of(photos: list[torch.Tensor], count: int, size: int, seed: int) -> torch.Tensor:
    """uint8 (count, 3, size, size)."""
    draw = random.Random(seed)
    return torch.stack([crop_of(draw.choice(photos), size, draw) for _ in range(count)])


def save_weights(module: torch.nn.Module, path: Path) -> None:
    """Write weights; a killed process leaves no part of a file."""
    with atomic_path(path) as temporary:
        torch.save(module.state_dict(), temporary)


def trained_vae(name: str, seed: int, photos: list[torch.Tensor], given: argparse.Namespace) -> AutoencoderKL:
    """The EMA weights of a variant; they are kept in a file."""
    variant, path = VARIANTS[name], given.output_dir / f"{name}, seed {seed}.pt"
    shape = ModelConfig(
        channels=(16, 32, 32, 32), layers_per_block=1, norm_groups=8, z_channels=variant.z_channels
    )
    model = AutoencoderKL(shape)
    initialize(model, variant.init, seed)
    steps = round(variant.steps * given.vae_steps)
    options = argparse.Namespace(seed=seed, size=given.size, batch=BATCH, optimizer="adamw", start=None)
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
    elif steps:
        model = model.to(memory_format=torch.channels_last)
        model = train(model, photos, options, steps, PEAK, variant.loss, torch.float32)
    save_weights(model, path)
    return model.to(given.device)


@torch.no_grad()
def latents_of(model: AutoencoderKL, crops: torch.Tensor) -> torch.Tensor:
    """The posterior's modes (N, C, h, w) of uint8 crops."""
    device = next(model.parameters()).device
    parts = [encode_images(model, to_float(part.to(device))).mode() for part in crops.split(32)]
    return torch.cat(parts)


def measure_vae(
    name: str, seed: int, photos: list[torch.Tensor], given: argparse.Namespace
) -> dict[str, Any]:
    """Train a VAE and a network, and measure both on crops that they have not seen."""
    trained, held_out = parts_of(photos)
    model = trained_vae(name, seed, trained, given)
    crops = crops_of(held_out, CROPS["test"], given.size, 2)
    facts = measure(model.cpu(), crops[:64], torch.float32)
    measures = diffusability(model.to(given.device), crops.split(8), torch.float32)
    raw = latents_of(model, crops_of(trained, CROPS["train"], given.size, 1)).float()
    std, mean = torch.std_mean(raw, dim=(0, 2, 3), correction=0, keepdim=True)
    path = given.output_dir / f"{name}, seed {seed}, network.pt"
    if path.exists():
        network: torch.nn.Module = VelocityNetwork(raw.shape[1]).to(raw)
        network.load_state_dict(torch.load(path, weights_only=True))
    else:
        network = train_velocity((raw - mean) / std, seed, given.steps, given.batch)
        save_weights(network, path)
    loss = held_out_loss(network, middle((latents_of(model, crops).float() - mean) / std, MAX_CROP))
    noise = torch.randn(CROPS["test"], *raw.shape[1:], generator=torch.Generator().manual_seed(seed))
    others = latents_of(model, crops_of(held_out, CROPS["test"], given.size, 4)).float()
    distances = []
    for latents in (samples_of(network, noise.to(raw)) * std + mean, others):
        with torch.no_grad():
            parts = [decode_latents(model, part, crops.shape[2:]).clamp(-1, 1) for part in latents.split(32)]
        distances.append(image_distance(torch.cat(parts).cpu(), to_float(crops)))
    titles = ("velocity loss", "sample distance", "reconstruction distance")
    of_network = dict(zip(titles, (loss, *distances), strict=True))
    facts = {"psnr": facts["psnr"], "sigma_over_std": facts["sigma_over_std"]}
    return {"vae": name, "seed": seed, **of_network, **facts, **measures}


def ranks(column: np.ndarray) -> np.ndarray:
    """Ranks of a column; equal values share theirs."""
    return (column[:, None] > column).sum(1) + (column[:, None] == column).sum(1) / 2


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation of two columns."""
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def family(name: str) -> str:
    """The family of a VAE: variants of one setting."""
    return next((start for start in FAMILIES if name.startswith(start)), name)


def draws_of(names: list[str]) -> list[np.ndarray]:
    """Bootstrap draws of VAEs, as indices of `names`: whole families, as many as there are."""
    families = list(dict.fromkeys(map(family, names)))
    members = [[i for i, name in enumerate(names) if family(name) == own] for own in families]
    chosen = np.random.default_rng(0).integers(0, len(families), (BOOTSTRAPS, len(families)))
    return [np.concatenate([members[i] for i in draw]) for draw in chosen if len(set(draw.tolist())) > 2]


def print_table(records: list[dict[str, Any]]) -> None:
    """Every VAE with its measures, and the correlations over those of one shape."""
    names = list(dict.fromkeys(record["vae"] for record in records))  # also those that are no longer trained
    keys = [key for key in records[0] if key not in ("vae", "seed")]
    means, spreads = {}, {}
    for name in names:
        rows = np.array([[r[key] for key in keys] for r in records if r["vae"] == name], dtype=float)
        means[name], spreads[name] = rows.mean(0), rows.std(0)
    print("| VAE | seeds |", " | ".join(keys), "|\n|---|---|" + "---|" * len(keys))
    for name in names:
        cells = [f"{a:.4g} ± {b:.2g}" for a, b in zip(means[name], spreads[name], strict=True)]
        print(f"| {name} | {sum(r['vae'] == name for r in records)} |", " | ".join(cells), "|")
    same = [name for name in names if VARIANTS.get(name, Variant()).z_channels == 16]
    psnr = {name: means[name][keys.index("psnr")] for name in same}
    alike = [name for name in same if psnr[name] > max(psnr.values()) - COMPARABLE_DB]
    for title, chosen in (("all", same), ("PSNR comparable", alike)):
        count = f"{len(chosen)} VAEs, {len(set(map(family, chosen)))} families"
        print(f"\n| {title}, {count} | velocity loss | sample distance |\n|---|---|---|")
        rows, draws = np.array([means[name] for name in chosen]), draws_of(chosen)
        for index, key in enumerate(keys):
            cells = []
            for target in (keys.index("velocity loss"), keys.index("sample distance")):
                found = [spearman(rows[draw, index], rows[draw, target]) for draw in draws]
                low, high = np.nanpercentile(found, [2.5, 97.5])
                cells.append(f"{spearman(rows[:, index], rows[:, target]):+.2f} ({low:+.2f} to {high:+.2f})")
            print(f"| {key} |", " | ".join(cells), "|")


def main() -> None:
    """Read the flags, do what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photos", type=Path, help="not needed for --table")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--size", type=int, default=64, help="px of the crops")
    parser.add_argument("--vae_steps", type=int, default=800)
    parser.add_argument("--steps", type=int, default=5000, help="of each network")
    parser.add_argument("--batch", type=int, default=8, help="of each network")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    given = parser.parse_args()
    given.output_dir.mkdir(parents=True, exist_ok=True)
    photos = [] if given.table else read_photos(given.photos, HELD_OUT * given.size)
    for seed in range(given.seeds):
        for name in VARIANTS if photos else ():
            path = given.output_dir / f"{name}, seed {seed}.json"
            with suppress(Timeout), FileLock(path.with_suffix(".lock"), timeout=0):
                if not path.exists():
                    write_json(path, measure_vae(name, seed, photos, given))
    lines = [line for path in given.output_dir.glob("[!.]*.json*") for line in path.read_text().splitlines()]
    print_table([json.loads(line) for line in sorted(lines)])


if __name__ == "__main__":
    main()
