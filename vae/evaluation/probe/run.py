"""A command with --probe, from top to bottom: features, heads over all folds, scores, files.

Shapes: N images, K classes.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vae.config.evaluate_flags import EvaluateConfig
from vae.device import DTYPES, pick_device
from vae.evaluation.compare import short_names
from vae.evaluation.image_set import find_images
from vae.evaluation.precheck import check_command
from vae.evaluation.probe.features import maps_of_pixels, maps_of_vae
from vae.evaluation.probe.heads import Schedule, predict, train_head
from vae.evaluation.probe.labels import Labels, read_labels, stopping_fold
from vae.evaluation.probe.learning_rate import find_learning_rate
from vae.evaluation.probe.reference import choose_reference, describe, load_reference
from vae.evaluation.probe.scores import compared_with_first, ensemble_weights, scores
from vae.interop.vae_files import load_vae
from vae.ops.kernel_check import choose_kernels
from vae.progress import track
from vae.system import console
from vae.system.files import atomic_path, csv_cell, write_json


@dataclass
class Probed:
    """One kind of features, and the out-of-fold probabilities of its heads."""

    name: str
    features: torch.Tensor  # (N, C, h, w)
    heads: tuple[str, ...]
    probabilities: dict[str, np.ndarray] = field(default_factory=dict)  # head -> (N, K)
    rates: dict[str, float] = field(default_factory=dict)  # head -> peak of its one-cycle schedule
    losses: dict[str, float] = field(default_factory=dict)  # head -> mean log loss on the stopping folds
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)


def run_probe(config: EvaluateConfig) -> None:
    """Probe the VAEs, and print and write the results."""
    check_command(config)
    assert config.probe is not None
    device = pick_device(config.device)
    reference = choose_reference(config.probe_reference)
    pretrained = load_reference(reference, device) if reference else None
    choose_kernels(config.kernels, device, [DTYPES[config.dtype]])
    vaes = [load_vae(Path(path), flag="--vae", weights=config.weights) for path in config.vae]
    names = short_names(config.vae)
    image_set, _ = find_images(config)
    labels = read_labels(config.probe, image_set.names, config.probe_column, config.probe_folds)
    image_set = replace(image_set, indices={name: image_set.indices[name] for name in labels.names})
    console.info(describe(reference, config.probe_reference))
    pixel_heads = ("linear",) if pretrained else config.probe_heads
    factor = vaes[0].autoencoder.downsampling
    pixels = maps_of_pixels(image_set, config, factor, pretrained, device)
    probed = [Probed("pixels", pixels, pixel_heads)]
    for name, vae in zip(names, vaes, strict=True):
        latents, recon = maps_of_vae(vae, image_set, config, pretrained, device)
        probed.append(Probed(f"{name} latents", latents, config.probe_heads))
        probed.append(Probed(f"{name} recon", recon, pixel_heads))
    schedule = Schedule(epochs=config.probe_epochs, seed=config.seed)
    for one in track(probed, "probe", len(probed), "set", keep=False):
        _measure(one, labels, schedule, config.probe_learning_rate, device)
    _write(Path(config.output_dir), config, labels, probed, names, reference)


def _measure(
    one: Probed, labels: Labels, schedule: Schedule, learning_rate: float | None, device: torch.device
) -> None:
    """Train every head on every fold, and score the out-of-fold probabilities."""
    features, targets = one.features.to(device), torch.from_numpy(labels.targets).to(device)
    classes = len(labels.classes)
    for head in one.heads:
        found, losses = np.zeros((len(labels.names), classes)), []
        for fold, (train, stop, test) in enumerate(_parts(labels)):
            if fold == 0:  # one rate for all folds
                one.rates[head] = learning_rate or find_learning_rate(
                    head, features, targets, train, classes, schedule
                )
            with_rate = replace(schedule, learning_rate=one.rates[head])
            model, loss = train_head(head, features, targets, train, stop, classes, with_rate)
            found[test.numpy()] = predict(model, features[test]).double().cpu().numpy()
            losses.append(loss)
        one.probabilities[head], one.losses[head] = found, float(np.mean(losses))
    weights = ensemble_weights([one.losses[head] for head in one.heads])
    one.weights = dict(zip(one.heads, weights.tolist(), strict=True))
    parts = [one.probabilities[head] for head in one.heads]
    one.probabilities["ensemble"] = np.einsum("h,hnk->nk", weights, np.stack(parts))
    one.scores = {head: scores(labels.targets, values) for head, values in one.probabilities.items()}


def _parts(labels: Labels) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each fold: the images that train, that stop training, and that are measured, by position."""
    for fold in range(labels.num_folds):
        stopping = stopping_fold(fold, labels.num_folds)
        chosen = (~np.isin(labels.folds, (fold, stopping)), labels.folds == stopping, labels.folds == fold)
        train, stop, test = (torch.from_numpy(np.flatnonzero(part)) for part in chosen)
        yield train, stop, test


def _write(
    folder: Path,
    config: EvaluateConfig,
    labels: Labels,
    probed: list[Probed],
    names: list[str],
    reference: str | None,
) -> None:
    """Write probe.json and one CSV file of probabilities for each set of features, and print the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {one.name: one.probabilities["ensemble"] for one in probed}
    latents = [found[f"{name} latents"] for name in names]
    pairs = compared_with_first(names, latents, labels.targets, labels.groups)
    content = {
        "classes": labels.classes,
        "images": len(labels.names),
        "groups": len(set(labels.groups.tolist())),
        "folds": labels.num_folds,
        "reference": reference,
        "sets": {
            one.name: {
                "scores": one.scores,
                "weights": one.weights,
                "stopping_log_loss": one.losses,
                "learning_rates": one.rates,
            }
            for one in probed
        },
        "pairs": pairs,
    }
    for number, one in enumerate(probed):
        path = folder / f"probe_{number}.csv"
        write_probabilities(path, labels.names, labels.classes, found[one.name])
    write_json(folder / "probe.json", content, indent=1)
    console.info("\n".join(_lines(labels, probed, pairs, config.probe_learning_rate is not None)))
    console.info(f"\nresults are in {console.printable(config.output_dir)}")


def write_probabilities(
    path: Path, names: Sequence[str], classes: Sequence[str], probabilities: np.ndarray
) -> None:
    """A CSV file of (N, K): one row per image, one column per class."""
    with (
        atomic_path(path) as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(["id", *map(csv_cell, classes)])
        for name, row in zip(names, probabilities, strict=True):
            writer.writerow([csv_cell(name), *(f"{value:.6f}" for value in row / row.sum())])


def _lines(labels: Labels, probed: list[Probed], pairs: list[dict[str, Any]], given_rate: bool) -> list[str]:
    groups = len(set(labels.groups.tolist()))
    lines = [
        f"{len(labels.names)} images in {groups} groups, {len(labels.classes)} classes, "
        f"{labels.num_folds} folds; out-of-fold",
        "",
    ]
    lines += score_table(labels.classes, {one.name: one.scores for one in probed})
    lines += map(pair_line, pairs)
    lines += ["", f"learning rates, {'as given' if given_rate else 'each where the loss falls fastest'}:"]
    for one in probed:
        rates = "  ".join(f"{head} {rate:.2g}" for head, rate in one.rates.items())
        lines.append(f"{console.printable(one.name)}: {rates}")
    return lines


def score_table(classes: Sequence[str], scores_of: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines with the scores of each head on each set of features."""
    width = max(len(console.printable(name)) for name in scores_of)
    lines = [f"{'':{width}}  head      top-1   top-5   macro F1  log loss  worst recall"]
    for name, heads in scores_of.items():
        for head, found in heads.items():
            worst = int(np.argmin(found["recall"]))
            lines.append(
                f"{console.printable(name):{width}}  {head:8}  {found['top1']:6.1%}  "
                f"{found['top5']:6.1%}  {found['macro_f1']:8.3f}  {found['log_loss']:8.3f}  "
                f"{found['recall'][worst]:.0%} {console.printable(classes[worst])}"
            )
    return lines


def pair_line(pair: dict[str, Any]) -> str:
    """The difference of two VAEs."""
    return (
        f"{console.printable(pair['first'])} - {console.printable(pair['second'])}: top-1 "
        f"{pair['difference']:+.1%}, 95 % interval {pair['low']:+.1%} to {pair['high']:+.1%}"
    )
