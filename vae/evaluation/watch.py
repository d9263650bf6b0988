"""Measure each new checkpoint of a run that is going on, and mark the best one: `--watch`, `--promote`."""

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from vae.config.trained_vae_flags import EvaluateConfig
from vae.data.exclude_list import hash_of_list
from vae.evaluation.compare import Candidate, image_channels, on_device, open_metrics
from vae.evaluation.image_set import ImageSet, find_images
from vae.evaluation.measure import Metrics, measure
from vae.evaluation.results import VaeResult
from vae.interop.run_files import PROMOTED_NAME, RUN_NAME, read_promoted
from vae.interop.vae_files import CHECKPOINT_KEY, load_vae
from vae.interop.vae_path import WEIGHTS_NAME
from vae.interop.writing import stored_metadata
from vae.system import console
from vae.system.addresses import public_text
from vae.system.errors import UserError
from vae.system.files import read_json, sha256_of_file, write_json

POLL_SECONDS = 10.0  # until the folder is looked at again


def watch(config: EvaluateConfig) -> int:
    """Measure the checkpoints of --watch until its run is finished or Ctrl-C ends it; the exit code is 0."""
    assert config.watch is not None
    folder = Path(config.watch)
    seen = dict[Path, tuple[int, int]]()
    metrics, _, missing = open_metrics(config)
    image_set, unusable = find_images(config)
    if config.perceptual_net != "none" and "lpips" in missing:
        unusable["lpips"] = missing["lpips"]
    for name, reason in unusable.items():
        console.info(f"not measured: {name}: {reason}")
    try:
        while True:
            new = [path for path in folder.glob("checkpoint_*.pt") if seen.get(path) != _version(path)]
            for path in sorted(new, key=lambda path: (len(path.name), path.name)):  # 9 before 10
                seen[path] = _version(path)
                _evaluate(config, path, image_set, metrics)
            if not new and _is_finished(folder):
                console.info(f"{folder}: the run is finished")
                return 0
            if not new:
                time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        console.info(f"{folder}: stopped; the same command continues")
        return 0


def _version(path: Path) -> tuple[int, int]:
    """What changes when a checkpoint is written again; zeros if it was removed."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def _is_finished(folder: Path) -> bool:
    """Whether the last run has exported its weights: it then notes the SHA-256 of their checkpoint."""
    try:
        exported = read_json(folder / RUN_NAME)["exported"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return stored_metadata(folder / "vae" / WEIGHTS_NAME).get(CHECKPOINT_KEY) == exported


def _evaluate(config: EvaluateConfig, path: Path, image_set: ImageSet, metrics: Metrics) -> None:
    """Measure one checkpoint, print its metrics, and promote it if it is the best."""
    try:
        digest = sha256_of_file(path)
        loaded = load_vae(path, flag="--watch", weights=config.weights)
    except (OSError, UserError) as error:
        if path.exists():  # damaged; otherwise the run has removed it
            console.warning(f"skipped: {error}")
        return
    row = Candidate(VaeResult(name=path.name, path=str(path), kind=loaded.kind), loaded)
    (size,) = config.sizes
    image_set = replace(image_set, channels=image_channels([row]))
    with torch.inference_mode(), on_device(config, row, metrics.device) as codec:
        means = measure(codec, image_set, size, config.batch_size, metrics, path.name).metrics
    shown = ", ".join(f"{name} {value:.4f}" for name, value in means.items() if value is not None)
    is_best = config.promote and path.exists() and _promote(config, path, digest, means, image_set)
    console.info(f"{path.name}: {shown or 'NaN or infinity'}{'; promoted' * is_best}")


def _promote(
    config: EvaluateConfig, path: Path, digest: str, means: Mapping[str, float | None], image_set: ImageSet
) -> bool:
    """Write `promoted.json`, unless it has a checkpoint with an equal or better PSNR by the same protocol."""
    protocol: dict[str, Any] = {
        "data_path": public_text(config.path),
        "images": len(image_set.names),
        **{name: asdict(config)[name] for name in ("crop", "posterior", "seed", "dtype", "weights")},
        "size": config.sizes[0],
        **({"exclude": hash_of_list(config.exclude)} if config.exclude else {}),
    }
    best = read_promoted(path.parent)
    psnr = means["psnr"]
    was_replaced = best.get("checkpoint") == path.name and best.get("sha256") != digest  # after a divergence
    if psnr is None:
        return False
    if best.get("evaluation") == protocol and best["metrics"]["psnr"] >= psnr and not was_replaced:
        return False
    known = {name: value for name, value in means.items() if value is not None}
    content = {"checkpoint": path.name, "sha256": digest, "metrics": known, "evaluation": protocol}
    write_json(path.parent / PROMOTED_NAME, content, indent=1)
    return True
