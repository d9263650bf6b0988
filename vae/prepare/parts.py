"""--part I/N does a part of a mode's work, with a ledger of its own; --mode merge joins the ledgers.

A file belongs to one part by a hash of its name, so parts need not know of each other: any scheduler may run
them, in any order and again.
"""

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from vae.config.prepare_flags import CONFIG_OF, MergeConfig, PreprocessConfig, ShardConfig
from vae.prepare.ledger import Ledger
from vae.prepare.preprocess.naming import output_key, output_name
from vae.system.console import printable
from vae.system.errors import DataError, UserError
from vae.system.files import parse_json

PARTS = Path(".prepare", "parts")  # in the output folder
CONFIG, COMPLETE = "config", "complete"  # keys of notes
# They decide how the work is done, not its result.
_FREE = ("num_workers", "engine", "ray_address", "time_limit", "memory_gib", "part")
EXAMPLES = 6
LOCK_SECONDS = 30.0  # until a killed run of the same part has ended on another node

PartConfig = PreprocessConfig | ShardConfig


class Part(NamedTuple):
    """Part `number` of `total`, from 0 on."""

    number: int
    total: int

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"

    @property
    def stem(self) -> str:
        """The beginning of the names of its files."""
        return f"{self.number:05}-of-{self.total:05}"

    def has(self, name: str) -> bool:
        """Whether it has a file; files that would get the same output name are in the same part."""
        key = output_key(output_name(name, ""))
        return zlib.crc32(key.encode("utf-8", "surrogateescape")) % self.total == self.number


def part_of(config: PartConfig) -> Part | None:
    """The part that --part names."""
    return Part(*map(int, config.part.split("/"))) if config.part else None


def ledger_path(root: Path, part: Part) -> Path:
    """The ledger of a part."""
    return root / PARTS / f"{part.stem}.sqlite"


def merge_command(output_dir: str) -> str:
    """The command that joins all parts."""
    return f"prepare_data.py --mode merge --output_dir {printable(output_dir)}"


def open_part(config: PartConfig) -> Ledger:
    """The ledger of a part, which is not complete until `complete_part`; UserError for other parts."""
    root, part = Path(config.output_dir), part_of(config)
    assert part is not None
    if others := {one.total for one in _ledgers(root)} - {part.total}:
        raise UserError(
            f"--part {part}: {root} has parts of {max(others)}: use that number, or delete {root / PARTS}"
        )
    ledger_path(root, part).parent.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(ledger_path(root, part), LOCK_SECONDS)
    ledger.forget_notes(COMPLETE)
    ledger.note(CONFIG, json.dumps(_settings(config), sort_keys=True))
    return ledger


def complete_part(ledger: Ledger) -> None:
    """Note that a part has results for all of its files."""
    ledger.note(COMPLETE, "")


def read_parts(config: MergeConfig) -> tuple[PartConfig, int]:
    """The settings of all parts in a folder, and their number; DataError unless all are complete."""
    root = Path(config.output_dir)
    count = count_parts(root)
    if not count:
        raise DataError(f"--output_dir {root} has no parts: run --mode shard or preprocess with --part first")
    settings, missing = set(), []
    for part in (Part(number, count) for number in range(count)):
        if (text := _complete_settings(ledger_path(root, part))) is None:
            missing.append(str(part))
        else:
            settings.add(text)
    if missing:
        names = ", ".join(missing[:EXAMPLES]) + (", ..." if len(missing) > EXAMPLES else "")
        raise DataError(
            f"--output_dir {root}: {len(missing)} parts are not complete ({names}): run them again"
        )
    if len(settings) > 1:
        raise UserError(f"--output_dir {root} has parts with different flags: run all of them with the same")
    values = parse_json(settings.pop())
    section = CONFIG_OF[values.pop("mode")]
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    merged = section(**values, num_workers=config.num_workers)
    assert isinstance(merged, PartConfig)
    return replace(merged, output_dir=config.output_dir), count


def count_parts(root: Path) -> int:
    """The number of parts that a folder was divided into; 0 if it was not."""
    return max((part.total for part in _ledgers(root)), default=0)


def join_parts(ledger: Ledger, root: Path, count: int) -> int:
    """List the files of all parts, with their results; returns the number of files."""
    ledger.list_files(())
    for number in range(count):
        ledger.join(ledger_path(root, Part(number, count)))
    return ledger.count_files()


def _ledgers(root: Path) -> Iterator[Part]:
    for path in (root / PARTS).glob("*-of-*.sqlite"):
        number, _, count = path.stem.partition("-of-")
        yield Part(int(number), int(count))


def _complete_settings(path: Path) -> str | None:
    if not path.exists():
        return None
    ledger = Ledger(path)
    try:
        return ledger.noted(CONFIG) if ledger.noted(COMPLETE) is not None else None
    finally:
        ledger.close()


def _settings(config: PartConfig) -> dict[str, Any]:
    """The options that all parts must share, with absolute paths."""
    values = {name: value for name, value in asdict(config).items() if name not in _FREE}
    for name in ("input_dir", "output_dir", "parent", "remove"):
        if values.get(name):
            values[name] = os.path.abspath(values[name])
    (mode,) = (mode for mode, section in CONFIG_OF.items() if section is type(config))
    return {"mode": mode, **values}
