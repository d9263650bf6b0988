"""`--folds`: trains the folds of a manifest one after the other, or one on each card, in own processes.

Every fold is a normal run in OUTPUT_DIR/fold_N, so it is resumed by its own checkpoints. One table at the end
has the results of all: each image is measured by the VAE that was not trained on it.
"""

import math
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vae.config.flags import command_words
from vae.config.options import DataConfig
from vae.data.dataset import FolderImages
from vae.data.loading import load_validation
from vae.data.manifest import image_root, is_manifest, read_rows
from vae.evaluation.sums import reconstruction_sums
from vae.images.pixels import to_float
from vae.interop.run_files import METRICS_NAME
from vae.interop.vae_files import load_vae
from vae.system import console
from vae.system.errors import EXIT_SAVED_RESUMABLE, UserError
from vae.system.files import read_json, write_csv_rows, write_json
from vae.system.folder_marker import check_folder, claim_folder
from vae.system.host import usable_cores
from vae.training.child_runs import ChildRuns, continued, validations
from vae.training.command import Command, check_command

REPORT_NAME = "folds.json"
IMAGES_NAME = "folds.csv"
METRICS = {"psnr": ("PSNR dB", 2), "ssim": ("SSIM", 4), "lpips": ("LPIPS", 4)}
NUM_WORST = 5
EXCLUDED = ("fold", "resume_from", "find_lr", "new_stage")  # each of them belongs to one run


@dataclass(frozen=True)
class Fold:
    """One fold and the options of its run."""

    number: int
    given: dict[str, Any]

    @property
    def folder(self) -> Path:
        """The output folder of its run."""
        return Path(self.given["output_dir"])

    @property
    def output(self) -> Path:
        """What the run prints, if others run at the same time."""
        return self.folder.with_suffix(".txt")

    def words(self) -> list[str]:
        """The flags of the run, which continue it if it was begun."""
        given = {**continued(self.folder, self.given), "resume_from": "latest"}
        return command_words({name: value for name, value in given.items() if value is not None})


def train_folds(command: Command, wanted: Sequence[str]) -> int:
    """Train these folds of the manifest, and print their results as one table; returns the exit code."""
    folds = find_folds(command, wanted)
    folder = command.output_dir
    check_folder(folder, "folds")
    for fold in folds:
        check_command({**fold.given, "resume_from": "latest"})
    claim_folder(folder, "folds")
    code = _train(folds, _cards(command))
    if code == 0:
        report(folder, [fold.number for fold in folds])
    return code


def find_folds(command: Command, wanted: Sequence[str]) -> list[Fold]:
    """The folds that `--folds` names, with the options of their runs; UserError if one does not exist."""
    shown = " ".join(wanted)
    for name in EXCLUDED:
        if command.value(name) not in (None, False):
            raise UserError(
                f"--folds {shown} and --{name} exclude each other: remove --{name}; to resume, repeat the "
                "command with --folds"
            )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"--folds {shown} starts its own processes: start it with python, not torchrun")
    data_path = command.value("data_path")
    if not is_manifest(data_path):
        raise UserError(
            f"--folds {shown} needs a manifest with folds as --data_path, not {data_path}: create one with "
            "prepare_data.py --mode split --num_folds 5"
        )
    known = sorted({row["fold"] for row in read_rows(data_path) if row.get("fold") is not None})
    if not known:
        raise UserError(
            f"--folds {shown}: {data_path} has no folds: run prepare_data.py --mode split --num_folds 5"
        )
    chosen = known if list(wanted) == ["all"] else [_number(text, known, shown) for text in wanted]
    folders = {number: str(command.output_dir / f"fold_{number}") for number in chosen}
    return [Fold(n, {**command.given, "fold": n, "output_dir": path}) for n, path in folders.items()]


def _number(text: str, known: Sequence[int], shown: str) -> int:
    if not text.isdecimal() or int(text) not in known:
        raise UserError(
            f"--folds {shown}: {text} is no fold: give some of folds {known[0]} to {known[-1]}, or all"
        )
    return int(text)


def _cards(command: Command) -> list[str | None]:
    """The cards to train on at the same time, as values of CUDA_VISIBLE_DEVICES; None: as a run chooses."""
    if command.value("device") == "cpu" or torch.cuda.device_count() < 2:
        return [None]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return list(visible.split(",") if visible else map(str, range(torch.cuda.device_count())))


def _train(folds: Sequence[Fold], cards: Sequence[str | None]) -> int:
    """Train the folds, one at a time on each card; the exit code of the first one that fails, or 0."""
    waiting = list(folds)
    free = list(cards)
    code = 0
    try:
        with ChildRuns[tuple[Fold, str | None]]() as runs:
            while runs.running or (waiting and not code):
                while waiting and free and not code:
                    _start(runs, waiting.pop(0), free.pop(0), min(len(cards), len(folds)))
                for (fold, card), exit_code in runs.ended():
                    free.append(card)
                    code = code or _ended(fold, exit_code)
    except KeyboardInterrupt:  # Ctrl-C or SIGTERM: the runs have saved
        code = EXIT_SAVED_RESUMABLE
    if code:
        console.info("not all folds are trained: repeat the command to continue")
    return code


def _start(runs: ChildRuns[tuple[Fold, str | None]], fold: Fold, card: str | None, at_once: int) -> None:
    """Start the run of a fold. Several at once write their output into files."""
    words = fold.words()
    log = None
    if at_once > 1:
        log = fold.output
        if fold.given.get("num_workers", "auto") == "auto":
            words += ["--num_workers", str(max(1, (usable_cores() - 2) // at_once))]
    where = f" on card {card}, output in {log}" if log else ""
    console.info(f"fold {fold.number}: {fold.folder}{where}")
    runs.start((fold, card), "train_vae.py", words, card, log)


def _ended(fold: Fold, code: int) -> int:
    """Print how a run ended that did not succeed; returns its exit code."""
    if code == 0:
        return 0
    code = 128 - code if code < 0 else code  # ended by a signal
    if code != EXIT_SAVED_RESUMABLE:
        console.error(f"fold {fold.number} ended with exit code {code}: see {fold.folder}")
    return code


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
    rows = [[row["image"], row["fold"], f"{row['psnr']:.4f}"] for row in images]
    write_csv_rows(folder / IMAGES_NAME, [["image", "fold", "psnr"], *rows])
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
        lines.append(row(key, "", {name: values[key] for name, values in summary.items()}))
    lines.append("worst images, each by the VAE that was not trained on it:")
    for image in images[:NUM_WORST]:
        lines.append(f"  {image['psnr']:6.2f} dB  fold {image['fold']}  {console.printable(image['image'])}")
    return lines


def _last_validation(folder: Path) -> dict[str, Any]:
    """The last record of a validation, which measured the exported weights."""
    records = [record for record in validations(folder) if "psnr" in record]
    if not records:
        raise UserError(f"--folds: {folder / METRICS_NAME} contains no validation: train this fold again")
    return {name: records[-1][name] for name in ("step", "images", *METRICS) if name in records[-1]}


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

    def batches() -> Iterator[torch.Tensor]:
        size = loaded.file.sample_size or config["image_size"]
        for batch in load_validation(images, range(len(images)), data, image_size=size, batch_size=1):
            if len(batch.images):
                measured.extend(batch.indices.tolist())
                yield to_float(batch.images.to(device))

    reconstruction_sums(lambda x: model(x)[0], batches(), None, psnr)
    return [
        {"image": names[index], "fold": fold, "psnr": value}
        for index, value in zip(measured, psnr, strict=True)
    ]
