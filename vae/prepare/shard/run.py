"""`--mode shard`: check every image file, and pack the good ones into a dataset of shards.

The images of a dataset are sorted by the hash of their bytes: a random order that is the same everywhere. The
validation set has the images with the lowest hashes, so it hardly changes when images are added.
"""

import json
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

from vae import console
from vae.config.errors import EXIT_DATA, DataError, UserError
from vae.config.prepare_flags import ShardConfig
from vae.data.folder import OTHER_EXTENSIONS, SMALL_SET, walk_images
from vae.data.formats import EXTENSIONS_OF
from vae.data.manifest import MANIFEST_NAME, read_rows, replace_text
from vae.data.shards import Shard, dataset_content
from vae.files import parse_json, read_json
from vae.prepare.check_file import check_file, decode_each, warn_without_simplejpeg
from vae.prepare.ledger import ACCEPTED, DUPLICATE, REJECTED, Ledger, Result, Skips, first_names
from vae.prepare.output_dir import check_apart, write_error
from vae.prepare.pool import Failure, Limits, count_workers, run_each
from vae.prepare.rejections import TRANSIENT, duplicates_text, rejection_lines, skip_lines
from vae.prepare.shard.write import SHARD_SECONDS, Member, Plan, stored_bytes, write_shard
from vae.progress import Progress

HIDDEN = ".prepare"
MEGABYTE = 10**6
TRAINING, VALIDATION = "dataset.json", "validation.json"
STEMS = {TRAINING: "images", VALIDATION: "validation"}  # of the names of their shards
OWN_COLUMNS = {"path", "sha256", "width", "height", "source", "flags", "split", "fold"}  # of a manifest
POLICY = ("min_size", "max_aspect", "max_pixels", "background", "first_frame", "val_split")
ROW = "row "  # key of a note: the manifest's columns of a path


@dataclass
class Outcome:
    """What was packed."""

    samples: dict[str, int]  # by dataset
    shards: int
    bytes: int


def run_shard(config: ShardConfig) -> int:
    """Pack the images of a folder and print a summary; returns the exit code.

    Raises DataError if there are no images, and UserError for unusable folders or a full disk.
    """
    warn_without_simplejpeg()
    began, root, skips = time.monotonic(), Path(config.output_dir), Skips()
    check_apart(config.input_dir, root)
    names = walk_images(config.input_dir, flag="--input_dir", extensions=OTHER_EXTENSIONS, on_skip=skips.add)
    first = next(names, None)
    if first is None:
        raise DataError(f"--input_dir {config.input_dir} contains no images: give another folder")
    _check_output(root)
    try:
        (root / HIDDEN).mkdir(parents=True, exist_ok=True)
        ledger = Ledger(root / HIDDEN / "ledger.sqlite")
        try:
            ledger.list_files(chain([first], names))
            _check_all(ledger, config)
            outcome = _pack(ledger, config, root)
            _print_summary(ledger, skips, config, outcome, time.monotonic() - began)
        finally:
            ledger.close()
    except (OSError, sqlite3.OperationalError) as error:
        raise write_error(error, config.output_dir) from error
    return 0 if outcome.shards else EXIT_DATA


def _check_output(root: Path) -> None:
    """Raise UserError if the folder has other contents than those of this mode."""
    if not root.is_dir() or (root / HIDDEN / "ledger.sqlite").exists():
        return
    if not all(entry.name.startswith(".") for entry in os.scandir(root)):
        raise UserError(f"--output_dir {root} contains other files: give a new or an empty folder")


def _check_all(ledger: Ledger, config: ShardConfig) -> None:
    """Check the files that have no result, or have changed since."""
    manifest = Path(config.input_dir) / MANIFEST_NAME
    if manifest.is_file():
        for row in read_rows(manifest, flag="--input_dir"):
            ledger.note(ROW + row["path"], json.dumps(row))
    listed = [name for name, _ in first_names(ledger, config.limit)]
    ledger.list_files(listed)
    ledger.drop_unlisted()
    while True:
        todo = [name for name in listed if not _is_current(ledger.result(name), config.input_dir)]
        bad = 0
        results = decode_each(partial(check_file, config), todo, config)
        with Progress("check", len(listed), "image", done=len(listed) - len(todo)) as bar, closing(results):
            for name, result in results:
                if isinstance(result, Failure):
                    result = Result(name, REJECTED, *result)
                ledger.record(result)
                bad += result.status == REJECTED
                bar.update(note=f"{bad} bad")
        if not ledger.settle_duplicates():
            return  # else: the first of some duplicates no longer exists


def _is_current(result: Result | None, input_dir: str) -> bool:
    if result is None or result.reason in TRANSIENT:
        return False
    try:
        status = os.stat(os.path.join(input_dir, result.name))
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (result.size, result.mtime_ns)


def _pack(ledger: Ledger, config: ShardConfig, root: Path) -> Outcome:
    """Write the missing shards, then the files of the datasets."""
    plans = _plans(ledger, config)
    digest = sha256("".join(plan.digest() for side in plans.values() for plan in side).encode()).hexdigest()
    policy = {name: getattr(config, name) for name in POLICY}
    _claim(root, {"plan": digest, "policy": policy})
    written = {side: _write_all(root, side_plans, config) for side, side_plans in plans.items()}
    for side, shards in sorted(written.items(), reverse=True):  # the training set last: it names the other
        if shards:
            other = VALIDATION if side == TRAINING and written[VALIDATION] else None
            content = dataset_content(shards, policy, other)
            replace_text(root / side, [json.dumps(content, indent=1) + "\n"])
    everything = [shard for shards in written.values() for shard in shards]
    samples = {side: sum(shard.samples for shard in shards) for side, shards in written.items()}
    return Outcome(samples, len(everything), sum(shard.bytes for shard in everything))


def _claim(root: Path, contents: dict[str, Any]) -> None:
    """Note what the folder will contain; UserError if it is complete and has other contents."""
    noted = root / HIDDEN / "dataset.json"
    if (root / TRAINING).exists() and noted.exists() and read_json(noted) != contents:
        raise UserError(
            f"--output_dir {root} has a dataset of other images or settings, and a dataset never changes: "
            "give a new folder"
        )
    replace_text(noted, [json.dumps(contents)])


def _plans(ledger: Ledger, config: ShardConfig) -> dict[str, list[Plan]]:
    """The shards of each dataset."""
    members: dict[str, list[Member]] = {TRAINING: [], VALIDATION: []}
    chosen = _validation_names(ledger, config.val_split)
    for result in ledger.accepted_by_hash():
        members[VALIDATION if result.name in chosen else TRAINING].append(_member(ledger, result, config))
    return {
        side: list(_split(STEMS[side], found, config.shard_mb * MEGABYTE)) for side, found in members.items()
    }


def _validation_names(ledger: Ledger, share: float) -> set[str]:
    """The images that the manifest assigns to validation, else those with the lowest hashes."""
    accepted = [(result.name, result.sha256 or "") for result in ledger.accepted_by_hash()]
    sides = {name: _row(ledger, name).get("split") for name, _ in accepted}
    if any(sides.values()):
        return {name for name, side in sides.items() if side == "val"}
    if not share or len(accepted) < 2:
        return set()
    if len(accepted) < SMALL_SET:
        count = min(max(1, round(len(accepted) * share)), len(accepted) - 1)
        return {name for name, _ in accepted[:count]}
    return {name for name, digest in accepted if int(digest[:16], 16) < share * 2**64}


def _row(ledger: Ledger, name: str) -> dict[str, Any]:
    """The row of the manifest; empty without one."""
    return parse_json(ledger.noted(ROW + name) or "{}")


def _member(ledger: Ledger, result: Result, config: ShardConfig) -> Member:
    assert result.sha256 is not None, "accepted files have a hash"
    kind = result.record["format"]
    others = {key: value for key, value in _row(ledger, result.name).items() if key not in OWN_COLUMNS}
    metadata = {
        "width": result.record["width"],
        "height": result.record["height"],
        "type": f"image/{kind.lower()}",
        "flags": result.record["flags"],
        "source": console.printable(result.name),
        **others,
    }
    path = os.path.join(config.input_dir, result.name)
    return Member(path, result.sha256, EXTENSIONS_OF[kind][0].lstrip("."), metadata)


def _split(stem: str, members: list[Member], most_bytes: int) -> Iterator[Plan]:
    """Shards of at most so many bytes, or of one image."""
    plan, size = Plan(f"{stem}-000000.tar", []), 0
    number = 0
    for member in members:
        added = stored_bytes(os.path.getsize(member.path), len(member.json()))
        if plan.members and size + added > most_bytes:
            yield plan
            number += 1
            plan, size = Plan(f"{stem}-{number:06}.tar", []), 0
        plan.members.append(member)
        size += added
    if plan.members:
        yield plan


def _write_all(root: Path, plans: list[Plan], config: ShardConfig) -> list[Shard]:
    """Write shards in several processes; returns them in the order of their names."""
    limits, shards = Limits(SHARD_SECONDS), {}
    write = partial(write_shard, root, root / HIDDEN)
    results = run_each(write, plans, num_workers=count_workers(config.num_workers), limits=limits)
    with Progress("write", len(plans), "shard") as bar, closing(results):
        for plan, shard in results:
            if isinstance(shard, Failure):
                raise UserError(f"--output_dir {root}: {plan.name}: {shard.reason} ({shard.detail})")
            shards[plan.name] = shard
            bar.update()
    return [shards[plan.name] for plan in plans]


def _print_summary(
    ledger: Ledger, skips: Skips, config: ShardConfig, outcome: Outcome, seconds: float
) -> None:
    counts: Counter[str] = Counter()
    for status in (ACCEPTED, REJECTED, DUPLICATE):
        counts[status] = sum(count for _, count in ledger.counts(status))
    reasons = ledger.counts(REJECTED)
    examples = {reason: ledger.examples(REJECTED, reason) for reason, _ in reasons}
    root = console.printable(config.output_dir)
    lines = [
        f"{root}: {outcome.samples[TRAINING]} images for training and {outcome.samples[VALIDATION]} for "
        f"validation in {outcome.shards} shards ({outcome.bytes / 1e6:.1f} MB, {seconds:.1f} s), "
        f"{counts[REJECTED]} rejected, {duplicates_text(counts[DUPLICATE])}",
        *rejection_lines(reasons, examples),
        *skip_lines(skips),
        f"  train: python train_vae.py --data_path {Path(config.output_dir, TRAINING)}",
    ]
    console.info("\n".join(lines))
