"""What decides the samples of a run, recorded in checkpoints and config.json, and how a resumed run differs.

A contract has plain data only: `training` and `validation` (version, number of images, and for a dataset of
shards the rules by which its images were accepted), `transform` (from an image to a crop), `seed`, `topology`
(how a step is divided), `code` (version and revision) and `continues` (run, step and checkpoint, or None).
"""

import subprocess
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vae.config.options import Config, DataConfig
from vae.data.dataset import Images
from vae.shards.shard_images import ShardImages
from vae.system import console
from vae.system.addresses import public_address
from vae.training.checkpoints.lineage import saved_lineage
from vae.training.datasets import TrainingSet
from vae.training.stages import Stage
from vae.training.validation.measure import ValidationSet

RULES = 1  # of the order of images and of their crops as functions of (seed, epoch, position)
TRANSFORM = ("crop", "horizontal_flip", "upscale", "background", "max_pixels")
# Contracts from before these options existed do not have them: then they had their defaults.
AUGMENTATIONS = ("buckets", "crop_scale", "crop_ratio", "rotate90", "color_jitter")
# Without these keys two contracts can be equal: they do not decide samples.
NOT_COMPARED = {"path", "policy", "transforms", "parent"}
NEW, EXACT, TOPOLOGY, DATA, ROLLBACK = "new", "exact", "other topology", "other data", "rollback"
SHOWN = 12  # characters of a version


class Resume(NamedTuple):
    """How a run continues the one before it."""

    kind: str  # NEW, EXACT, TOPOLOGY or DATA
    changed: str = ""  # what differs, for people


def contract_of(
    config: Config,
    training_set: TrainingSet,
    validation_set: ValidationSet | None,
    stage: Stage,
    processes: int,
    continues: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The contract of a run in `stage`."""
    data = config.data
    validation = None
    if validation_set is not None:
        validation = {**_version(validation_set.images), "images": validation_set.count}
    return {
        "training": _version(training_set.images),
        "validation": validation,
        "transform": _transform(data),
        "seed": {"seed": config.run.seed, "rules": RULES},
        "topology": {
            "processes": processes,
            "batch_size": stage.batch_size,
            "accumulation_steps": config.run.accumulation_steps,
            "streams": training_set.order.num_streams,
        },
        "code": code_revision(),
        "continues": dict(continues) if continues else None,
    }


def _transform(data: DataConfig) -> dict[str, Any]:
    """The options that decide the crops; JSON has no tuples."""
    values = {name: getattr(data, name) for name in TRANSFORM + AUGMENTATIONS}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _version(images: Images) -> dict[str, Any]:
    """What identifies a set of images: the version of its dataset, or a hash of the names of its files."""
    dataset = images.dataset if isinstance(images, ShardImages) else None
    return {
        "path": public_address(images.location),
        "version": dataset.version if dataset else images.fingerprint(),
        "images": len(images),
        "policy": dict(dataset.policy) if dataset else None,
        "transforms": dict(dataset.transforms) if dataset else None,
        "parent": dataset.parent if dataset else None,
    }


@lru_cache(maxsize=1)
def code_revision() -> dict[str, str | None]:
    """Versions of PyTorch and of this code: the commit, with -dirty if files differ; None outside of git."""
    root = Path(__file__).resolve().parents[2]
    revision = None
    if (root / ".git").exists():
        words = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        try:
            done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=10)
            revision = done.stdout.strip() or None
        except (OSError, subprocess.TimeoutExpired):
            pass  # no git here: the record says null
    return {"torch": str(torch.__version__), "revision": revision}


def came_from(content: Mapping[str, Any], checkpoint: Path) -> dict[str, Any]:
    """`continues` of a run that begins after this checkpoint."""
    step = content["position"]["step"]
    return {"run": saved_lineage(content).id, "step": step, "checkpoint": str(checkpoint)}


def compare(before: Mapping[str, Any] | None, now: Mapping[str, Any], same_data: bool) -> Resume:
    """How a run with the contract `now` continues one with `before`.

    A checkpoint from before contracts existed has None: then only `same_data` is known, whether the order of
    the images is the same.
    """
    if before is None:
        return Resume(EXACT) if same_data else Resume(DATA, "training images")
    data = [
        line
        for part in ("training", "validation", "transform", "seed")
        for line in _differences(part, before.get(part), now[part])
    ]
    topology = _differences("", before.get("topology"), now["topology"])
    kind = DATA if data else TOPOLOGY if topology else EXACT
    return Resume(kind, ", ".join([*data, *topology]))


def _differences(part: str, before: Any, now: Mapping[str, Any] | None) -> list[str]:
    """One text for each value that differs; a part that only one of both has is one difference."""
    if not isinstance(before, dict) or now is None:
        return [] if before is None and now is None else [f"{part} {_shown(before)} -> {_shown(now)}".strip()]
    if part == "transform":
        before = {**_transform(DataConfig()), **before}
    names = [name for name in now if name not in NOT_COMPARED and before.get(name) != now[name]]
    return [f"{part} {name} {_shown(before.get(name))} -> {_shown(now[name])}".strip() for name in names]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "set"
    return "none" if value is None else console.printable(str(value))[:SHOWN]


def report(resume: Resume) -> None:
    """Print which kind of continuation this is, and what it means."""
    if resume.kind == EXACT:
        console.info("resume  exact: the samples continue as if the run had not stopped")
    elif resume.kind == TOPOLOGY:
        console.info(
            f"resume  same data, other topology ({resume.changed}): the same steps only if processes x batch "
            "size x accumulation and the streams are as before"
        )
    elif resume.kind == DATA:
        console.warning(
            f"resume with another dataset or transform ({resume.changed}): this is a new line of the "
            "experiment; metrics.jsonl and evaluation reports mark it"
        )


def run_record(resume: Resume, contract: Mapping[str, Any]) -> dict[str, str]:
    """Values of the record `run` in metrics.jsonl."""
    versions = {part: (contract[part] or {}).get("version", "") for part in ("training", "validation")}
    return {"resume": resume.kind, "changed": resume.changed, **versions}
