"""The results of several folds in one table: each image is measured by the VAE that was not trained on it."""

import csv
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vae.config.options import DataConfig
from vae.data.dataset import FolderImages
from vae.data.loading import load_validation
from vae.data.manifest import image_root
from vae.evaluation.sums import reconstruction_sums
from vae.images.pixels import to_float
from vae.interop.vae_files import load_vae
from vae.system import console
from vae.system.errors import UserError
from vae.system.files import atomic_path, csv_cell, read_json, read_json_lines, write_json
from vae.training.output.run_folder import METRICS_NAME

REPORT_NAME = "folds.json"
IMAGES_NAME = "folds.csv"
METRICS = {"psnr": ("PSNR dB", 2), "ssim": ("SSIM", 4), "lpips": ("LPIPS", 4)}
NUM_WORST = 5


def report(folder: Path, folds: Sequence[int]) -> None:
    """Write and print the results of the folds in `folder`."""
    results = {fold: _last_validation(folder / f"fold_{fold}") for fold in folds}
    images = [row for fold in folds for row in _measure(folder / f"fold_{fold}", fold)]
    images.sort(key=lambda row: row["psnr"])
    summary = {
        name: spread(values)
        for name in METRICS
        if len(values := [result[name] for result in results.values() if name in result]) == len(results)
    }
    write_json(folder / REPORT_NAME, {"folds": results, "summary": summary, "worst": images[:NUM_WORST]}, 2)
    with atomic_path(folder / IMAGES_NAME) as path, path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "fold", "psnr"])
        writer.writerows([csv_cell(row["image"]), row["fold"], f"{row['psnr']:.4f}"] for row in images)
    console.info("\n".join(_lines(results, summary, images)))
    console.info(f"written: {folder / REPORT_NAME}, {folder / IMAGES_NAME}")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, sample standard deviation, and range."""
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return {"mean": statistics.fmean(values), "std": deviation, "min": min(values), "max": max(values)}


def _lines(
    results: dict[int, dict[str, Any]], summary: dict[str, dict[str, float]], images: list[dict[str, Any]]
) -> list[str]:
    """The table, and the worst images over all folds."""
    lines = ["fold    images  " + "  ".join(METRICS[name][0].rjust(8) for name in summary)]

    def row(title: str, count: str, values: dict[str, float]) -> str:
        cells = [f"{values[name]:8.{METRICS[name][1]}f}" for name in summary]
        return f"{title:<6}  {count:>6}  " + "  ".join(cells)

    for fold, result in results.items():
        lines.append(row(str(fold), str(int(result.get("images", 0))), result))
    for key in ("mean", "std") if len(results) > 1 else ():
        lines.append(row(key, "", {name: found[key] for name, found in summary.items()}))
    lines.append("worst images, each by the VAE that was not trained on it:")
    for image in images[:NUM_WORST]:
        lines.append(f"  {image['psnr']:6.2f} dB  fold {image['fold']}  {console.printable(image['image'])}")
    return lines


def _last_validation(folder: Path) -> dict[str, Any]:
    """The last record of a validation, which measured the exported weights."""
    found: dict[str, Any] = {}
    for record in read_json_lines(folder / METRICS_NAME):
        if record.get("kind") == "validation" and "psnr" in record:
            found = record
    if not found:
        raise UserError(f"--folds: {folder / METRICS_NAME} contains no validation: train this fold again")
    return {name: found[name] for name in ("step", "images", *METRICS) if name in found}


def _measure(folder: Path, fold: int) -> list[dict[str, Any]]:
    """The PSNR of each validation image of a fold, by its exported VAE in fp32."""
    loaded = load_vae(folder / "vae")
    config = read_json(folder / "config.json")
    data = DataConfig(**{name: config[name] for name in ("upscale", "background", "max_pixels")})
    names = read_json(folder / "split.json")["validation"]
    images = FolderImages(image_root(config["data_path"]), names)
    device = torch.device("cuda" if torch.cuda.is_available() and config["device"] != "cpu" else "cpu")
    model = loaded.autoencoder.to(device)
    psnr: list[float] = []
    measured: list[int] = []

    def batches() -> Any:
        size = loaded.file.sample_size or config["image_size"]
        loader = load_validation(
            images,
            range(len(images)),
            image_size=size,
            batch_size=1,
            upscale=data.upscale,
            background=data.background,
            max_pixels=data.max_pixels,
        )
        for batch in loader:
            if len(batch.images):
                measured.extend(batch.indices.tolist())
                yield to_float(batch.images.to(device))

    reconstruction_sums(lambda x: model(x)[0], batches(), None, psnr)
    return [
        {"image": names[index], "fold": fold, "psnr": value}
        for index, value in zip(measured, psnr, strict=True)
    ]
