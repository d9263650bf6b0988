"""Accuracy of the probe's heads with the found learning rates, compared with 3e-3.

    python benchmarks/probe_rates.py --heads linear mlp convnext

600 digits of scikit-learn at 32 px, and 480 drawn images in 240 groups: one of six shapes in random colours,
and a darker copy of it. Pixels, and latents of a VAE after its warm start.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from sklearn.datasets import load_digits
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vae.config.options import ModelConfig
from vae.evaluation.probe.heads import HEADS, Schedule, predict, train_head
from vae.evaluation.probe.labels import assign_folds
from vae.evaluation.probe.learning_rate import find_learning_rate
from vae.model.autoencoder import AutoencoderKL
from vae.model.initialization import initialize

FIXED, SIDE, FOLDS = 3e-3, 32, 5
SHAPE = ModelConfig(channels=(16, 32, 64), norm_groups=8, z_channels=8, layers_per_block=1)
Labelled = tuple[Tensor, np.ndarray, np.ndarray]  # images (N, 3, SIDE, SIDE) in [-1, 1], classes, groups


def digits() -> Labelled:
    """The first 600 digits, enlarged from 8 x 8 px."""
    found = load_digits()
    small = torch.from_numpy(found.images[:600]).float()[:, None] / 8 - 1
    images = F.interpolate(small, size=SIDE, mode="bicubic", antialias=True).clamp(-1, 1)
    return images.expand(-1, 3, -1, -1).contiguous(), found.target[:600], np.arange(600)


def shapes(count: int = 240) -> Labelled:
    """Drawn shapes; each group has one image and a darker copy."""
    random, images = np.random.default_rng(0), []
    for number in range(count):
        back, front = (tuple(int(v) for v in random.integers(0, 256, 3)) for _ in range(2))
        image = Image.new("RGB", (4 * SIDE, 4 * SIDE), back)
        size = int(random.integers(40, 80))
        x, y = (int(v) for v in random.integers(4, 4 * SIDE - size - 4, 2))
        _draw(ImageDraw.Draw(image), number % 6, x, y, size, front)
        pixels = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)).astype(np.float32)
        images += [pixels, 0.7 * pixels]
    groups = np.repeat(np.arange(count), 2)
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) / 127.5 - 1, groups % 6, groups


def _draw(draw: ImageDraw.ImageDraw, kind: int, x: int, y: int, size: int, color: tuple[int, ...]) -> None:
    box, third = (x, y, x + size, y + size), size // 3
    if kind in (0, 3):
        draw.ellipse(box, **({"fill": color} if kind == 0 else {"outline": color, "width": 8}))
    elif kind in (1, 4):
        draw.rectangle(box, **({"fill": color} if kind == 1 else {"outline": color, "width": 8}))
    elif kind == 2:
        draw.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], fill=color)
    else:
        draw.rectangle((x, y + third, x + size, y + 2 * size // 3), fill=color)
        draw.rectangle((x + third, y, x + 2 * size // 3, y + size), fill=color)


def compare(features: Tensor, classes: np.ndarray, groups: np.ndarray, head: str, epochs: int) -> str:
    """Rate, top-1 and log loss, out of fold, with the fixed and with the found rate."""
    folds, targets = assign_folds(classes, groups, FOLDS), torch.from_numpy(classes)
    num_classes, schedule, texts = int(classes.max()) + 1, Schedule(epochs=epochs), []

    def images_of(*chosen: int) -> Tensor:
        return torch.from_numpy(np.flatnonzero(np.isin(folds, chosen)))

    first = images_of(*range(2, FOLDS))
    found = find_learning_rate(head, features, targets, first, num_classes, schedule)
    for rate in (FIXED, found):
        result = torch.zeros(len(classes), num_classes)
        for fold in range(FOLDS):
            stop = (fold + 1) % FOLDS
            train = images_of(*(set(range(FOLDS)) - {fold, stop}))
            with_rate = replace(schedule, learning_rate=rate)
            model, _ = train_head(head, features, targets, train, images_of(stop), num_classes, with_rate)
            test = images_of(fold)
            result[test] = predict(model, features[test])
        top1 = (result.argmax(1) == targets).float().mean()
        texts.append(f"{rate:.2g}: {top1:.1%}, log loss {F.nll_loss(result.log(), targets):.3f}")
    return "   ".join(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", nargs="+", choices=list(HEADS), default=["linear"])
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoencoderKL(SHAPE).eval()
    initialize(model, "warm", 0)
    sets: dict[str, Callable[[], Labelled]] = {"digits": digits, "shapes": shapes}
    for name, make in sets.items():
        images, classes, groups = make()
        with torch.no_grad():
            latents = torch.cat([model.encode(part).mean for part in images.split(64)])
        for kind, features in (("pixels", F.pixel_unshuffle(images, 4)), ("latents", latents)):
            for head in args.heads:
                line = compare(features, classes, groups, head, args.epochs)
                print(f"{name} {kind:7} {head:8} {line}", flush=True)


if __name__ == "__main__":
    main()
