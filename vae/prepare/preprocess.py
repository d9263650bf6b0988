"""`--mode preprocess`: convert raw images to a training set of one or several sizes.

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
from vae.data.manifest import KEYS, MANIFEST_NAME, read_rows
from vae.images.formats import BadImageError
from vae.prepare.blocks import Block, Item, Source, open_source
from vae.prepare.check import Check, Row, image_limits, rejected, warn_without_simplejpeg
from vae.prepare.encode import EXTENSIONS, encode
from vae.prepare.folders import check_apart, output_folder, refuse_links
from vae.prepare.inside import inside
from vae.prepare.naming import name_outputs, output_of
from vae.prepare.reasons import count_rejected, duplicates_text, reason_lines, skip_lines
from vae.prepare.resize import Shape, engine, plan_shape, resize_to_shapes
from vae.prepare.rows import HIDDEN, RowFolder, parse_part
from vae.prepare.selection import apply_rules, check_where, drop_exact, drop_near, name_near_groups
from vae.prepare.table import Table
from vae.prepare.validate import broken_lines, part_line, rules_of
from vae.system import console
from vae.system.errors import EXIT_DATA
from vae.system.files import parse_json, replace_text, write_json

SETTINGS_NAME, REJECTED_NAME = "preprocess_settings.json", "rejected.jsonl"
# Flags that decide which images are accepted, and their pixels; all images of a folder have the same.
SETTINGS = (
    "target_size", "resize_mode", "format", "quality", "upscale",
    "max_pixels", "background", "first_frame", "min_size", "max_aspect",
)  # fmt: skip
OUR_KEYS = ("path", "sha256", "width", "height", "source", "flags")  # other keys of a row come from others
MAX_ROUNDS = 2  # the second one makes images again that were deleted since


@dataclass(frozen=True)
class Convert:
    """The conversion of each image to all target sizes."""

    check: Check
    config: PreprocessConfig
    root: Path
    scratch: Path

    def row(self, block: Block, at: int, item: Item) -> Row:
        """Write the images of an item; its row has what was made of each size, or the reason why not."""
        row, checked = self.check.decode(item)
        if checked is None:
            return row
        made: dict[str, Any] = {}
        shapes: dict[int, Shape] = {}
        height, width = checked.image.pixels.shape[:2]
        for target in self.config.target_size:
            try:
                shapes[target] = plan_shape(width, height, target, self.config)
            except BadImageError as error:
                made[str(target)] = {"reason": error.reason, "detail": error.detail}
                failed = error
        if not shapes:
            return rejected(row, failed)
        arrays = resize_to_shapes(checked.image.pixels, list(shapes.values()), self.config.background)
        output = output_of(block, at, item.name) + EXTENSIONS[self.config.format]
        for (target, shape), pixels in zip(shapes.items(), arrays, strict=True):
            data = encode(pixels, self.config.format, self.config.quality)
            self._write(target, output, data)
            made[str(target)] = {
                "width": pixels.shape[1],
                "height": pixels.shape[0],
                "bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
                "upscaled": shape.upscaled,
            }
        row["made"] = {"path": output, "sizes": made}
        return row

    def _write(self, target: int, output: str, data: memoryview) -> None:
        final = self.root / size_folder(self.config, target) / output
        os.makedirs(final.parent, exist_ok=True)
        final = refuse_links(self.root, str(final.relative_to(self.root)))
        temporary = self.scratch / uuid4().hex
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, final)


def size_folder(config: PreprocessConfig, target: int) -> str:
    """The folder of a size, within the output folder."""
    return str(target) if len(config.target_size) > 1 else ""


def run_preprocess(config: PreprocessConfig) -> int:
    """Convert a source and print a summary; returns the exit code.

    DataError if there are no images, and UserError for unusable folders or flags.
    """
    warn_without_simplejpeg()
    if engine() == "Pillow":
        console.warning(
            "pyvips is not installed: Pillow resizes instead, with the same quality, in 7x the time; "
            "python -m pip install pyvips-binary pyvips"
        )
    check_where(config)
    began = time.monotonic()
    check_apart(config.input_dir, config.output_dir)
    source = open_source(config.input_dir, "--input_dir", config.limit, config.image_column)
    source = replace(source, blocks=name_outputs(source.blocks))
    settings = {**{name: getattr(config, name) for name in SETTINGS}, "engine": engine()}
    settings["target_size"] = list(config.target_size)
    with output_folder(config.output_dir, "preprocess") as root:
        owner = f"--output_dir {config.output_dir}"
        rules = {**rules_of(config, source), **settings}
        with RowFolder(root / HIDDEN, owner, rules, parse_part(config.part)).claimed() as folder:
            if not (root / SETTINGS_NAME).exists():
                write_json(root / SETTINGS_NAME, settings, indent=1)
            return _preprocess(config, source, folder, root, began)


def _preprocess(config: PreprocessConfig, source: Source, folder: RowFolder, root: Path, began: float) -> int:
    convert = Convert(Check(config), config, root, folder.scratch)
    limits = image_limits(config)
    for _ in range(MAX_ROUNDS):
        folder.run(source, convert, config.num_workers, limits, seconds=config.time_limit, title="preprocess")
        if config.part:
            console.info(part_line(config.part, source, folder))
            return 0
        table = Table(folder, source.blocks, folder.scratch)
        drop_exact(table)
        if config.drop_duplicates:
            name_near_groups(table)
            drop_near(table)
        apply_rules(table, config)
        missing = _blocks_without_files(table, config, root)
        if not missing:
            break
        for number in missing:
            folder.remove(source.blocks[number])
    _remove_left_out(table, config, root)
    orphans = sum(_write_manifest(table, config, root, target) for target in config.target_size)
    replace_text(root / REJECTED_NAME, _rejected_lines(table))
    _print_summary(table, config, source, orphans, time.monotonic() - began)
    return 0 if table.accepted else EXIT_DATA


def _images_of(
    table: Table, config: PreprocessConfig, what: str
) -> Iterator[tuple[tuple[Any, ...], int, str, dict[str, Any]]]:
    """Row, target size, path in the output folder and description of each output image of some rows."""
    query = f"SELECT block, name, flags, made FROM images WHERE made IS NOT NULL AND {what} ORDER BY n"
    for row in table.stream(query):
        made = parse_json(row[-1])
        for target in config.target_size:
            try:
                one, path = made["sizes"].get(str(target), {}), made["path"]
                if "bytes" in one:
                    yield row, target, path, one
            except (KeyError, TypeError, AttributeError):
                continue


def _blocks_without_files(table: Table, config: PreprocessConfig, root: Path) -> list[int]:
    """The blocks of accepted images that are not in the output folder as they were written."""
    missing = set[int]()
    for row, target, path, one in _images_of(table, config, "reason = ''"):
        place = inside(root / size_folder(config, target), path, f"{root / HIDDEN}")
        try:
            is_there = place.stat().st_size == one["bytes"]
        except OSError:
            is_there = False
        if not is_there:
            missing.add(row[0])
    return sorted(missing)


def _remove_left_out(table: Table, config: PreprocessConfig, root: Path) -> None:
    """Remove the images of duplicates and of others that the rules leave out."""
    for _, target, path, _ in _images_of(table, config, "reason <> ''"):
        with suppress(FileNotFoundError):
            inside(root / size_folder(config, target), path, f"{root / HIDDEN}").unlink()


def _write_manifest(table: Table, config: PreprocessConfig, root: Path, target: int) -> int:
    """Write the manifest of a size; returns the number of images that no longer have a source.

    Groups, labels and splits that others have written are kept.
    """
    manifest = root / size_folder(config, target) / MANIFEST_NAME
    kept: dict[str, dict[str, Any]] = {}
    if manifest.is_file():
        for row in read_rows(manifest, flag="--output_dir"):
            kept[row["path"]] = {k: v for k, v in row.items() if k not in OUR_KEYS and v is not None}
    else:
        os.makedirs(manifest.parent, exist_ok=True)
    left = set(kept)

    def lines() -> Iterator[str]:
        for (_, name, flags, _), size, path, one in _images_of(table, config, "reason = ''"):
            if size == target:
                left.discard(path)
                row: dict[str, Any] = dict.fromkeys(KEYS)
                row |= {"path": path, "source": name} | {k: one[k] for k in ("sha256", "width", "height")}
                row["flags"] = sorted([*flags, *(["upscaled"] if one["upscaled"] else [])])
                yield json.dumps(row | kept.get(path, {})) + "\n"

    replace_text(manifest, lines())
    return sum((manifest.parent / path).exists() for path in left)


def _rejected_lines(table: Table) -> Iterator[str]:
    """One row for each source and size without an image."""
    query = "SELECT name, reason, detail, made FROM images WHERE reason <> '' OR made IS NOT NULL ORDER BY n"
    for name, reason, detail, made in table.stream(query):
        if reason:
            yield json.dumps({"source": name, "reason": reason, "detail": detail or ""}) + "\n"
            continue
        for target, one in parse_json(made)["sizes"].items():
            if "reason" in one:
                yield json.dumps({"source": name, **one, "target_size": int(target)}) + "\n"


def _print_summary(
    table: Table, config: PreprocessConfig, source: Source, orphans: int, seconds: float
) -> None:
    row = table.one("SELECT count(*) FROM images")
    assert row is not None
    lines = [
        f"{console.printable(config.output_dir)}: {table.accepted} images, {count_rejected(table)} rejected, "
        f"{duplicates_text(table)} ({seconds:.1f} s, {row[0] / max(seconds, 1e-9):.1f} images/s)",
        *reason_lines(table),
        *broken_lines(table),
        *skip_lines(source.skips),
    ]
    if orphans:
        lines.append(f"  {orphans} images no longer have a source: they stay, but are not in the manifest")
    if not table.accepted:
        lines.append("no image was accepted: fix the problems listed above")
    console.info("\n".join(lines))
