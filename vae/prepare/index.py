"""`--mode index`: tar files that others wrote become a dataset of shards, where they are.

Each tar file is a block. With a dataset.json of this mode as --input, its rows are selected from again.
"""

import time
from itertools import groupby
from pathlib import Path

import numpy as np

from vae.config.prepare_flags import IndexConfig
from vae.data.exclude_list import KEY_DIGITS
from vae.prepare.blocks import Block, common_folder, find_files
from vae.prepare.check import HeaderCheck
from vae.prepare.database import sql
from vae.prepare.output_folders import HIDDEN, claim_content
from vae.prepare.rejection_reasons import print_summary
from vae.prepare.rows import open_rows
from vae.prepare.shard import INDEXES, save_index, write_datasets
from vae.prepare.source import Source
from vae.prepare.table import (
    SUBSETS,
    TRAINING,
    VALIDATION,
    Table,
    apply_rules,
    check_where,
    choose_validation,
    drop_exact,
)
from vae.prepare.tar_source import tar_blocks
from vae.shards.dataset_json import Shard, index_path, index_type, read_dataset
from vae.system import console
from vae.system.console import counted, printable
from vae.system.errors import EXIT_DATA, DataError, UserError
from vae.system.files import read_json, remove_temporary, replace_text, write_json

FLAG = "--input"
ROW_RULES = ("first_frame", "image_key")  # flags that decide the rows
RULES = (*ROW_RULES, "min_size", "max_aspect", "max_pixels")
CHOICES = ("where", "join", "exclude", "val_split")
CONTENT = (  # what decides the content of the datasets, besides the rules
    "SELECT block, position, sha256, subset FROM images WHERE reason = '' ORDER BY n",
    "SELECT block, metadata FROM blocks ORDER BY block",
)
REJECTED_NAME = "rejected.jsonl"
REJECTED = ("rejected_tars", "rejected_members")
MAX_BLOCKS_BYTES = 2**30


def run_index(config: IndexConfig) -> int:
    """Index the tar files and print a summary; returns the exit code.

    DataError if there are none, and UserError for unusable rules or folders.
    """
    check_where(config)
    began = time.monotonic()
    if config.input.lower().endswith(".json"):
        return _select_again(config, began)
    files = find_files(config.input, FLAG, (".tar",))
    base, _ = common_folder(files, FLAG)
    needs_metadata = bool(config.where or config.join)
    blocks: list[Block] = list(tar_blocks(files, FLAG, config.image_key, keeps_metadata=needs_metadata))
    settings = {name: getattr(config, name) for name in ROW_RULES}
    settings |= {"tars": base, "metadata": needs_metadata}
    with open_rows(config, "index", settings) as (root, folder):
        source = Source(base, blocks, "tar")
        folder.run(source, HeaderCheck(config), "index")
        if config.part:
            console.info(folder.part_text(source))
            return 0
        write_json(root / HIDDEN / "blocks.json", [[block.name, block.id] for block in blocks])
        return _publish(config, Table(folder, source), root, base, began)


def _select_again(config: IndexConfig, began: float) -> int:
    """Write another dataset of the same tar files, by the rows of a dataset: no tar file is read."""
    dataset = read_dataset(config.input, flag=FLAG)
    if dataset.tars is None or not isinstance(dataset.path, Path):
        raise UserError(
            f"{FLAG} {config.input} must be a dataset of --mode index whose folder is on this machine: give "
            "its tar files"
        )
    for name in (*ROW_RULES, "part"):
        if getattr(config, name):
            raise UserError(
                f"--{name} does not fit {FLAG} {config.input}, whose tar files are not read: leave it out"
            )
    theirs = dataset.path.parent / HIDDEN
    with open_rows(config, "index", {"rows": str(theirs)}) as (root, folder):
        folder.rows = theirs / "rows"
        try:
            listed = read_json(theirs / "blocks.json", max_bytes=MAX_BLOCKS_BYTES)
            blocks = [Block(id=block_id, file=Path(name), name=name) for name, block_id in listed]
        except (OSError, ValueError, TypeError):
            blocks = []
        if not blocks or not all(path.is_file() for path in folder.files(blocks)):
            raise DataError(f"{FLAG} {config.input} has no rows in {theirs}: give its tar files")
        return _publish(config, Table(folder, Source("", blocks, "tar")), root, dataset.tars, began)


def _publish(config: IndexConfig, table: Table, root: Path, base: str, began: float) -> int:
    """Select, and write what was left out, the indexes and the datasets, unless tar files are broken."""
    table.run(sql("size_rules"), config.min_size, config.max_pixels, config.max_aspect)
    drop_exact(table)
    apply_rules(table, config)
    choose_validation(table, config.val_split, near=False)
    for path in (root, *(root / name for name in INDEXES.values())):
        remove_temporary(path)  # killed processes leave them
    rejected = (f"{row}\n" for name in REJECTED for row in table.json_rows(sql(name)))
    replace_text(root / REJECTED_NAME, rejected)
    images = {name: table.count("reason = '' AND subset = ?", subset) for name, subset in SUBSETS.items()}
    is_complete = config.skip_broken_tars or not table.broken_blocks()
    written = bool(images[TRAINING]) and is_complete
    if written:
        policy = {name: getattr(config, name) for name in (*RULES, *CHOICES)}
        digest = table.digest(policy, *CONTENT)
        claim_content(root, TRAINING, digest)
        write_datasets(root, _write_indexes(table, root), policy, base)
    _print_summary(config, table, root, images, written, began)
    return 0 if written else EXIT_DATA


def _write_indexes(table: Table, root: Path) -> dict[str, list[Shard]]:
    """Write the index of each tar file for each subset that has images in it."""
    query = "SELECT block, metadata ->> 'bytes', metadata ->> 'sha256' FROM blocks WHERE reason IS NULL"
    facts = {block: (int(size), sha256) for block, size, sha256 in table.all(query)}
    shards: dict[str, list[Shard]] = {name: [] for name in SUBSETS}
    for name, subset in SUBSETS.items():
        stream = table.stream(sql("index_rows"), KEY_DIGITS, subset)
        for block, group in groupby(stream, key=lambda row: row[0]):
            if block not in facts:  # it could not be read to its end
                continue
            images = [row[1:] for row in group]
            rows = np.array(images, index_type(max(len(image[-1]) for image in images)))
            tar = table.blocks[block].name
            digest = save_index(index_path(root / INDEXES[name], tar), rows)
            shards[name].append(Shard(tar, len(rows), *facts[block], digest))
    return shards


def _print_summary(
    config: IndexConfig, table: Table, root: Path, images: dict[str, int], written: bool, began: float
) -> None:
    broken = table.broken_blocks()
    num_read = len(table.blocks) - len(broken)
    last = []
    if (root / REJECTED_NAME).stat().st_size:
        last.append(f"  all of them: {printable(str(root / REJECTED_NAME))}")
    if written:
        command = console.command_line("python", "train_vae.py", "--data_path", root / TRAINING)
        last.append(f"  train: {command}")
    elif broken and not config.skip_broken_tars:
        last.append(
            f"  {len(broken)} of {len(table.blocks)} tar files are broken: copy them again and repeat the "
            "command, which continues, or add --skip_broken_tars"
        )
    else:
        last.append("  no image is left: change the rules")
    print_summary(
        table,
        f"{printable(str(root))}: {images[TRAINING]} images for training and {images[VALIDATION]} for "
        f"validation, {counted(num_read, 'tar file')}",
        began,
        *last,
    )
