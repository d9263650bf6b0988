"""`--mode preprocess`: convert raw images to a training set.

An image gets its final name when it is complete, and a block its rows when all of its images have theirs. A
killed run repeats its unfinished blocks; its output does not show the interruption.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from vae.config.prepare_flags import PreprocessConfig
from vae.data.manifest import GROUP_KEYS, IMAGE_KEYS, MANIFEST_NAME, read_rows
from vae.images.formats import BadImageError
from vae.prepare.blocks import Block, Item
from vae.prepare.check import Check, Row, rejected
from vae.prepare.folders import HIDDEN, check_apart, inside
from vae.prepare.naming import name_outputs, output_of
from vae.prepare.reasons import count_rejected, duplicates_text, print_summary
from vae.prepare.resize import EXTENSIONS, encode, engine, plan_shape, resize_to_shape
from vae.prepare.rows import RowFolder, open_rows, rules_of
from vae.prepare.selection import apply_rules, check_where, drop_exact, drop_near, name_near_groups
from vae.prepare.source import Source, open_source
from vae.prepare.table import Table
from vae.system import console
from vae.system.errors import EXIT_DATA
from vae.system.files import open_new, replace_text, write_json

SETTINGS_NAME, REJECTED_NAME = "preprocess_settings.json", "rejected.jsonl"
# Flags that decide which images are accepted, and their pixels; all images of a folder have the same.
SETTINGS = (
    "target_size", "resize_mode", "format", "quality", "upscale",
    "max_pixels", "background", "first_frame", "min_size", "max_aspect",
)  # fmt: skip
MAX_ROUNDS = 2  # the second one makes images again that were deleted since


@dataclass(frozen=True)
class Convert(Check):
    """The conversion of each image to the target size."""

    config: PreprocessConfig
    root: Path = Path()
    scratch: Path = Path()

    def row(self, block: Block, at: int, item: Item) -> Row:
        """Write the image of an item; its row has what was made, or the reason why not."""
        row, image = self.decode(item)
        if image is None:
            return row
        height, width = image.pixels.shape[:2]
        try:
            shape = plan_shape(width, height, self.config)
        except BadImageError as error:
            return rejected(row, error)
        pixels = resize_to_shape(image.pixels, shape, self.config.background)
        output = output_of(block, at, item.name) + EXTENSIONS[self.config.format]
        data = encode(pixels, self.config.format, self.config.quality)
        self._write(output, data)
        row["flags"] = sorted([*row["flags"], *(["upscaled"] if shape.upscaled else [])])
        row["made"] = {
            "path": output,
            "sha256": hashlib.sha256(data).hexdigest(),
            "bytes": len(data),
            "width": pixels.shape[1],
            "height": pixels.shape[0],
        }
        return row

    def _write(self, output: str, data: memoryview) -> None:
        os.makedirs((self.root / output).parent, exist_ok=True)
        final = inside(self.root, output)
        temporary = self.scratch / uuid4().hex
        with open_new(temporary) as file:
            file.write(data)
        os.replace(temporary, final)


def run_preprocess(config: PreprocessConfig) -> int:
    """Convert a source and print a summary; returns the exit code.

    DataError if there are no images, and UserError for unusable folders or flags.
    """
    if engine() == "Pillow":
        console.warning(
            "pyvips is not installed: Pillow resizes instead, with the same quality, in 7x the time; "
            "python -m pip install pyvips-binary pyvips"
        )
    check_where(config)
    began = time.monotonic()
    check_apart(config.input_dir, config.output_dir)
    source = open_source(config)
    source = replace(source, blocks=name_outputs(source.blocks))
    settings = {**{name: getattr(config, name) for name in SETTINGS}, "engine": engine()}
    with open_rows(config, "preprocess", {**rules_of(config, source), **settings}) as (root, folder):
        if not (root / SETTINGS_NAME).exists():
            write_json(root / SETTINGS_NAME, settings, indent=1)
        return _preprocess(config, source, folder, root, began)


def _preprocess(config: PreprocessConfig, source: Source, folder: RowFolder, root: Path, began: float) -> int:
    for _ in range(MAX_ROUNDS):
        folder.run(source, Convert(config, root=root, scratch=folder.scratch), "preprocess")
        if config.part:
            console.info(folder.part_text(source))
            return 0
        table = Table(folder, source.blocks)
        drop_exact(table, also_rejected=True)
        if config.drop_duplicates:
            name_near_groups(table)
            drop_near(table)
        apply_rules(table, config)
        missing = _blocks_without_files(table, root)
        if not missing:
            break
        for number in missing:
            folder.remove(source.blocks[number])
    for (path,) in table.stream("SELECT made.path FROM images WHERE reason <> '' AND made IS NOT NULL"):
        with suppress(FileNotFoundError):  # of duplicates and of others that the rules leave out
            inside(root, path, str(root / HIDDEN)).unlink()
    orphans = _write_manifest(table, root)
    rejected = table.json_rows(
        "SELECT name AS source, reason, coalesce(detail, '') AS detail FROM images WHERE reason <> '' "
        "ORDER BY n"
    )
    replace_text(root / REJECTED_NAME, (f"{row}\n" for row in rejected))
    seconds = time.monotonic() - began
    last = []
    if orphans:
        last.append(f"  {orphans} images no longer have a source: they stay, but are not in the manifest")
    if not table.accepted:
        last.append("no image was accepted: fix the problems listed above")
    print_summary(
        table,
        source,
        f"{console.printable(config.output_dir)}: {table.accepted} images, {count_rejected(table)} rejected, "
        f"{duplicates_text(table)} ({seconds:.1f} s, {table.count() / max(seconds, 1e-9):.1f} images/s)",
        *last,
    )
    return 0 if table.accepted else EXIT_DATA


def _blocks_without_files(table: Table, root: Path) -> list[int]:
    """The blocks of accepted images that are not in the output folder as they were written."""
    missing = set[int]()
    for block, path, size in table.stream(
        "SELECT block, made.path, made.bytes FROM images WHERE reason = ''"
    ):
        try:
            is_there = inside(root, path or "", str(root / HIDDEN)).stat().st_size == size
        except OSError:
            is_there = False
        if not is_there:
            missing.add(block)
    return sorted(missing)


def _write_manifest(table: Table, root: Path) -> int:
    """Write the manifest; returns the number of images that no longer have a source.

    Groups, labels and splits that others have written are kept.
    """
    manifest = root / MANIFEST_NAME
    kept: dict[str, dict[str, Any]] = {}
    if manifest.is_file():
        for row in read_rows(manifest, flag="--output_dir"):
            kept[row["path"]] = {k: v for k, v in row.items() if k not in IMAGE_KEYS and v is not None}
    left = set(kept)

    def lines() -> Iterator[str]:
        columns = "made.path, made.sha256, made.width, made.height, name, flags, phash"
        for values in table.stream(f"SELECT {columns} FROM images WHERE reason = '' ORDER BY n"):
            row: dict[str, Any] = dict(zip(IMAGE_KEYS, values, strict=True)) | dict.fromkeys(GROUP_KEYS)
            left.discard(row["path"])
            yield json.dumps(row | kept.get(row["path"], {})) + "\n"

    replace_text(manifest, lines())
    return sum((root / path).exists() for path in left)
