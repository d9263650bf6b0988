"""The rows of a job: one Parquet file for each block, written whole and renamed. The file is the ledger.

A killed job repeats its unfinished blocks. A block has another file if its content or the settings change, so
no old row is taken for a new one. The rows of a broken tar file have another name: the next command reads it
again, because it may have been copied again.
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from vae.config.prepare_flags import ReadingConfig
from vae.images.formats import BadImageError
from vae.prepare.blocks import Block, Item
from vae.prepare.check import AnyCheck, Row, rejected, start_row
from vae.prepare.database import connect, literal, sql
from vae.prepare.output_folders import FULL_DISK, HIDDEN, claim_settings, output_folder
from vae.prepare.pool import Failure, count_workers, run_tasks, time_limit
from vae.prepare.source import Source
from vae.prepare.tar_source import BrokenTarError, TarBlock
from vae.progress import Progress
from vae.shards.store import StoreError
from vae.system.errors import UserError
from vae.system.files import flush_file

OF_BLOCK = -1  # the number of the row about the block itself
STORE_SECONDS = 300.0  # more for an image on a store, which is asked again several times
RULES = ("image_column", "background", "min_size", "max_aspect", "max_pixels", "first_frame")
SUFFIX, BROKEN_SUFFIX = ".parquet", ".broken.parquet"


class Part(NamedTuple):
    """Part `number` of `total`, from 0 on: a slice of the list of blocks."""

    number: int = 0
    total: int = 1

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"


def parse_part(text: str | None) -> Part:
    """The part that --part names; everything without one."""
    return Part(*map(int, text.split("/"))) if text else Part()


def rules_of(config: ReadingConfig, source: Source) -> dict[str, Any]:
    """The settings that decide the rows of a job."""
    return {"input_dir": source.text, **{name: getattr(config, name) for name in RULES}}


@contextmanager
def open_rows(config: Any, verb: str, rules: dict[str, Any]) -> Iterator[tuple[Path, "RowFolder"]]:
    """The output folder of a command, and the folder of its rows in it."""
    owner = f"--output_dir {config.output_dir}"
    with output_folder(config.output_dir, verb) as root:
        rows = RowFolder(root / HIDDEN, owner, rules, parse_part(config.part))
        with rows.claimed() as folder:
            yield root, folder


class BlockRows(NamedTuple):
    """The rows of a block."""

    lines: Path  # a temporary file with the rows as JSON lines
    bad: int  # images that are not accepted
    is_broken: bool  # it could not be read to its end


@dataclass
class RowFolder:
    """A folder with the rows of a job, which one process of each part uses at a time."""

    root: Path
    owner: str  # the flag and the folder, for messages
    settings: dict[str, Any]  # all that decides the rows
    part: Part = field(default_factory=Part)

    def __post_init__(self) -> None:
        self.rows = self.root / "rows"  # the folder of the files

    @contextmanager
    def claimed(self) -> Iterator["RowFolder"]:
        """Hold the folder; UserError if it has other settings, or another process works on this part."""
        self.rows.mkdir(parents=True, exist_ok=True)
        name = f"part-{self.part.number}-of-{self.part.total}"
        lock = FileLock(self.root / f"{name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            reason = "another command is working in it: wait until it has ended"
            raise UserError(f"{self.owner}: {reason}") from None
        except (OSError, NotImplementedError):  # a file system without locks
            pass
        try:
            claim_settings(self.root / "settings.json", self.settings, self.owner)
            for leftover in self.root.glob(f"scratch-{name}-*"):  # a killed process of this part left it
                shutil.rmtree(leftover, ignore_errors=True)
            # Not with mkdtemp: on Windows, what is moved out of its folders belongs to one user alone.
            self.scratch = self.root / f"scratch-{name}-{secrets.token_hex(4)}"
            self.scratch.mkdir()
            try:
                yield self
            finally:
                shutil.rmtree(self.scratch, ignore_errors=True)
        finally:
            lock.release()

    def has(self, block: Block) -> bool:
        """Whether a block is finished."""
        return (self.rows / (block.id + SUFFIX)).is_file()

    def files(self, blocks: Sequence[Block]) -> list[Path]:
        """The file of each block."""
        return [self.rows / (block.id + (SUFFIX if self.has(block) else BROKEN_SUFFIX)) for block in blocks]

    def mine(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """The blocks of this part."""
        return blocks[self.part.number :: self.part.total]

    def run(self, source: Source, check: AnyCheck, title: str = "check") -> None:
        """Write the rows of all unfinished blocks of this part."""
        blocks = self.mine(source.blocks)
        todo = [block for block in blocks if not self.has(block)]
        total = sum(block.count or 1 for block in blocks)
        done = total - sum(block.count or 1 for block in todo)
        workers = max(1, min(count_workers(check.config.num_workers), len(todo)))
        unit = "image" if any(block.count for block in blocks) else source.unit
        bad = 0
        results = run_tasks(partial(check_block, check, self.scratch), todo, workers, check.limits)
        with Progress(title, total, unit, done=done) as bar, closing(results):
            for block, rows in _with_repeats(check, self.scratch, results):
                self.save(block, rows)
                bad += rows.bad
                bar.update(block.count or 1, note=f"{bad} bad")

    def save(self, block: Block, rows: BlockRows) -> None:
        """Write the rows of a block."""
        name = block.id + (BROKEN_SUFFIX if rows.is_broken else SUFFIX)
        temporary = self.scratch / name  # the next process of this part removes it
        _database().sql(sql("rows"), params=[literal(rows.lines)]).write_parquet(str(temporary))
        flush_file(temporary)
        os.replace(temporary, self.rows / name)
        rows.lines.unlink()

    def part_text(self, source: Source) -> str:
        """The summary of a part."""
        done = sum(map(self.has, source.blocks))
        total = len(source.blocks)
        return (
            f"part {self.part} is complete: {done} of {total} blocks are done\n"
            "  when all parts are complete: the same command without --part"
        )

    def remove(self, block: Block) -> None:
        """Work on a block again in the next run."""
        (self.rows / (block.id + SUFFIX)).unlink(missing_ok=True)


@cache
def _database() -> Any:
    return connect()


def check_block(check: AnyCheck, scratch: Path, block: Block) -> BlockRows:
    """The rows of a block. A process that takes too long for one image ends."""
    facts = dict[str, Any]()
    return _collect(scratch, block, facts, _checked(check, block, facts))


def _checked(check: AnyCheck, block: Block, facts: dict[str, Any]) -> Iterator[Row]:
    items = enumerate(block.items(facts))
    while True:
        with _image_time(check, block):
            if (numbered := next(items, None)) is None:
                return
            row = _row(check, block, *numbered)
        yield row


def _row(check: AnyCheck, block: Block, number: int, item: Item) -> Row:
    return {"number": number, **check.row(block, number, item)}


def _image_time(check: AnyCheck, block: Block) -> AbstractContextManager[None]:
    return time_limit(check.seconds + (STORE_SECONDS if block.is_remote else 0))


def _collect(scratch: Path, block: Block, facts: dict[str, Any], rows: Iterable[Row]) -> BlockRows:
    """Write the rows of the images, and the one about the block itself, with `facts`."""
    path = scratch / f"{block.id}.jsonl"
    bad = 0
    whole: Row = {"number": OF_BLOCK, "name": ""}
    path.unlink(missing_ok=True)  # a process that has ended may have left it
    with open(path, "x", encoding="utf-8", newline="") as file:
        try:
            for row in rows:
                file.write(json.dumps(row) + "\n")
                bad += "reason" in row
        except (BrokenTarError, StoreError, OSError) as error:
            if not isinstance(block, TarBlock) or getattr(error, "errno", None) in FULL_DISK:
                raise
            detail = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            whole = rejected(whole, BadImageError("broken_tar", detail))
        if facts:
            whole["metadata"] = facts
        file.write(json.dumps(whole) + "\n")
    return BlockRows(path, bad, "reason" in whole)


# ---- a block that has ended its process --------------------------------------------------------------------


def _with_repeats(
    check: AnyCheck, scratch: Path, results: Iterable[tuple[Block, BlockRows | Failure]]
) -> Iterator[tuple[Block, BlockRows]]:
    """Each block and its rows; last those that have ended their process, which are repeated."""
    died: list[Block] = []
    for block, rows in results:
        if isinstance(rows, Failure):
            died.append(block)
        else:
            yield block, rows
    for block in died:
        facts = dict[str, Any]()
        yield block, _collect(scratch, block, facts, _checked_one_by_one(check, block, facts))


def _checked_one_by_one(check: AnyCheck, block: Block, facts: dict[str, Any]) -> Iterator[Row]:
    """The rows, each from a task of its own; this process reads the block."""
    tasks = enumerate(block.items(facts))
    workers = count_workers(check.config.num_workers)
    with closing(run_tasks(partial(_check_alone, check, block), tasks, workers, check.limits)) as results:
        for (number, item), row in results:
            if isinstance(row, Failure):
                row = {"number": number, **rejected(start_row(item), BadImageError(*row))}
            yield row


def _check_alone(check: AnyCheck, block: Block, numbered: tuple[int, Item]) -> Row:
    with _image_time(check, block):
        return _row(check, block, *numbered)
