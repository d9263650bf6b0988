"""Record the origin of a run and what decides its samples. A resumed run reports what differs.

A checkpoint contains both as plain data: `Identity`, and under "provenance" what decides the samples.
"""

import secrets
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vae.config.options import Config, names_where
from vae.system import console
from vae.system.addresses import public_text
from vae.system.files import read_json
from vae.training.datasets import TrainingSet
from vae.training.logbook import try_to_write_json
from vae.training.run_folder import RUN_NAME
from vae.training.stages import Stage
from vae.training.validation import ValidationSet

RULES = 1  # of the order of images and of their crops as functions of (seed, epoch, position)
DATA = ("training", "validation", "transform", "seed")  # what makes a run another one if it changes
NEW = "new"
EXACT = "exact"
TOPOLOGY = "other topology"
OTHER_DATA = "other data"  # the run goes on with other images or transforms


@dataclass(frozen=True)
class Identity:
    """A run: all commands that train in one folder. Nothing is computed with its parent."""

    id: str = field(default_factory=partial(secrets.token_hex, 8))  # of the folder
    parent: str = ""  # id of the run that it began from, in another folder
    restarts: int = 0  # commands that have continued it
    start: str = ""  # hash of the weights before its first step, or its parent's; "": not known


class Resume(NamedTuple):
    """The kind of a run: new, or a continuation of another one."""

    kind: str  # NEW, EXACT, TOPOLOGY or OTHER_DATA
    changed: str = ""  # the parts that differ, and the values of the topology
    comparable: bool = True  # whether validations measure the same images as before


@dataclass(frozen=True)
class Provenance:
    """The origin of this run, fixed from its preparation on."""

    samples: dict[str, Any]  # `provenance` of a checkpoint
    begun_from: str  # RANDOM, WARM or TRAINED: the weights of the first stage
    resumed_from: Path | None  # the checkpoint
    resume: Resume

    def run_record(self, identity: Identity) -> dict[str, str]:
        """Return the values of the record `run` in metrics.jsonl."""
        versions = {part: (self.samples[part] or {}).get("version", "") for part in DATA[:2]}
        resume = {"resume": self.resume.kind, "changed": self.resume.changed}
        return {"id": identity.id, "parent": identity.parent, **resume, **versions}


def write_run(folder: Path, identity: Identity, good: Path | None) -> None:
    """Store the run of the folder, and its checkpoint that is known to be good."""
    name = good.name if good is not None and good.parent == folder else None
    try_to_write_json(folder / RUN_NAME, {**asdict(identity), "good_checkpoint": name}, indent=2)


def read_good_checkpoint(folder: Path) -> Path | None:
    """Read which checkpoint of the run in the folder is known to be good; None if there is none."""
    path = folder / RUN_NAME
    name = read_json(path).get("good_checkpoint") if path.exists() else None
    return folder / name if name else None


def samples_record(
    config: Config,
    training_set: TrainingSet,
    validation_set: ValidationSet | None,
    stage: Stage,
    processes: int,
    continues: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Record what decides the samples of a run in `stage`. `continues`: a checkpoint and its run."""
    validation = None
    if validation_set is not None:
        validation = {**_version(validation_set), "images": validation_set.count}
    transform = {name: getattr(config.data, name) for name in names_where("changes_samples")}
    order = training_set.order
    return {
        "training": _version(training_set),
        "validation": validation,
        "transform": {n: list(v) if isinstance(v, tuple) else v for n, v in transform.items()},  # as in JSON
        "seed": {"seed": config.run.seed, "rules": RULES},
        "topology": {
            "processes": processes,
            "batch_size": stage.batch_size,
            "accumulation_steps": config.run.accumulation_steps,
            "streams": order.num_streams,
            "shuffle_shards": order.shuffle_shards,
        },
        "code": code_revision(),
        "continues": continues,
    }


def _version(of: TrainingSet | ValidationSet) -> dict[str, Any]:
    """Identify a set of images by the version of its dataset, or a hash of the names of its files.

    With another list of --exclude, other images are used: its SHA-256 belongs to the version.
    """
    images = of.images
    return {
        "path": public_text(images.location),
        "version": images.version,
        "images": len(images),
        "exclude": of.excluded.sha256,
    }


def code_revision() -> dict[str, str | None]:
    """Versions of PyTorch and of this code: the commit, with -dirty if files differ; None outside of git."""
    root = Path(__file__).resolve().parents[2]
    revision = None
    if (root / ".git").exists():
        words = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        with suppress(OSError, subprocess.TimeoutExpired):  # no git here: the record has null
            done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=10)
            revision = done.stdout.strip() or None
    return {"torch": str(torch.__version__), "revision": revision}


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> Resume:
    """Compare the samples of a run with those `before`, from which it continues."""
    other = [part for part in DATA if _decisive(before[part]) != _decisive(now[part])]
    topology = [
        f"{name} {before['topology'].get(name)} -> {value}"
        for name, value in now["topology"].items()
        if before["topology"].get(name) != value
    ]
    kind = OTHER_DATA if other else TOPOLOGY if topology else EXACT
    return Resume(kind, ", ".join([*other, *topology]), not {"validation", "transform"} & set(other))


def _decisive(part: Mapping[str, Any] | None) -> dict[str, Any]:
    """Leave out values that decide no samples: the path of a dataset, the `policy` of old checkpoints."""
    return {name: value for name, value in (part or {}).items() if name not in ("path", "policy")}


def print_resume(resume: Resume, new_size: int | None) -> None:
    """Print which kind of continuation this is. `new_size`: the side of its crops in px if a stage begins."""
    if resume.kind == OTHER_DATA:
        console.warning(
            f"resume with another dataset or transform ({resume.changed}): this is a new branch; "
            "metrics.jsonl and evaluation reports mark it"
        )
        return
    if new_size is not None:
        changed = f", {resume.changed}" if resume.changed else ""
        text = f"with a new stage of {new_size} px{changed}: the same images in new epochs"
    elif resume.kind == EXACT:
        text = "exact: the samples continue as if the run had not stopped"
    else:
        text = (
            f"same data, other topology ({resume.changed}): the same steps only if processes x batch "
            "size x accumulation and the streams are as before, and with --buckets also the processes"
        )
    console.info(f"resume  {text}")
