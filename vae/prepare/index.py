"""`--mode index`: tar files that others wrote become a dataset of shards, where they are.

Each tar file is a block. With a dataset.json of this mode as --input, its rows are selected from again.
"""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vae.config.prepare_flags import IndexConfig
from vae.images.formats import EXTENSIONS_OF, BadImageError
from vae.prepare.blocks import Block, Source
from vae.prepare.check import HeaderCheck
from vae.prepare.folders import output_folder, refuse_links
from vae.prepare.inputs import common_folder, find_files
from vae.prepare.pool import Limits
from vae.prepare.reasons import remedy
from vae.prepare.rows import HIDDEN, RowFolder, parse_part
from vae.prepare.selection import KEY_DIGITS, apply_rules, check_where, drop_exact
from vae.prepare.table import Table
from vae.prepare.tar_source import TarBlock, tar_blocks
from vae.prepare.validate import part_line
from vae.shards.dataset_json import ShardedDataset, dataset_content, read_dataset, write_dataset
from vae.shards.index import Shard, foreign_index, index_path, read_index
from vae.shards.shard_list import is_tar_name
from vae.system import console
from vae.system.console import printable
from vae.system.errors import EXIT_DATA, DataError, UserError
from vae.system.files import (
    atomic_path,
    parse_json,
    read_json,
    remove_temporary,
    replace_text,
    sha256_of_file,
    write_json,
)

FLAG = "--input"
TRAINING, VALIDATION = "dataset.json", "validation.json"
FOLDERS = {VALIDATION: "validation", TRAINING: "training"}  # of the indexes; the training set is written last
RULES = (
    "min_size",
    "max_aspect",
    "max_pixels",
    "first_frame",
    "formats",
    "image_key",
)  # that decide the rows
CHOICES = ("where", "join", "exclude", "val_split")
COUNTED = (
    "too_small",
    "aspect",
    "too_many_pixels",
    "format",
    "where",
    "excluded",
    "exact_duplicate",
)  # not listed
MEMORY_GIB = 6.0  # for one tar file: the largest image file has 2 GiB
HEADER_SECONDS = 300.0  # for one sample
REJECTED_NAME = "rejected.jsonl"
MAX_LINES = 20  # of broken tar files that are printed


def run_index(config: IndexConfig) -> int:
    """Index the tar files and print a summary; returns the exit code.

    DataError if there are none, and UserError for unusable rules or folders.
    """
    known = [name.lower() for name in EXTENSIONS_OF]
    for name in config.formats or ():
        if name not in known:
            raise UserError(f"--formats {name} is no format: give some of {' '.join(known)}")
    check_where(config)
    began = time.monotonic()
    if config.input.lower().endswith(".json"):
        return _filter(config, began)
    files = find_files(config.input, FLAG, (".tar",))
    base, names = common_folder(files, FLAG)
    strange = next((name for name in names if not is_tar_name(name)), None)
    if strange is not None:
        raise DataError(
            f"{FLAG} {strange}: the name of a tar file must end in .tar and have only letters, digits and "
            "._=+@,- below the folder that all have in common: rename it"
        )
    needs_metadata = bool(config.where or config.join or config.exclude)
    blocks = list(tar_blocks(files, FLAG, config.image_key, keeps_metadata=needs_metadata))
    rules = {name: getattr(config, name) for name in RULES}
    with output_folder(config.output_dir, "index") as root:
        owner, settings = (
            f"--output_dir {config.output_dir}",
            {"tars": base, **rules, "metadata": needs_metadata},
        )
        with RowFolder(root / HIDDEN, owner, settings, parse_part(config.part)).claimed() as folder:
            source, check = Source(base, list[Block](blocks), "tar"), HeaderCheck(config, config.formats)
            for block in folder.mine(
                blocks
            ):  # a broken tar file is read again: it may have been copied again
                if folder.has(block) and _is_broken(folder.path(block)):
                    folder.remove(block)
            limits = Limits(None, MEMORY_GIB)
            folder.run(source, check, config.num_workers, limits, seconds=HEADER_SECONDS, title="index")
            if config.part:
                console.info(part_line(config.part, source, folder))
                return 0
            table = Table(folder, blocks, folder.scratch)
            drop_exact(table)
            apply_rules(table, config)
            _choose_validation(table, config.val_split)
            policy = {**rules, **_choices(config), "near_duplicates": False}
            return _publish(config, table, root, base, policy, began)


def _choices(config: IndexConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in CHOICES}


def _choose_validation(table: Table, share: float) -> None:
    """A share by the hash of the bytes: equal files are in one subset everywhere."""
    table.run(
        "UPDATE images SET subset = CASE WHEN ('0x' || sha256[1:8])::UBIGINT < ? THEN 'validation' "
        "ELSE 'training' END WHERE reason = ''",
        int(share * 16**8),
    )


def _is_broken(path: Path) -> bool:
    """Whether the rows say that their tar file cannot be read."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        last = file.read().rstrip(b"\n").rpartition(b"\n")[2]
    return b'"reason"' in last


def _publish(
    config: IndexConfig, table: Table, root: Path, base: str, policy: dict[str, Any], began: float
) -> int:
    """Write what was left out, the indexes and the datasets, unless tar files are broken."""
    for path in (root, *(root / name for name in FOLDERS.values())):
        remove_temporary(path)  # of killed processes
    refuse_links(root, REJECTED_NAME)
    replace_text(root / REJECTED_NAME, _rejected_lines(table))
    broken = table.broken_blocks()
    images = {name: _count(table, folder) for name, folder in FOLDERS.items()}
    written = bool(images[TRAINING]) and (not broken or config.skip_broken_tars)
    if written:
        _refuse_change(root, table, policy)
        _write_datasets(table, root, base, policy)
    _print_summary(config, table, root, images, broken, written, time.monotonic() - began)
    return 0 if written else EXIT_DATA


def _count(table: Table, subset: str) -> int:
    row = table.one("SELECT count(*) FROM images WHERE reason = '' AND subset = ?", subset)
    assert row is not None
    return int(row[0])


def _refuse_change(root: Path, table: Table, policy: dict[str, Any]) -> None:
    """UserError if the folder has a dataset of other images: a dataset never changes."""
    digest = hashlib.sha256(json.dumps(policy, sort_keys=True).encode())
    for row in table.stream(
        "SELECT block, position, sha256, subset FROM images WHERE reason = '' ORDER BY n"
    ):
        digest.update(repr(row).encode())
    for row in table.all("SELECT block, metadata FROM blocks ORDER BY block"):
        digest.update(repr(row).encode())
    noted, content = root / HIDDEN / "dataset.json", {"content": digest.hexdigest()}
    try:
        before = read_json(noted)
    except (OSError, ValueError):
        before = None
    if (root / TRAINING).exists() and before != content:
        raise UserError(
            f"--output_dir {root} has a dataset of other tar files or rules, and a dataset never changes: "
            "give a new folder"
        )
    write_json(noted, content)


def _write_datasets(table: Table, root: Path, base: str, policy: dict[str, Any]) -> None:
    """Write the index of each tar file for each subset, and the files of the datasets."""
    names = [_tar_name(block) for block in table.blocks]
    facts = {block: _facts(metadata) for block, metadata in table.all("SELECT block, metadata FROM blocks")}
    shards: dict[str, list[Shard]] = {name: [] for name in FOLDERS}
    for number, tar in enumerate(names):
        if facts.get(number) is None:
            continue
        for name, folder in FOLDERS.items():
            rows = table.columns(
                f"SELECT sha256[1:{KEY_DIGITS}] AS key, position, bytes, crc32, width, height, text_start, "
                "text_end, name FROM images WHERE block = ? AND reason = '' AND subset = ? ORDER BY n",
                number,
                folder,
            )
            if len(rows["key"]):
                shards[name].append(_write_index(root, folder, Shard(tar, 0, *facts[number]), rows))
    for name, folder in FOLDERS.items():
        if shards[name]:
            other = VALIDATION if name == TRAINING and shards[VALIDATION] else None
            more = {"tars": base, "indexes": folder}
            write_dataset(root / name, dataset_content(shards[name], policy, other, more=more))
    write_json(root / HIDDEN / "blocks.json", [[n, b.id] for n, b in zip(names, table.blocks, strict=True)])


def _facts(metadata: str | None) -> Any:
    """Size and SHA-256 of a tar file that was read to its end."""
    content = parse_json(metadata) if metadata else {}
    size, sha256 = content.get("bytes"), content.get("sha256")
    if isinstance(size, int) and isinstance(sha256, str) and re.fullmatch("[0-9a-f]{64}", sha256):
        return size, sha256
    return None


def _tar_name(block: Block) -> str:
    assert isinstance(block, TarBlock | _KnownBlock)
    return block.name


def _write_index(root: Path, folder: str, tar: Shard, columns: dict[str, np.ndarray]) -> Shard:
    """Write the index of the images of a tar file that are in a subset."""
    path = index_path(Path(folder), tar)
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    refuse_links(root, str(path))
    members = [name.encode("utf-8") for name in columns["name"]]
    rows = np.zeros(len(members), foreign_index(max(map(len, members))))
    rows["key"], rows["name"] = [key.encode() for key in columns["key"]], members
    for name, column in (("offset", "position"), ("size", "bytes")):
        rows[name] = columns[column]
    for name in ("crc32", "width", "height", "text_start", "text_end"):
        rows[name] = columns[name]
    with atomic_path(root / path) as temporary, temporary.open("wb") as opened:
        np.save(opened, rows, allow_pickle=False)
    return Shard(tar.name, len(rows), tar.bytes, tar.sha256, sha256_of_file(root / path))


@dataclass(frozen=True)
class _KnownBlock(Block):
    """A tar file whose rows are known."""

    name: str = ""

    @property
    def id(self) -> str:
        """The name of its file of rows."""
        return str(self.listing)


def _filter(config: IndexConfig, began: float) -> int:
    """Write a dataset with some of the images of another one, by its rows: no tar file is read."""
    dataset = read_dataset(config.input, flag=FLAG)
    if dataset.tars is None or not isinstance(dataset.path, Path):
        raise UserError(
            f"{FLAG} {config.input} must be a dataset of --mode index whose folder is on this machine: give "
            "its "
            "tar files"
        )
    unset = IndexConfig(input="", output_dir="")
    for name in ("formats", "image_key", "first_frame", "skip_broken_tars", "part", "val_split"):
        if getattr(config, name) != getattr(unset, name):
            raise UserError(
                f"--{name} does not fit {FLAG} {config.input}, whose tar files are not read: leave it out"
            )
    theirs = dataset.path.parent / HIDDEN
    settings, blocks = _known_blocks(theirs, config.input)
    validation = dataset.beside(dataset.validation) if dataset.validation else None
    subsets = {TRAINING: dataset, **({VALIDATION: read_dataset(validation, flag=FLAG)} if validation else {})}
    with output_folder(config.output_dir, "index") as root:
        owner = f"--output_dir {config.output_dir}"
        settings = {**settings, "of": dataset.version}
        with RowFolder(root / HIDDEN, owner, settings).claimed() as folder:
            for block in blocks:
                _link_or_copy(theirs / "rows" / f"{block.id}.jsonl", folder.path(block), config.input)
            table = Table(folder, blocks, folder.scratch)
            _keep_images_of(table, subsets, [block.name for block in blocks])
            _apply_sizes(table, config)
            apply_rules(table, config)
            return _publish(config, table, root, dataset.tars, _stricter(dataset.policy, config), began)


def _known_blocks(hidden: Path, shown: str) -> tuple[dict[str, Any], list[_KnownBlock]]:
    """The settings of a dataset and the files of its rows; DataError if it has none."""
    try:
        settings, listed = (
            read_json(hidden / "settings.json"),
            read_json(hidden / "blocks.json", max_bytes=2**30),
        )
        blocks = [_KnownBlock(block_id, name) for name, block_id in listed]
        if not isinstance(settings, dict) or not all(
            isinstance(b.listing, str) and re.fullmatch("[0-9a-f]{32}", b.listing) and is_tar_name(b.name)
            for b in blocks
        ):
            raise ValueError
    except (OSError, ValueError, TypeError):
        raise DataError(f"{FLAG} {shown} has no rows in {hidden}: give its tar files") from None
    return settings, blocks


def _link_or_copy(source: Path, target: Path, shown: str) -> None:
    if target.exists():
        return
    if not source.is_file() or source.is_symlink():
        raise DataError(f"{FLAG} {shown} lacks its rows ({source}): give its tar files")
    try:
        os.link(source, target)
    except OSError:
        with atomic_path(target) as temporary:
            shutil.copyfile(source, temporary)


def _keep_images_of(table: Table, subsets: dict[str, ShardedDataset], names: list[str]) -> None:
    """Leave out the images that the datasets do not have, and set the subsets of the others."""
    numbers = {name: number for number, name in enumerate(names)}
    table.run("CREATE TABLE kept (block BIGINT, position BIGINT, subset VARCHAR)")
    for name, dataset in subsets.items():
        for shard in dataset.shards:
            try:
                rows = read_index(index_path(dataset.index_folder, shard), shard)
            except BadImageError as error:
                raise DataError(f"{FLAG} {dataset.path} is damaged: {error.detail}") from None
            if shard.name not in numbers:
                raise DataError(f"{FLAG} {dataset.path}: {shard.name} has no rows: give the tar files")
            with table.arrays("index_rows", position=np.ascontiguousarray(rows["offset"])):
                table.run(
                    "INSERT INTO kept SELECT ?, position, ? FROM index_rows",
                    numbers[shard.name],
                    FOLDERS[name],
                )
    table.run(
        "UPDATE images SET reason = 'not_in_dataset' WHERE reason = '' AND "
        "(block, position) NOT IN (SELECT (block, position) FROM kept)"
    )
    table.run(
        "UPDATE images SET subset = k.subset FROM kept k WHERE (images.block, images.position) = (k.block, "
        "k.position)"
    )
    table.run("DELETE FROM images WHERE reason <> ''")


def _apply_sizes(table: Table, config: IndexConfig) -> None:
    for reason, rule, value in (
        ("too_small", "least(width, height) < ?", config.min_size),
        ("too_many_pixels", "width::BIGINT * height > ?", config.max_pixels),
        ("aspect", "greatest(width, height) > ? * least(width, height)", config.max_aspect or 2.0**40),
    ):
        table.run(f"UPDATE images SET reason = ?, detail = '' WHERE reason = '' AND {rule}", reason, value)


def _stricter(theirs: dict[str, Any], config: IndexConfig) -> dict[str, Any]:
    """The rules of the dataset and those of the command."""
    aspects = [aspect for aspect in (theirs.get("max_aspect"), config.max_aspect) if aspect]
    conditions = [f"({where})" for where in (theirs.get("where"), config.where) if where]
    more = {name: getattr(config, name) for name in ("join", "exclude") if getattr(config, name)}
    return {
        **theirs,
        **more,
        "min_size": max(theirs.get("min_size", 1), config.min_size),
        "max_pixels": min(theirs.get("max_pixels", config.max_pixels), config.max_pixels),
        "max_aspect": min(aspects, default=0.0),
        "where": " and ".join(conditions) or None,
    }


def _rejected_lines(table: Table) -> Iterator[str]:
    for number, reason, detail in table.broken_blocks():
        yield json.dumps({"tar": _tar_name(table.blocks[number]), "reason": reason, "detail": detail}) + "\n"
    query = (
        f"SELECT block, name, reason, detail FROM images WHERE reason NOT IN {('', *COUNTED)!r} ORDER BY n"
    )
    for number, name, reason, detail in table.stream(query):
        tar = _tar_name(table.blocks[number])
        yield json.dumps({"tar": tar, "name": name, "reason": reason, "detail": detail or ""}) + "\n"


def _print_summary(
    config: IndexConfig,
    table: Table,
    root: Path,
    images: dict[str, int],
    broken: list[tuple[int, str, str]],
    written: bool,
    seconds: float,
) -> None:
    counts, num_read = table.counts(), len(table.blocks) - len(broken)
    lines = [
        f"{printable(str(root))}: {images[TRAINING]} images for training and {images[VALIDATION]} for "
        "validation, "
        f"{num_read} tar file{'s' * (num_read != 1)} ({seconds:.1f} s), {sum(n for _, n in counts)} left out",
        *(f"  left out {count:>7}  {reason}: {remedy(reason)}" for reason, count in counts),
        *(
            f"  broken  {printable(_tar_name(table.blocks[number]))}: {printable(detail)}"
            for number, _, detail in broken[:MAX_LINES]
        ),
    ]
    if broken or any(reason not in COUNTED for reason, _ in counts):
        lines.append(f"  all of them: {printable(str(root / REJECTED_NAME))}")
    if written:
        lines.append(f"  train: python train_vae.py --data_path {root / TRAINING}")
    elif broken and not config.skip_broken_tars:
        lines.append(
            f"  {len(broken)} of {len(table.blocks)} tar files are broken: copy them again and repeat the "
            "command, "
            "which continues, or add --skip_broken_tars"
        )
    else:
        lines.append("  no image is left: change the rules")
    console.info("\n".join(lines))
