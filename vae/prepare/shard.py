"""`--mode shard`: check every image, and pack the good ones, unchanged, into a dataset of shards.

The images of a shard follow each other in the source; training shuffles them in windows.
"""

import hashlib
import json
import shutil
import tarfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from vae.config.prepare_flags import ShardConfig
from vae.data.exclude_list import KEY_DIGITS
from vae.images.formats import EXTENSIONS_OF, BadImageError
from vae.prepare.blocks import Block
from vae.prepare.check import Check
from vae.prepare.database import sql
from vae.prepare.output_folders import HIDDEN, check_apart, claim_content
from vae.prepare.pool import Failure, Limits, count_workers, run_tasks
from vae.prepare.rejection_reasons import broken_lines, print_summary
from vae.prepare.rows import RowFolder, open_rows, rules_of
from vae.prepare.source import open_source
from vae.prepare.table import (
    SUBSETS,
    TRAINING,
    VALIDATION,
    Table,
    apply_rules,
    check_where,
    choose_validation,
    drop_exact,
    refuse_divided_look_alikes,
)
from vae.progress import Progress
from vae.shards.dataset_json import Shard, index_path, index_type, write_dataset
from vae.system import console
from vae.system.errors import EXIT_DATA, DataError, UserError
from vae.system.files import atomic_path, read_json, remove_temporary, sha256_of_file, write_json

BLOCK_BYTES = tarfile.BLOCKSIZE  # members begin at multiples of it


class Member(NamedTuple):
    """An image of a shard, where it is in the source, and what its JSON file says about it."""

    block: int
    number: int  # its number in the block
    position: int  # its offset, if the block is a tar file
    sha256: str
    extension: str
    bytes: int
    size: tuple[int, int]  # width, height
    json: str  # ASCII

    @property
    def key(self) -> str:
        """Name of its two files within the tar file."""
        return self.sha256[:KEY_DIGITS]

    @property
    def stored_bytes(self) -> int:
        """Count its bytes in the tar file: two headers, and whole blocks."""
        return sum(
            BLOCK_BYTES + -(-size // BLOCK_BYTES) * BLOCK_BYTES for size in (self.bytes, len(self.json))
        )


@dataclass
class Plan:
    """A shard that is to be written."""

    dataset: str  # the name of the file that will list it
    name: str  # name of the tar file
    members: list[Member]
    blocks: dict[int, Block]  # the blocks of its members

    def digest(self) -> str:
        """A hash of the content that the shard will have."""
        parts = [f"{member.sha256} {member.extension} {member.json}" for member in self.members]
        return hashlib.sha256("\n".join([self.name, *parts]).encode()).hexdigest()


def write_shard(root: Path, plan: Plan) -> Shard:
    """Write a shard in `root`, unless its note says that it is complete; the same plan gives the same bytes.

    DataError if an image has changed since it was checked, and OSError if writing fails.
    """
    digest = plan.digest()
    if done := _read_note(root, plan.name, digest):
        return done
    with atomic_path(root / plan.name) as temporary:
        rows = _write_tar(temporary, plan)
        size, sha256 = temporary.stat().st_size, sha256_of_file(temporary)
    shard = Shard(plan.name, len(rows), size, sha256, save_index(index_path(root, plan.name), rows))
    write_json(note_path(root, shard.name), {"plan": digest, "shard": shard._asdict()})
    return shard


def save_index(path: Path, rows: np.ndarray) -> str:
    """Write the index of a shard; returns its SHA-256."""
    with atomic_path(path) as temporary, open(temporary, "xb") as file:
        np.save(file, rows, allow_pickle=False)
    return sha256_of_file(path)


def note_path(root: Path, name: str) -> Path:
    """The note that a shard is complete."""
    return root / HIDDEN / "shards" / f"{name}.json"


def _read_note(root: Path, name: str, digest: str) -> Shard | None:
    """The shard, if it is complete, has this content and the size that was written."""
    try:
        content = read_json(note_path(root, name))
        shard = Shard(**content["shard"])
        is_same = content["plan"] == digest and shard.name == name
        is_complete = (root / name).stat().st_size == shard.bytes
        is_complete = is_complete and sha256_of_file(index_path(root, name)) == shard.index_sha256
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return shard if is_complete and is_same else None


def _write_tar(path: Path, plan: Plan) -> np.ndarray:
    """Write a tar file without traces of this machine; returns its index, index_type (N,)."""
    rows = np.zeros(len(plan.members), index_type(KEY_DIGITS))
    with open(path, "xb") as file:
        for at, (member, data) in enumerate(_read_members(plan)):
            start = file.tell()
            _add_file(file, f"{member.key}.{member.extension}", data)
            text_start = file.tell()
            _add_file(file, f"{member.key}.json", member.json.encode())
            key = member.key.encode()
            place = (start + BLOCK_BYTES, len(data), zlib.crc32(data))
            rows[at] = (key, *place, *member.size, text_start, file.tell(), key)
        file.write(bytes(2 * BLOCK_BYTES))  # the end mark
        file.write(bytes(-file.tell() % tarfile.RECORDSIZE))
    return rows


def _add_file(file: BinaryIO, name: str, data: bytes) -> None:
    """Append a file as `TarFile.addfile` does, which takes four times as long for data in memory."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    file.write(info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % BLOCK_BYTES))


def _read_members(plan: Plan) -> Iterator[tuple[Member, bytes]]:
    """The members in their order with their bytes; DataError if one has changed."""
    of_block: dict[int, dict[int, Member]] = {}
    for member in plan.members:  # they are in the order of their blocks
        of_block.setdefault(member.block, {})[member.number] = member
    for number, members in of_block.items():
        places = {at: (member.position, member.bytes) for at, member in members.items()}
        num_read = 0
        try:
            for at, data in plan.blocks[number].chosen(places):
                if hashlib.sha256(data).hexdigest() != members[at].sha256:
                    raise BadImageError("changed", "its bytes are other ones")
                num_read += 1
                yield members[at], data
        except BadImageError as error:
            raise _changed(members, error.detail) from None
        if num_read < len(members):
            raise _changed(members, "an image is missing")


def _changed(members: dict[int, Member], detail: str) -> DataError:
    names = next(iter(members.values())).json
    return DataError(
        f"--input_dir has changed since it was checked ({detail}, at or after {names[:200]}): give a new "
        "folder"
    )


MEGABYTE = 10**6
BYTES_PER_PROCESS = 256 * MEGABYTE  # a process that writes less is not worth its start
SHARD_SECONDS = 7200.0  # limit to write one shard, also on a slow disk
CONTENT = "SELECT sha256, subset, name, md5(metadata) FROM images WHERE reason = '' ORDER BY n"
STEMS = {TRAINING: "images", VALIDATION: "validation"}  # shard names begin with them
INDEXES = {TRAINING: "training", VALIDATION: "validation"}  # folders with the indexes of tar files elsewhere
POLICY = ("min_size", "max_aspect", "max_pixels", "background", "first_frame", "val_split", "near_duplicates")
CHOICES = ("where", "join", "exclude")  # flags that the policy has if they are given


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
        fetched = root / HIDDEN / "fetched"  # a file of a store is read twice: to check, and to pack
        source.blocks = [replace(block, fetched=fetched) for block in source.blocks]
        folder.run(source, Check(config))
        if config.part and not all(map(folder.has, source.blocks)):
            console.info(folder.part_text(source))
            return 0
        table = Table(folder, source)
        if broken := broken_lines(table):
            raise DataError(
                f"--input_dir {config.input_dir}: {broken[0].strip()}: copy it again, or leave it out"
            )
        _select(table, config)
        images = {name: table.count("reason = '' AND subset = ?", subset) for name, subset in SUBSETS.items()}
        written: dict[str, list[Shard]] = {}
        if not config.part:
            remove_temporary(root)  # killed processes leave them
        if images[TRAINING]:
            claim_content(root, TRAINING, table.digest(config.shard_mb, CONTENT))
            written = _pack(root, table, config, folder, sum(images.values()))
        if config.part:
            console.info(f"{folder.part_text(source)}\n  its part of the shards is written")
            return 0
        if written:
            policy = {name: getattr(config, name) for name in POLICY}
            policy |= {name: getattr(config, name) for name in CHOICES if getattr(config, name)}
            write_datasets(root, written, policy)
        shutil.rmtree(fetched, ignore_errors=True)
        shards = [shard for some in written.values() for shard in some]
        print_summary(
            table,
            f"{console.printable(config.output_dir)}: {images[TRAINING]} images for training and "
            f"{images[VALIDATION]} for validation in {len(shards)} shards "
            f"({sum(shard.bytes for shard in shards) / 1e6:.1f} MB)",
            began,
            f"  train: {console.command_line('python', 'train_vae.py', '--data_path', root / TRAINING)}"
            if written
            else "  no image is left for training: fix the problems listed above",
        )
        return 0 if written else EXIT_DATA


def _select(table: Table, config: ShardConfig) -> None:
    """Leave out duplicates and what the rules refuse, and set the subset of each image."""
    table.load_manifest()
    table.run(sql("manifest_metadata"))
    drop_exact(table)
    apply_rules(table, config)
    if table.all("FROM manifest WHERE split IS NOT NULL LIMIT 1"):
        table.run(sql("manifest_split"))
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
    for row in table.stream(sql("shard_members"), subset):
        block, number, position, sha256, kind, size, width, height, flags, name, metadata = row
        content = {
            "key": sha256[:KEY_DIGITS],
            "width": width,
            "height": height,
            "type": f"image/{kind.lower()}",
            "flags": flags,
            "source": console.printable(name),
        }
        if metadata:
            theirs = json.loads(metadata, parse_constant=lambda _: None)  # NaN is no JSON for other readers
            content = {**theirs, **content, **({"of_source": theirs["key"]} if "key" in theirs else {})}
        extension = EXTENSIONS_OF[kind][0].lstrip(".")
        text = json.dumps(content)
        yield Member(block, number, position, sha256, extension, size, (width, height), text)


def write_datasets(
    root: Path, shards: Mapping[str, Sequence[Shard]], policy: Mapping[str, Any], tars: str | None = None
) -> None:
    """Write the files of the datasets, the training set last: it names the other.

    `tars` is the folder of the tar files, if they are not in `root`.
    """
    validation = None
    for name in SUBSETS:
        if shards[name]:
            more = {"tars": tars, "indexes": INDEXES[name]} if tars else None
            write_dataset(root / name, shards[name], policy, validation, more=more)
            validation = name
