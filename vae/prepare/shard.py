"""`--mode shard`: check every image, and pack the good ones, unchanged, into a dataset of shards.

The images of a shard follow each other in the source; training shuffles them in windows.
"""

import json
import re
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from vae.config.prepare_flags import ShardConfig
from vae.images.formats import EXTENSIONS_OF
from vae.prepare.check import Check
from vae.prepare.folders import HIDDEN, check_apart, claim_content
from vae.prepare.pool import Failure, Limits, count_workers, run_tasks
from vae.prepare.preprocess import SETTINGS_NAME
from vae.prepare.reasons import broken_lines, count_rejected, duplicates_text, print_summary
from vae.prepare.rows import RowFolder, open_rows, rules_of
from vae.prepare.selection import (
    KEY_DIGITS,
    SUBSETS,
    TRAIN,
    TRAINING,
    VAL,
    VALIDATION,
    apply_rules,
    check_where,
    choose_validation,
    drop_exact,
    refuse_divided_look_alikes,
)
from vae.prepare.shard_writer import Member, Plan, note_path, write_shard
from vae.prepare.source import Source, open_source
from vae.prepare.table import Table
from vae.progress import Progress
from vae.shards.dataset_json import write_dataset
from vae.shards.index import Shard
from vae.system import console
from vae.system.errors import EXIT_DATA, DataError, UserError
from vae.system.files import parse_json, read_json, remove_temporary

MEGABYTE = 10**6
BYTES_PER_PROCESS = 256 * MEGABYTE  # that a process must write to be worth its start
SHARD_SECONDS = 7200.0  # to write one shard, on a slow disk too
CONTENT = "SELECT sha256, subset, name, md5(metadata) FROM images WHERE reason = '' ORDER BY n"
STEMS = {TRAINING: "images", VALIDATION: "validation"}  # of the names of their shards
POLICY = ("min_size", "max_aspect", "max_pixels", "background", "first_frame", "val_split", "near_duplicates")
CHOICES = ("where", "join", "exclude")  # in the policy if they are given
_SHARD_NAME = re.compile(r"(images|validation)-\d{6,}\.tar")


def run_shard(config: ShardConfig) -> int:
    """Pack the images of a source, and print a summary; returns the exit code.

    DataError if there are none, and UserError for unusable folders or flags.
    """
    check_where(config)
    began = time.monotonic()
    check_apart(config.input_dir, config.output_dir)
    source = open_source(config)
    list(source.manifest())  # a damaged manifest is an error now, not after hours
    with open_rows(config, "shard", rules_of(config, source)) as (root, folder):
        folder.run(source, Check(config))
        if config.part and not all(map(folder.has, source.blocks)):
            console.info(folder.part_text(source))
            return 0
        table = Table(folder, source.blocks)
        if broken := broken_lines(table):
            raise DataError(
                f"--input_dir {config.input_dir}: {broken[0].strip()}: copy it again, or leave it out"
            )
        _select(table, source, config)
        images = {name: table.count("reason = '' AND subset = ?", subset) for name, subset in SUBSETS.items()}
        written: dict[str, list[Shard]] = {}
        if not config.part:
            remove_temporary(root)  # of killed processes
        if images[TRAINING]:
            claim_content(root, TRAINING, table.digest(config.shard_mb, CONTENT))
            written = _pack(root, table, config, folder, sum(images.values()))
        if config.part:
            console.info(f"{folder.part_text(source)}\n  its part of the shards is written")
            return 0
        if written:
            _write_datasets(root, written, config, source)
        shards = [shard for some in written.values() for shard in some]
        print_summary(
            table,
            source,
            f"{console.printable(config.output_dir)}: {images[TRAINING]} images for training and "
            f"{images[VALIDATION]} for validation in {len(shards)} shards "
            f"({sum(shard.bytes for shard in shards) / 1e6:.1f} MB, {time.monotonic() - began:.1f} s), "
            f"{count_rejected(table)} rejected, {duplicates_text(table)}",
            f"  train: {console.command_line('python', 'train_vae.py', '--data_path', root / TRAINING)}"
            if written
            else "  no image is left for training: fix the problems listed above",
        )
        return 0 if written else EXIT_DATA


def _select(table: Table, source: Source, config: ShardConfig) -> None:
    """Leave out duplicates and what the rules refuse, and set the subset of each image."""
    table.load_manifest(source)
    table.run(
        "UPDATE images SET metadata = json_merge_patch(coalesce(metadata, '{}'::JSON), m.more) FROM manifest "
        "m WHERE m.path = images.name AND m.more IS NOT NULL"
    )
    drop_exact(table)
    apply_rules(table, config)
    if table.one("SELECT 1 FROM manifest WHERE split IS NOT NULL LIMIT 1"):
        table.run(
            "UPDATE images SET subset = CASE WHEN name IN (SELECT path FROM manifest WHERE split = 'val') "
            "THEN ? ELSE ? END WHERE reason = ''",
            VAL,
            TRAIN,
        )
        if config.near_duplicates:
            refuse_divided_look_alikes(table)
    else:
        choose_validation(table, config.val_split, near=config.near_duplicates)


def _pack(
    root: Path, table: Table, config: ShardConfig, folder: RowFolder, images: int
) -> dict[str, list[Shard]]:
    """Write the shards, or those of a part, in several processes; in the order of their names."""
    part = folder.part
    plans = (plan for name in SUBSETS for plan in _plans(table, name, config.shard_mb * MEGABYTE))
    mine = (plan for at, plan in enumerate(plans) if at % part.total == part.number)
    written: dict[str, list[Shard]] = {name: [] for name in SUBSETS}
    total_bytes = table.all("SELECT sum(bytes) FROM images WHERE reason = ''")[0][0]
    workers = max(1, min(count_workers(config.num_workers), int(total_bytes) // BYTES_PER_PROCESS))
    results = run_tasks(partial(write_shard, root), mine, workers, Limits(SHARD_SECONDS))
    with Progress("write", images if part.total == 1 else None, "image") as bar, closing(results):
        for plan, shard in results:
            if isinstance(shard, Failure):
                raise UserError(f"--output_dir {root}: {plan.name}: {shard.reason} ({shard.detail})")
            written[plan.dataset].append(shard)
            bar.update(shard.samples)
    return {name: sorted(shards) for name, shards in written.items()}


def _plans(table: Table, dataset: str, max_bytes: float) -> Iterator[Plan]:
    """Shards of at most so many bytes, or of one image."""
    batch: list[Member] = []
    size = number = 0

    def plan() -> Plan:
        blocks = {member.block: table.blocks[member.block] for member in batch}
        return Plan(dataset, f"{STEMS[dataset]}-{number:06}.tar", batch, blocks)

    for member in _members(table, SUBSETS[dataset]):
        if batch and size + member.stored_bytes > max_bytes:
            yield plan()
            number, batch, size = number + 1, [], 0
        batch.append(member)
        size += member.stored_bytes
    if batch:
        yield plan()


def _members(table: Table, subset: str) -> Iterator[Member]:
    query = (
        "SELECT block, number, coalesce(position, 0), sha256, format, bytes, width, height, phash, flags, "
        "name, metadata FROM images WHERE reason = '' AND subset = ? ORDER BY n"
    )
    for row in table.stream(query, subset):
        block, number, position, sha256, kind, size, width, height, phash, flags, name, metadata = row
        content = {
            "key": sha256[:KEY_DIGITS],
            "width": width,
            "height": height,
            "type": f"image/{kind.lower()}",
            "flags": flags,
            "source": console.printable(name),
        }
        if metadata:
            theirs = parse_json(metadata)
            content = {**theirs, **content, **({"of_source": theirs["key"]} if "key" in theirs else {})}
        extension = EXTENSIONS_OF[kind][0].lstrip(".")
        text = json.dumps(content)
        yield Member(block, number, position, sha256, extension, size, (width, height), phash, text)


def _write_datasets(root: Path, written: dict[str, list[Shard]], config: ShardConfig, source: Source) -> None:
    """Write the files of the datasets, and remove the shards of an earlier, unfinished plan."""
    policy = {name: getattr(config, name) for name in POLICY}
    policy |= {name: getattr(config, name) for name in CHOICES if getattr(config, name)}
    transforms = _transforms(source)
    for name in SUBSETS:
        if written[name]:
            other = VALIDATION if name == TRAINING and written[VALIDATION] else None
            write_dataset(root / name, written[name], policy, other, transforms=transforms)
    kept = {shard.name for shards in written.values() for shard in shards}
    for note in (root / HIDDEN / "shards").glob("*.tar.json"):
        name = note.name.removesuffix(".json")
        if name not in kept and _SHARD_NAME.fullmatch(name):
            for suffix in (".tar", ".npy"):
                path = root / name.replace(".tar", suffix)
                with suppress(FileNotFoundError):
                    path.unlink()
            note_path(root, name).unlink()


def _transforms(source: Source) -> dict[str, Any]:
    """The settings with which --mode preprocess made the images; empty for other images."""
    if source.folder is None:
        return {}
    try:
        settings = read_json(Path(source.folder) / SETTINGS_NAME)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(
            f"--input_dir {source.folder}: {SETTINGS_NAME} is damaged ({error}): delete it"
        ) from None
    return settings if isinstance(settings, dict) else {}
