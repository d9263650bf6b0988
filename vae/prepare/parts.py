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

from vae.config.prepare_flags import (
    CONFIG_OF,
    AnalyzeConfig,
    MergeConfig,
    PreprocessConfig,
    ShardConfig,
    ValidateConfig,
)
from vae.prepare.ledger import Ledger
from vae.prepare.preprocess.naming import output_key, output_name
from vae.system.console import printable
from vae.system.errors import DataError, UserError
from vae.system.files import parse_json

PARTS = Path(".prepare", "parts")  # in the output folder; beside an output file, with its name and .parts
CONFIG, COMPLETE = "config", "complete"  # keys of notes
# They decide how the work is done, not its result.
_FREE = ("num_workers", "engine", "ray_address", "time_limit", "memory_gib", "part")
EXAMPLES = 6
LOCK_SECONDS = 30.0  # until a killed run of the same part has ended on another node

ReportConfig = ValidateConfig | AnalyzeConfig  # their result is a file
PartConfig = PreprocessConfig | ShardConfig | ReportConfig


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


def parts_folder(config: PartConfig | MergeConfig) -> Path:
    """The folder with the ledgers of the parts."""
    if isinstance(config, ReportConfig):
        return Path(f"{config.output_file}.parts")
    if isinstance(config, MergeConfig) and config.output_file:
        return Path(f"{config.output_file}.parts")
    assert config.output_dir is not None, "the flags were checked together"
    return Path(config.output_dir) / PARTS


def ledger_path(folder: Path, part: Part) -> Path:
    """The ledger of a part."""
    return folder / f"{part.stem}.sqlite"


def merge_line(config: PartConfig) -> str:
    """The line of a summary with the command that joins all parts."""
    return f"  when all parts are done: prepare_data.py --mode merge {_output(config)}"


def open_part(config: PartConfig) -> Ledger:
    """The ledger of a part, which is not complete until `complete_part`; UserError for other parts."""
    folder, part = parts_folder(config), part_of(config)
    assert part is not None
    if others := {one.total for one in _ledgers(folder)} - {part.total}:
        raise UserError(
            f"--part {part}: {_output(config)} has parts of {max(others)}: use that number, or delete "
            f"{folder}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(ledger_path(folder, part), LOCK_SECONDS)
    ledger.forget_notes(COMPLETE)
    ledger.note(CONFIG, json.dumps(_settings(config), sort_keys=True))
    return ledger


def complete_part(ledger: Ledger) -> None:
    """Note that a part has results for all of its files."""
    ledger.note(COMPLETE, "")


def read_parts(config: MergeConfig) -> tuple[PartConfig, int]:
    """The settings of all parts of an output, and their number; DataError unless all are complete."""
    folder, output = parts_folder(config), _output(config)
    count = count_parts(folder)
    if not count:
        modes = "validate or analyze" if config.output_file else "shard or preprocess"
        raise DataError(f"{output} has no parts: run --mode {modes} with --part first")
    settings, missing = set(), []
    for part in (Part(number, count) for number in range(count)):
        if (text := _complete_settings(ledger_path(folder, part))) is None:
            missing.append(str(part))
        else:
            settings.add(text)
    if missing:
        names = ", ".join(missing[:EXAMPLES]) + (", ..." if len(missing) > EXAMPLES else "")
        raise DataError(f"{output}: {len(missing)} parts are not complete ({names}): run them again")
    if len(settings) > 1:
        raise UserError(f"{output} has parts with different flags: run all of them with the same")
    values = parse_json(settings.pop())
    section = CONFIG_OF[values.pop("mode")]
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    merged = section(**values, num_workers=config.num_workers)
    assert isinstance(merged, PartConfig)
    if isinstance(merged, ReportConfig):
        return replace(merged, output_file=str(config.output_file)), count
    return replace(merged, output_dir=str(config.output_dir)), count


def count_parts(folder: Path) -> int:
    """The number of parts that the work was divided into; 0 if it was not."""
    return max((part.total for part in _ledgers(folder)), default=0)


def join_parts(ledger: Ledger, folder: Path, count: int) -> int:
    """List the files of all parts, with their results; returns the number of files."""
    ledger.list_files(())
    for number in range(count):
        ledger.join(ledger_path(folder, Part(number, count)))
    return ledger.count_files()


def _output(config: PartConfig | MergeConfig) -> str:
    """The flag that names where the result goes, with its value."""
    for name in ("output_file", "output_dir"):
        if value := getattr(config, name, None):
            return f"--{name} {printable(value)}"
    raise AssertionError("every mode with parts has one of the two")


def _ledgers(folder: Path) -> Iterator[Part]:
    for path in folder.glob("*-of-*.sqlite"):
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
    for name in ("input_dir", "output_dir", "output_file", "quarantine_dir", "parent", "remove"):
        if values.get(name):
            values[name] = os.path.abspath(values[name])
    (mode,) = (mode for mode, section in CONFIG_OF.items() if section is type(config))
    return {"mode": mode, **values}
