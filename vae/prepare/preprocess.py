"""`--mode preprocess`: convert raw images to a training set.

An image gets its final name when it is complete, and a block its rows when all of its images have theirs. A
killed run repeats its unfinished blocks; its output does not show the interruption.
"""

import hashlib
import json
import os
import re
import time
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
from PIL import Image

from vae.config.prepare_flags import PreprocessConfig
from vae.data.manifest import GROUP_KEYS, IMAGE_KEYS, MANIFEST_NAME, read_rows
from vae.images import channels
from vae.images.decoding import decode_bytes, parse_background
from vae.images.formats import BadImageError, check_longest_side
from vae.prepare.blocks import Block, FileBlock, Item, block_id
from vae.prepare.check import Check, Row, rejected
from vae.prepare.database import sql
from vae.prepare.output_folders import check_apart
from vae.prepare.rejection_reasons import print_summary
from vae.prepare.rows import RowFolder, open_rows, rules_of
from vae.prepare.source import Source, open_source
from vae.prepare.table import Table, apply_rules, check_where, drop_exact, drop_near, name_near_groups
from vae.prepare.tar_source import TarBlock
from vae.system import console
from vae.system.errors import EXIT_DATA
from vae.system.files import replace_text, shortened, utf8_text, write_json

SETTINGS_NAME, REJECTED_NAME = "preprocess_settings.json", "rejected.jsonl"
# Flags that decide which images are accepted, and their pixels; all images of a folder have the same.
SETTINGS = (
    "target_size", "resize_mode", "format", "quality", "upscale",
    "max_pixels", "background", "keep_alpha", "first_frame", "min_size", "max_aspect",
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
        pixels = image.pixels  # over --background, as the rules judge it
        if self.config.keep_alpha and "alpha_flattened" in row["flags"]:
            config = self.config
            pixels = decode_bytes(
                item.read(), max_pixels=config.max_pixels, first_frame=config.first_frame, channels=4
            )
            row["flags"].remove("alpha_flattened")
        pixels = resize_to_shape(pixels, shape, self.config.background)
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
        temporary = self.scratch / uuid4().hex
        with open(temporary, "xb") as file:
            file.write(data)
        os.replace(temporary, self.root / output)


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
        table = Table(folder, source)
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
        with suppress(FileNotFoundError):  # an earlier run may have removed it
            (root / path).unlink()
    orphans = _write_manifest(table, root)
    replace_text(root / REJECTED_NAME, (f"{row}\n" for row in table.json_rows(sql("rejected_sources"))))
    last = []
    if orphans:
        last.append(f"  {orphans} images no longer have a source: they stay, but are not in the manifest")
    if not table.accepted:
        last.append("no image was accepted: fix the problems listed above")
    print_summary(table, f"{console.printable(config.output_dir)}: {table.accepted} images", began, *last)
    return 0 if table.accepted else EXIT_DATA


def _blocks_without_files(table: Table, root: Path) -> list[int]:
    """The blocks of accepted images that are not in the output folder as they were written."""
    missing = set[int]()
    written = "SELECT block, made.path, made.bytes FROM images WHERE reason = ''"
    for block, path, size in table.stream(written):
        try:
            is_there = (root / (path or "")).stat().st_size == size
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
        for values in table.stream(sql("manifest_rows")):
            row: dict[str, Any] = dict(zip(IMAGE_KEYS, values, strict=True)) | dict.fromkeys(GROUP_KEYS)
            left.discard(row["path"])
            yield json.dumps(row | kept.get(row["path"], {})) + "\n"

    replace_text(manifest, lines())
    return sum((root / path).exists() for path in left)


# ---- Names of output images --------------------------------------------------------------------------------

# Devices of Windows, with any extension.
_RESERVED = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|com[0-9¹²³]|lpt[0-9¹²³]) *(\.|$)", re.IGNORECASE)


def name_outputs(blocks: Sequence[Block]) -> list[Block]:
    """The blocks with the output name of each of their images, which depends on all names.

    If several files would have the same output name, the first of them gets it, and the others get a hash of
    their own name.
    """
    taken: set[str] = set()
    named: list[Block] = []
    for block in blocks:
        if not isinstance(block, FileBlock):
            named.append(block)
            continue
        outputs = []
        for name in block.names:
            output = output_name(name)
            if output_key(output) in taken:
                output = output_name(name, hashed=True)
            taken.add(output_key(output))
            outputs.append(output)
        named.append(replace(block, id=block_id(block.id, outputs), outputs=tuple(outputs)))
    return named


def output_of(block: Block, at: int, name: str) -> str:
    """The output name, without an extension, of an image of a block."""
    if isinstance(block, FileBlock):
        return block.outputs[at]
    # Other names of the block are not known: one that a file system may change gets a hash.
    plain = f"{block.name.removesuffix('.tar')}/{name}" if isinstance(block, TarBlock) else name
    output = output_name(plain)
    is_plain = output_key(output) == output and plain.startswith(output)
    return output if is_plain else output_name(plain, hashed=True)


def output_name(name: str, *, hashed: bool = False) -> str:
    """`folder/stem.png` as `folder/stem`; `hashed`: with eight digits of the name's hash after the stem."""
    parts = [_safe(part) for part in name.replace("\\", "/").split("/")]
    stem = os.path.splitext(parts[-1])[0] if "." in parts[-1].lstrip(".") else parts[-1]
    return "/".join([*(shortened(part, part) for part in parts[:-1]), shortened(stem, name, hashed)])


def _safe(part: str) -> str:
    """A part of a path that every file system and every reader accepts."""
    text = "".join(
        char if char.isprintable() and char not in '\\<>:"|?*' else "_" for char in utf8_text(part)
    )
    kept = text.rstrip(". ")  # Windows removes the rest
    text = kept + "_" * (len(text) - len(kept))
    return f"_{text}" if not text or _RESERVED.match(text) else text


def output_key(output: str) -> str:
    """A key that is equal for names that a file system may treat as one: other case or accent encoding."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", output).casefold())


# ---- Resizing and encoding ---------------------------------------------------------------------------------
# pyvips takes a seventh of Pillow's time. The two agree to 53 dB or better on detailed images.

EXTENSIONS = {"jpeg": ".jpg", "png": ".png", "webp": ".webp"}
# Larger reductions start with averaging, which leaves at least this factor to Lanczos. With pyvips' default
# of 2, 93 % of the fine detail remains at a factor of 4.7 and 92 % at 10. With 4, 99.8 % and 98 % remain,
# in no more time.
GAP = 4.0


class Shape(NamedTuple):
    """Sizes of a conversion: an image is resized, then cropped or padded to the canvas."""

    width: int
    height: int
    canvas: tuple[int, int] | None  # (width, height)
    upscaled: bool


@cache
def engine() -> str:
    """The library that resizes: pyvips or Pillow."""
    os.environ.setdefault("VIPS_CONCURRENCY", "1")  # read at import; our processes already share the cores
    try:
        import pyvips
    except (ImportError, OSError):  # OSError: the package is installed, but its library is missing
        return "Pillow"
    pyvips.cache_set_max(0)
    return "pyvips"


def plan_shape(width: int, height: int, config: PreprocessConfig) -> Shape:
    """The shape that an image of `width` x `height` gets at the target size.

    Raises BadImageError if the result is too large, or larger than the image without --upscale.
    """
    size = config.target_size
    mode = config.resize_mode
    short, long = min(width, height), max(width, height)
    if mode == "stretch":
        new_width, new_height = size, size
    else:
        scale = size / (short if mode in ("cover", "crop") else long)
        if mode == "contain":
            scale = min(scale, 1.0)  # never enlarges, so it rejects no image as too small
        new_width, new_height = (max(1, round(side * scale)) for side in (width, height))
    upscaled = new_width > width or new_height > height
    if upscaled and not config.upscale:
        raise BadImageError(
            "too_small", f"{width}x{height} is too small for {mode} {size}: --upscale enlarges"
        )
    if new_width * new_height > config.max_pixels:
        raise BadImageError("too_many_pixels", f"{width}x{height} would become {new_width}x{new_height}")
    if mode != "crop":
        check_longest_side(max(new_width, new_height), config.format)
    return Shape(new_width, new_height, (size, size) if mode in ("crop", "pad") else None, upscaled)


def resize_to_shape(pixels: np.ndarray, shape: Shape, background: str) -> np.ndarray:
    """The image (H, W, C) in a shape: uint8 (h, w, C)."""
    return _to_canvas(resize(pixels, shape.width, shape.height), shape.canvas, background)


def resize(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    """Resize uint8 (H, W, C) to (height, width, C) with Lanczos, three lobes."""
    old_height, old_width = pixels.shape[:2]
    if (old_width, old_height) == (width, height):
        return pixels
    enlarged = width > old_width or height > old_height  # pyvips would use a cubic kernel here
    if enlarged or engine() == "Pillow" or pixels.shape[2] != 3:
        return channels.resize(pixels, (width, height), Image.Resampling.LANCZOS)
    import pyvips

    pixels = np.ascontiguousarray(pixels)
    image = pyvips.Image.new_from_memory(pixels.data, old_width, old_height, 3, "uchar")
    resized = image.resize(width / old_width, vscale=height / old_height, kernel="lanczos3", gap=GAP)
    assert (resized.width, resized.height) == (width, height)
    return np.frombuffer(resized.write_to_memory(), np.uint8).reshape(height, width, 3)


def _to_canvas(pixels: np.ndarray, canvas: tuple[int, int] | None, background: str) -> np.ndarray:
    """Centre on a canvas: crop where the image is larger, pad where it is smaller.

    The padding is the background, and transparent if the image has alpha.
    """
    if canvas is None:
        return pixels
    width, height = canvas
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    pixels = pixels[max(top, 0) : max(top, 0) + height, max(left, 0) : max(left, 0) + width]
    if pixels.shape[:2] == (height, width):
        return pixels
    padded = np.empty((height, width, pixels.shape[2]), dtype=np.uint8)
    padded[:] = (*parse_background(background), 0)[: pixels.shape[2]]
    top, left = (height - pixels.shape[0]) // 2, (width - pixels.shape[1]) // 2
    padded[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels
    return padded


def encode(pixels: np.ndarray, file_format: str, quality: int = 95) -> memoryview:
    """uint8 (H, W, C) pixels as the bytes of an image file; JPEG is 4:4:4, PNG ignores the quality."""
    options = {} if file_format == "png" else {"quality": quality}
    if file_format == "jpeg":
        options["subsampling"] = 0
    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, file_format.upper(), **options)
    return buffer.getbuffer()
