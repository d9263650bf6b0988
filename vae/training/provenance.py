"""Where a run comes from: the runs before it, and what decides its samples. A resumed run says what differs.

A checkpoint contains both as plain data. `run` is the lineage. `contract`, which config.json contains, too,
has `training` and `validation` (version, number of images, and for a dataset of shards the rules by which
its images were accepted), `transform` (from an image to a crop), `seed`, `topology` (how a step is divided),
`code` (version and revision) and `continues` (run, step and checkpoint, or None).
"""

import secrets
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vae.config.options import Config, DataConfig
from vae.data.dataset import Images
from vae.sampling.mixture import MixtureOrder
from vae.sampling.streams import StreamOrder
from vae.shards.shard_images import ShardImages
from vae.system import console
from vae.system.addresses import public_text
from vae.system.files import read_json
from vae.training.datasets import TrainingSet
from vae.training.output.appending import write_json
from vae.training.stages import Stage
from vae.training.validation.measure import ValidationSet

RUN_NAME = "run.json"
EXPORTED = "exported"  # key: the SHA-256 of the checkpoint whose weights the run has exported at its end
RULES = 1  # of the order of images and of their crops as functions of (seed, epoch, position)
# Records from before the augmentations existed do not have them: then they had their defaults.
TRANSFORM = (
    *("crop", "horizontal_flip", "upscale", "background", "max_pixels"),
    *("buckets", "crop_scale", "crop_ratio", "rotate90", "color_jitter"),
)
# Without these keys two records can be equal: they do not decide samples.
NOT_COMPARED = {"path", "policy", "transforms", "parent"}
NEW, EXACT, TOPOLOGY, DATA, ROLLBACK = "new", "exact", "other topology", "other data", "rollback"
SHOWN = 12  # characters of a version


# ---- the runs before it ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lineage:
    """A run and its ancestors.

    Every command that trains is a run of its own, and so is what follows a rollback. Its parent is the run
    that it continues, with the step at which it does. Checkpoints that are neither its own nor those of an
    ancestor up to this step belong to abandoned branches.
    """

    id: str
    ancestors: tuple[tuple[str, int], ...] = ()  # id and the step at which it was left, oldest first
    start: str = ""  # hash of the weights before the first step of the line; "": not known

    @classmethod
    def new(cls, ancestors: tuple[tuple[str, int], ...] = ()) -> "Lineage":
        """A run with a random id."""
        return cls(secrets.token_hex(8), ancestors)

    def continued(self, step: int) -> "Lineage":
        """A new run that continues this one after `step`."""
        return replace(Lineage.new((*self.ancestors, (self.id, step))), start=self.start)

    def is_of(self, run_id: str) -> bool:
        """Whether this run, or one of its ancestors, has this id."""
        return run_id in (self.id, *(one for one, _ in self.ancestors))

    def contains(self, run_id: str, step: int) -> bool:
        """Whether a checkpoint of this run and step is on the line."""
        return run_id == self.id or any(run_id == one and step <= left for one, left in self.ancestors)

    def plain(self) -> dict[str, Any]:
        """The form in checkpoints and in RUN_NAME."""
        ancestors = [list(ancestor) for ancestor in self.ancestors]
        return {"id": self.id, "ancestors": ancestors, "start": self.start}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Lineage":
        """The inverse of `plain`; raises KeyError, TypeError or ValueError for anything else."""
        ancestors = tuple((str(one), left) for one, left in plain["ancestors"])
        if not all(type(left) is int for _, left in ancestors):
            raise TypeError("a step is not a whole number")
        return cls(str(plain["id"]), ancestors, str(plain.get("start", "")))


def saved_lineage(content: Mapping[str, Any]) -> Lineage:
    """The run that saved a checkpoint. One without an identity belongs to the run with the id ""."""
    return Lineage.from_plain(content["run"]) if "run" in content else Lineage("")


def write_last_run(folder: Path, lineage: Lineage, good: Path | None) -> None:
    """Store which run is the last one in the folder, and its checkpoint that is known to be good."""
    name = good.name if good is not None and good.parent == folder else None
    write_json(folder / RUN_NAME, {**lineage.plain(), "good_checkpoint": name}, indent=2)


def note_exported(folder: Path, digest: str) -> None:
    """Store that the last run in the folder has exported its weights, from a checkpoint with this SHA-256."""
    try:
        plain = read_json(folder / RUN_NAME)
    except (OSError, ValueError):
        plain = {}
    write_json(folder / RUN_NAME, {**plain, EXPORTED: digest}, indent=2)


def read_last_run(folder: Path) -> tuple[Lineage | None, Path | None]:
    """The last run in the folder and its good checkpoint; None for what is unknown."""
    try:
        plain = read_json(folder / RUN_NAME)
        lineage, name = Lineage.from_plain(plain), plain.get("good_checkpoint")
    except (OSError, ValueError, KeyError, TypeError):
        return None, None
    return lineage, folder / name if isinstance(name, str) and Path(name).name == name else None


# ---- what decides its samples ----------------------------------------------------------------------------


class Resume(NamedTuple):
    """How a run continues the one before it."""

    kind: str  # NEW, EXACT, TOPOLOGY, DATA or ROLLBACK
    changed: str = ""  # what differs, for people


@dataclass(frozen=True)
class Provenance:
    """Where this run comes from, fixed from its preparation on; its lineage grows with each rollback."""

    samples: dict[str, Any]  # `contract` of a checkpoint
    fingerprint: str  # of the training images
    begun_from: str  # RANDOM, WARM or TRAINED of schedule.py: the weights of the first stage
    resumed_from: Path | None  # the checkpoint
    resume: Resume

    def run_record(self, lineage: Lineage, resume: Resume) -> dict[str, str]:
        """Values of the record `run` in metrics.jsonl."""
        parent = lineage.ancestors[-1][0] if lineage.ancestors else ""
        versions = {
            part: (self.samples[part] or {}).get("version", "") for part in ("training", "validation")
        }
        return {
            "id": lineage.id,
            "parent": parent,
            "resume": resume.kind,
            "changed": resume.changed,
            **versions,
        }


def samples_record(
    config: Config,
    training_set: TrainingSet,
    validation_set: ValidationSet | None,
    stage: Stage,
    processes: int,
    continues: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What decides the samples of a run in `stage`. `continues`: the content of a checkpoint and its path."""
    validation = None
    if validation_set is not None:
        validation = {**_version(validation_set.images), "images": validation_set.count}
    order = training_set.order
    return {
        "training": _version(training_set.images),
        "validation": validation,
        "transform": _transform(config.data),
        "seed": {"seed": config.run.seed, "rules": RULES},
        "topology": {
            "processes": processes,
            "batch_size": stage.batch_size,
            "accumulation_steps": config.run.accumulation_steps,
            "streams": order.num_streams,
            "shuffle_shards": order.shuffle_shards if isinstance(order, StreamOrder | MixtureOrder) else None,
        },
        "code": code_revision(),
        "continues": dict(continues) if continues else None,
    }


def _transform(data: DataConfig) -> dict[str, Any]:
    """The options that decide the crops; JSON has no tuples."""
    values = {name: getattr(data, name) for name in TRANSFORM}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _version(images: Images) -> dict[str, Any]:
    """What identifies a set of images: the version of its dataset, or a hash of the names of its files."""
    dataset = images.dataset if isinstance(images, ShardImages) else None
    return {
        "path": public_text(images.location),
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


def compare(before: Mapping[str, Any] | None, now: Mapping[str, Any], same_data: bool) -> Resume:
    """How a run with the samples `now` continues one with `before`.

    A checkpoint from before this record existed has None: then only `same_data` is known, whether the order
    of the images is the same.
    """
    if before is None:
        return Resume(EXACT) if same_data else Resume(DATA, "training images")
    parts = ("training", "validation", "transform", "seed")
    data = [line for part in parts for line in _differences(part, before.get(part), now[part])]
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


def print_resume(resume: Resume) -> None:
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
            f"resume with another dataset or transform ({resume.changed}): this is a new branch; "
            "metrics.jsonl and evaluation reports mark it"
        )
