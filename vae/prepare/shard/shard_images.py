"""`--mode shard`: check every image file, and pack the good ones into a dataset of shards.

The images of a dataset are sorted by the hash of their bytes: a random order that is the same everywhere. The
validation set has the images with the lowest hashes, so it hardly changes when images are added.
"""

import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vae.config.prepare_flags import ShardConfig
from vae.prepare.check_file import warn_without_simplejpeg
from vae.prepare.engine import run_tasks
from vae.prepare.ledger import DUPLICATE, INPUT_DIR, REJECTED, Ledger, Skips
from vae.prepare.output_dir import check_new, write_error
from vae.prepare.parts import complete_part, join_parts, merge_line, open_part, part_of, parts_folder
from vae.prepare.pool import Failure, Limits
from vae.prepare.preprocess.output_folder import SETTINGS_NAME
from vae.prepare.rejections import duplicates_text, rejection_lines, skip_lines
from vae.prepare.shard.check import check_listed, image_names, note_listed
from vae.prepare.shard.engines import write_energon_metadata
from vae.prepare.shard.members import TRAINING, VALIDATION, Members
from vae.prepare.shard.parent import Kept, ShardParent
from vae.prepare.shard.planner import ShardPlanner, planned_shards
from vae.prepare.shard.write import HIDDEN, SHARD_SECONDS, Member, Plan, stored_bytes, write_shard
from vae.prepare.versions import removed_line, write_removed
from vae.progress import Progress
from vae.shards.dataset_json import dataset_content, write_dataset
from vae.shards.hashed_files import removed_content
from vae.shards.index import Shard
from vae.system import console
from vae.system.errors import EXIT_DATA, DataError, UserError
from vae.system.files import read_json, remove_temporary, write_json

MEGABYTE = 10**6
MIN_KEPT = 0.5  # of --shard_mb: smaller shards of the parent are packed again, so that few are small
SUBSETS = (VALIDATION, TRAINING)  # the training set last: it names the other
REMOVED = "removed.json"
STEMS = {TRAINING: "images", VALIDATION: "validation"}  # of the names of their shards
POLICY = ("min_size", "max_aspect", "max_pixels", "background", "first_frame", "val_split", "near_duplicates")


Write = Callable[[Iterable[Plan], int], list[Shard]]


@dataclass
class PackedShards:
    """What was packed."""

    samples: dict[str, int]  # new ones by dataset
    old_samples: dict[str, int]  # of --parent
    removed: int  # keys of images that do not belong to the dataset
    shards: int
    bytes: int


def run_shard(config: ShardConfig) -> int:
    """Pack the images of a folder and print a summary; returns the exit code.

    Raises DataError if there are no images, and UserError for unusable folders or a full disk.
    """
    warn_without_simplejpeg()
    if config.part:
        return _run_part(config)
    skips, root = Skips(), Path(config.output_dir)
    parent = ShardParent(config) if config.parent else None
    names = image_names(config, skips)
    if not (root / HIDDEN / "ledger.sqlite").exists():
        check_new(root)

    def check(ledger: Ledger) -> None:
        ledger.list_files(names)
        check_listed(ledger, config, parent)

    return _check_and_pack(config, parent, check, partial(_write_all, root, config), skips)


def merge_shards(config: ShardConfig, count: int) -> int:
    """Join checked parts and plan the shards; if all are written, write the dataset. Returns the exit code.

    The parts write the planned shards when they are run again.
    """
    root = Path(config.output_dir)
    parent = ShardParent(config) if config.parent else None

    def join(ledger: Ledger) -> None:
        join_parts(ledger, parts_folder(config), count)
        note_listed(ledger, config, parent)
        if ledger.settle_duplicates():
            raise DataError(f"--output_dir {root}: some files have changed: run all parts again")

    planner = ShardPlanner(root, count)
    code = _check_and_pack(config, parent, join, planner, Skips())
    planner.publish()
    return code


def _check_and_pack(
    config: ShardConfig,
    parent: ShardParent | None,
    check: Callable[[Ledger], None],
    write: Write,
    skips: Skips,
) -> int:
    """Fill the ledger, pack the accepted images, and print a summary; returns the exit code.

    `write` gives the shards of some plans, which have so many images.
    """
    began, root = time.monotonic(), Path(config.output_dir)
    try:
        (root / HIDDEN).mkdir(parents=True, exist_ok=True)
        ledger = Ledger(root / HIDDEN / "ledger.sqlite")
        try:
            remove_temporary(root)  # of killed processes: no other run uses the folder
            check(ledger)
            outcome = _pack(ledger, config, root, parent, write)
            if outcome is None:
                return 0
            for folder in (root, root / HIDDEN):  # of nodes that died
                remove_temporary(folder)
            _print_summary(ledger, skips, config, outcome, time.monotonic() - began)
        finally:
            ledger.close()
    except (OSError, sqlite3.OperationalError) as error:
        raise write_error(error, config.output_dir) from error
    return 0 if outcome.shards else EXIT_DATA


def _run_part(config: ShardConfig) -> int:
    """Check the files of a part, and write its share of the planned shards; returns the exit code."""
    root, part, skips = Path(config.output_dir), part_of(config), Skips()
    assert part is not None
    parent = ShardParent(config) if config.parent else None
    names = image_names(config, skips)
    if not (root / HIDDEN).exists():
        check_new(root)
    try:
        ledger = open_part(config)
        try:
            ledger.list_files(filter(part.has, names))
            ledger.note(INPUT_DIR, os.path.realpath(config.input_dir))
            ledger.inherit(root / HIDDEN / "ledger.sqlite")  # of an earlier merge
            check_listed(ledger, config, parent)
            complete_part(ledger)
            plans = list(planned_shards(root, part))
            _write_all(root, config, plans, sum(len(plan.members) for plan in plans))
            lines = [
                f"{console.printable(config.output_dir)}: part {part}: {ledger.count_files()} files are "
                f"checked, {len(plans)} shards are written",
                *rejection_lines(ledger),
                merge_line(config),
            ]
            console.info("\n".join(lines))
        finally:
            ledger.close()
    except (OSError, sqlite3.OperationalError) as error:
        raise write_error(error, config.output_dir) from error
    return 0


def _pack(
    ledger: Ledger, config: ShardConfig, root: Path, parent: ShardParent | None, write: Write
) -> PackedShards | None:
    """Write the missing shards, then the files of the datasets; None if parts have to write some."""
    old = parent if parent and parent.is_whole else None
    members = Members(ledger, config, root / HIDDEN / "phashes", old.phashes if old else None)
    digest, samples = members.survey()
    policy = {name: getattr(config, name) for name in POLICY}
    version, transforms = parent.dataset.version if parent else None, {}
    if config.input_dir:
        transforms = _transforms(config.input_dir)
    elif parent:
        policy = parent.policy
    if old:
        transforms = transforms or dict(old.dataset.transforms)
    contents = {"images": digest, "shard_mb": config.shard_mb, "policy": policy}
    if parent and parent.removed:
        contents["removed"] = removed_content(parent.removed)
    _claim(root, {**contents, "parent": version, "transforms": transforms})
    written: dict[str, list[Shard]] = {}
    for subset in SUBSETS:
        written[subset] = _pack_subset(root, subset, members, parent, samples[subset], config, write)
    if isinstance(write, ShardPlanner) and write.missing:
        return None
    everything = [shard for shards in written.values() for shard in shards]
    removed = parent.removed_from(everything) if parent else {}
    more = write_removed(root / REMOVED, removed)
    for subset in SUBSETS:
        if written[subset]:
            other = VALIDATION if subset == TRAINING and written[VALIDATION] else None
            changes = {"changes": parent.changes(subset, written[subset])} if parent else {}
            content = dataset_content(
                written[subset],
                policy,
                other,
                parent=version,
                transforms=transforms,
                more={**more, **changes},
            )
            write_dataset(root / subset, content)
    write_energon_metadata(root, written[TRAINING], written[VALIDATION])
    old_samples = {subset: old.samples(subset) if old else 0 for subset in samples}
    num_bytes = sum(shard.bytes for shard in everything)
    return PackedShards(samples, old_samples, sum(map(len, removed.values())), len(everything), num_bytes)


def _pack_subset(
    root: Path,
    subset: str,
    members: Members,
    parent: ShardParent | None,
    images: int,
    config: ShardConfig,
    write: Write,
) -> list[Shard]:
    """The shards of a subset: those of the parent that are unchanged, and new ones for the other images."""
    max_bytes = config.shard_mb * MEGABYTE
    kept, number = Kept([], np.zeros(0, "S32")), 0
    if parent:
        number = parent.next_number(STEMS[subset])
        if parent.is_whole:
            kept = kept._replace(shards=parent.link_all(root, subset))
        else:
            kept = parent.link_unchanged(root, subset, members, max_bytes * MIN_KEPT)
    others = (member for its_subset, member in members if its_subset == subset and not kept.contains(member))
    plans = _split(STEMS[subset], others, max_bytes, number)
    return sorted([*kept.shards, *write(plans, images - len(kept.keys))])


def _transforms(input_dir: str) -> dict[str, Any]:
    """The settings with which --mode preprocess made the images; empty for other images."""
    folder = Path(input_dir).absolute()
    if folder.name.isdecimal() and not (folder / SETTINGS_NAME).exists():
        folder = folder.parent  # one of several sizes
    try:
        settings = read_json(folder / SETTINGS_NAME)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"--input_dir {input_dir}: {SETTINGS_NAME} is damaged ({error}): delete it") from None
    return settings if isinstance(settings, dict) else {}


def _claim(root: Path, contents: dict[str, Any]) -> None:
    """Note what the folder will contain; UserError if it is complete and has other contents."""
    noted = root / HIDDEN / "dataset.json"
    if (root / TRAINING).exists() and noted.exists() and read_json(noted) != contents:
        raise UserError(
            f"--output_dir {root} has a dataset of other images or settings, and a dataset never changes: "
            f"give a new folder, with --parent {root / TRAINING} if it is a new version of this dataset"
        )
    write_json(noted, contents)


def _split(stem: str, members: Iterable[Member], max_bytes: int, number: int) -> Iterator[Plan]:
    """Shards of at most so many bytes, or of one image; the first one has this number."""
    batch: list[Member] = []
    size = 0
    for member in members:
        added = stored_bytes(member.bytes, len(member.json))
        if batch and size + added > max_bytes:
            yield Plan(f"{stem}-{number:06}.tar", batch)
            number, batch, size = number + 1, [], 0
        batch.append(member)
        size += added
    if batch:
        yield Plan(f"{stem}-{number:06}.tar", batch)


def _write_all(root: Path, config: ShardConfig, plans: Iterable[Plan], images: int) -> list[Shard]:
    """Write shards in several processes; returns them in the order of their names."""
    shards = {}
    results = run_tasks(partial(write_shard, root), plans, config, Limits(SHARD_SECONDS))
    with Progress("write", images, "image") as bar, closing(results):
        for plan, shard in results:
            if isinstance(shard, Failure):
                raise UserError(f"--output_dir {root}: {plan.name}: {shard.reason} ({shard.detail})")
            shards[plan.name] = shard
            bar.update(shard.samples)
    return [shard for _, shard in sorted(shards.items())]


def _counted(outcome: PackedShards, subset: str) -> str:
    """The images of a subset: those of the parent, and new ones."""
    old, new = outcome.old_samples[subset], outcome.samples[subset]
    return f"{old + new} ({old} of --parent and {new} new)" if any(outcome.old_samples.values()) else str(new)


def _print_summary(
    ledger: Ledger, skips: Skips, config: ShardConfig, outcome: PackedShards, seconds: float
) -> None:
    rejected, duplicates = (sum(n for _, n in ledger.counts(status)) for status in (REJECTED, DUPLICATE))
    root = console.printable(config.output_dir)
    lines = [
        f"{root}: {_counted(outcome, TRAINING)} images for training and {_counted(outcome, VALIDATION)} for "
        f"validation in {outcome.shards} shards ({outcome.bytes / 1e6:.1f} MB, {seconds:.1f} s), "
        f"{rejected} rejected, {duplicates_text(duplicates)}",
        *rejection_lines(ledger),
        *skip_lines(skips),
        *([removed_line(outcome.removed)] if outcome.removed else []),
        f"  train: python train_vae.py --data_path {Path(config.output_dir, TRAINING)}",
    ]
    console.info("\n".join(lines))
