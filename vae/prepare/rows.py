"""The rows of a job: one file for each block, written whole and renamed. The file is the ledger.

A killed job repeats its unfinished blocks. A block has another file if its content or the settings change, so
no old row is taken for a new one.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from vae.config.prepare_flags import ReadingConfig
from vae.images.formats import BadImageError
from vae.prepare.blocks import Block, Source
from vae.prepare.check import AnyCheck, Row, rejected, start_row
from vae.prepare.folders import FULL_DISK, HIDDEN, claim_settings, output_folder
from vae.prepare.pool import Failure, count_workers, run_tasks, time_limit
from vae.prepare.tar_source import BrokenTarError, TarBlock
from vae.progress import Progress
from vae.shards.store import StoreError
from vae.system.errors import UserError
from vae.system.files import flush_file, is_link, open_new_text, open_regular, utf8_text
from vae.system.lock_file import open_locked

OF_BLOCK = -1  # the number of the row about the block itself
BROKEN = "broken_tar"
STORE_SECONDS = 300.0  # more for an image on a store, which is asked again several times
RULES = ("image_column", "background", "min_size", "max_aspect", "max_pixels", "first_frame")
_PARTIAL = ".part"


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


class Task(NamedTuple):
    """A block to work on, and its images that ended a process before."""

    block: Block
    lost: tuple[tuple[int, Failure], ...] = ()


@dataclass
class RowFolder:
    """A folder with the rows of a job, which one process of each part uses at a time."""

    root: Path
    owner: str  # the flag and the folder, for messages
    settings: dict[str, Any]  # all that decides the rows
    part: Part = field(default_factory=Part)
    rows: Path | None = None  # where the rows are, if they are those of another job

    @contextmanager
    def claimed(self) -> Iterator["RowFolder"]:
        """Hold the folder; UserError if it has other settings, or another process works on this part."""
        for folder in (self.root, self.root / "rows"):
            if is_link(folder):
                raise UserError(
                    f"{self.owner}: {folder} is a link: replace it by a folder, or give another one"
                )
        (self.root / "rows").mkdir(parents=True, exist_ok=True)
        name = f"part-{self.part.number}-of-{self.part.total}"
        path = self.root / f"{name}.lock"
        lock = None
        if is_link(path):
            raise UserError(f"{self.owner}: {path} is a link: remove it")
        with suppress(OSError):  # a file system without locks
            lock = open_locked(path)
            if lock is None:
                raise UserError(f"{self.owner}: another command is working in it: wait until it has ended")
        try:
            claim_settings(self.root / "settings.json", self.settings, self.owner)
            for leftover in self.root.glob(f"scratch-{name}-*"):  # of a killed process of this part
                if not is_link(leftover):
                    shutil.rmtree(leftover, ignore_errors=True)
            self.scratch = Path(tempfile.mkdtemp(prefix=f"scratch-{name}-", dir=self.root))
            try:
                yield self
            finally:
                shutil.rmtree(self.scratch, ignore_errors=True)
        finally:
            if lock is not None:
                lock.close()

    def path(self, block: Block) -> Path:
        """The file with the rows of a block."""
        return (self.rows or self.root / "rows") / f"{block.id}.jsonl"

    def has(self, block: Block) -> bool:
        """Whether a block is finished."""
        return self.path(block).is_file()

    def mine(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """The blocks of this part."""
        return blocks[self.part.number :: self.part.total]

    def run(self, source: Source, maker: AnyCheck, title: str = "check") -> None:
        """Write the rows of all unfinished blocks of this part."""
        blocks = self.mine(source.blocks)
        for block in blocks:  # a broken tar file is read again: it may have been copied again
            if isinstance(block, TarBlock) and self.has(block) and _is_broken(self.path(block)):
                self.remove(block)
        todo = [block for block in blocks if not self.has(block)]
        total = sum(block.count or 1 for block in blocks)
        done = total - sum(block.count or 1 for block in todo)
        work = partial(write_rows, self.root / "rows", self.scratch, maker)
        workers = max(1, min(count_workers(maker.config.num_workers), len(todo)))
        results = run_tasks(work, map(Task, todo), workers, maker.limits, self._without_lost)
        unit = "image" if any(block.count for block in blocks) else source.unit
        bad = 0
        with Progress(title, total, unit, done=done) as bar, closing(results):
            for task, count in results:
                bad += count
                bar.update(task.block.count or 1, note=f"{bad} bad")

    def part_text(self, source: Source) -> str:
        """The summary of a part."""
        done = sum(map(self.has, source.blocks))
        total = len(source.blocks)
        return (
            f"part {self.part} is complete: {done} of {total} blocks are done\n"
            "  when all parts are complete: the same command without --part"
        )

    def _without_lost(self, task: Task, failure: Failure) -> Task:
        """The task again, with the image that ended its process as lost: the rows before it are written."""
        at = sum(1 for _ in _complete_lines(self.scratch / f"{task.block.id}{_PARTIAL}"))
        return Task(task.block, (*task.lost, (at, failure)))

    def remove(self, block: Block) -> None:
        """Work on a block again in the next run."""
        self.path(block).unlink(missing_ok=True)


def write_rows(rows: Path, scratch: Path, maker: AnyCheck, task: Task) -> int:
    """Write the rows of a block; returns the number of images that are not accepted.

    The rows go to a partial file first, one after another: if this process ends, it tells at which image.
    """
    partial_path = scratch / f"{task.block.id}{_PARTIAL}"
    lines = list(_complete_lines(partial_path)) if task.lost else []
    partial_path.unlink(missing_ok=True)
    with open_new_text(partial_path) as file:
        file.writelines(lines)
        file.flush()
        bad = sum('"reason"' in line for line in lines)
        for row in _rows(maker, task, len(lines)):
            file.write(json.dumps(row) + "\n")
            file.flush()
            bad += "reason" in row
    flush_file(partial_path)
    os.replace(partial_path, rows / f"{task.block.id}.jsonl")
    return bad


def _rows(maker: AnyCheck, task: Task, first: int) -> Iterator[Row]:
    """The rows of a block from a number on, the last one about the block itself."""
    block = task.block
    facts = dict[str, Any]()
    lost = dict(task.lost)
    whole: Row = {"number": OF_BLOCK, "name": ""}
    items = block.items(facts)
    seconds = maker.seconds + (STORE_SECONDS if block.is_remote else 0)
    number = 0
    try:
        while True:
            # Lost twice: not its image, but reading it ends the process.
            if number in lost and sum(at == number for at, _ in task.lost) > 1:
                whole |= {"reason": lost[number].reason, "detail": lost[number].detail}
                break
            with time_limit(seconds):
                item = next(items, None)
                if item is None:
                    break
                row: Row | None = None
                if number in lost:
                    row = rejected(start_row(item), BadImageError(*lost[number]))
                elif number >= first:
                    row = maker.row(block, number, item)
            if row is not None and number >= first:
                yield {"number": number, **row}
            number += 1
    except (BrokenTarError, StoreError, OSError) as error:
        if not isinstance(block, TarBlock) or getattr(error, "errno", None) in FULL_DISK:
            raise
        detail = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        whole |= {"reason": BROKEN, "detail": utf8_text(detail)[:1000]}
    yield whole | ({"metadata": facts} if facts else {})


def _is_broken(path: Path) -> bool:
    """Whether the rows say that their block cannot be read to its end."""
    with open_regular(path) as file:
        file.seek(max(0, path.stat().st_size - 4096))
        last = file.read().rstrip(b"\n").rpartition(b"\n")[2]
    return b'"reason"' in last


def _complete_lines(path: Path) -> Iterator[str]:
    """The lines of a partial file without the last one, if that was cut."""
    with suppress(FileNotFoundError), open_regular(path) as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line.decode()
