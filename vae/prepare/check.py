"""One check of an image: it is read once, decoded once, and becomes one row."""

import hashlib
import json
import zlib
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from vae.config.prepare_flags import IndexConfig, ReadingConfig, RulesConfig
from vae.images.decoding import DecodedImage, check_header, decode_bytes, read_image_bytes
from vae.images.formats import DECODER_ERRORS, BadImageError
from vae.prepare.blocks import Block, Item
from vae.prepare.near_duplicates import hash_pixels
from vae.prepare.pool import Limits
from vae.system.files import utf8_text
from vae.system.host import GIB

# Reading an image needs at most this many bytes per pixel: Pillow's four, a rotated copy, and two arrays.
BYTES_PER_PIXEL = 16
MAX_HEADER_PIXELS = 2**31  # nothing is decoded; a table has its sides as 32 bits
HEADER_GIB = 6.0  # memory to read a tar file: the largest image file has 2 GiB
HEADER_SECONDS = 300.0  # time to read one sample of a tar file
NEAR_BLANK = 2.0  # levels: below this standard deviation only sensor noise remains
SAMPLE_SIDE, COARSE_SIDE = 256, 24  # px: enough points to measure blankness, and to exclude it
MAX_METADATA_CHARS = 2**16  # length of the JSON of one image

Row = dict[str, Any]


def check_image(data: bytes, name: str, config: ReadingConfig) -> DecodedImage:
    """The decoded image with all its flags; BadImageError if the reader or the rules reject it."""
    image = read_image_bytes(
        data, name, max_pixels=config.max_pixels, background=config.background, first_frame=config.first_frame
    )
    height, width = image.pixels.shape[:2]
    check_size(width, height, config)
    return image._replace(flags=tuple(sorted({*image.flags, *_blankness(image.pixels)})))


def check_size(width: int, height: int, config: RulesConfig) -> None:
    """BadImageError if the user's rules reject images of this size."""
    if min(height, width) < config.min_size:
        raise BadImageError("too_small", f"{width}x{height} is below --min_size {config.min_size}")
    if config.max_aspect and max(height, width) > config.max_aspect * min(height, width):
        raise BadImageError("aspect", f"{width}x{height} exceeds --max_aspect {config.max_aspect:g}")


def _blankness(pixels: np.ndarray) -> list[str]:
    # A few pixels show that most images are far from blank, in a hundredth of the time.
    if _deviation(pixels, COARSE_SIDE) >= 2 * NEAR_BLANK or _deviation(pixels, SAMPLE_SIDE) >= NEAR_BLANK:
        return []
    return ["constant"] if (pixels == pixels[0, 0]).all() else ["near_blank"]


def _deviation(pixels: np.ndarray, side: int) -> float:
    """The largest standard deviation of a channel, of at most side x side pixels of (H, W, 3)."""
    height, width = pixels.shape[:2]
    sample = pixels[:: -(-height // side), :: -(-width // side)]
    return float(sample.reshape(-1, 3).std(axis=0).max())


@dataclass(frozen=True)
class Check:
    """The check of each image of a verb; `measures`: with the statistics of --mode analyze."""

    config: ReadingConfig
    measures: bool = False

    @property
    def limits(self) -> Limits:
        """The limits of a process that decodes images."""
        config = self.config
        return Limits(None, config.memory_gib or 1 + config.max_pixels * BYTES_PER_PIXEL / GIB)

    @property
    def seconds(self) -> float:
        """The time limit of one image."""
        return self.config.time_limit

    def row(self, _block: Block, _at: int, item: Item) -> Row:
        """The row of an image."""
        return self.decode(item)[0]

    def decode(self, item: Item) -> tuple[Row, DecodedImage | None]:
        """The row of an image and its pixels, if it is accepted."""
        row = start_row(item)
        try:
            data = item.read()
            row["bytes"] = len(data)
            row["sha256"] = hashlib.sha256(data).hexdigest()
            image = check_image(data, item.name, self.config)
        except BadImageError as error:
            return rejected(row, error), None
        except MemoryError:
            return rejected(row, BadImageError("out_of_memory", "needs more than --memory_gib")), None
        height, width = image.pixels.shape[:2]
        row |= {"format": image.format, "width": width, "height": height, "flags": list(image.flags)}
        row["phash"] = hash_pixels(self._compared(data, image)).astype(">u8").tobytes().hex()
        if self.measures:
            row["stats"] = measure_image(image, data)
        return row, image

    def _compared(self, data: bytes, image: DecodedImage) -> np.ndarray:
        """The pixels by which near duplicates are found: with alpha, if the image has any."""
        if "alpha_flattened" not in image.flags:
            return image.pixels
        config = self.config
        return decode_bytes(data, max_pixels=config.max_pixels, first_frame=config.first_frame, channels=4)


@dataclass(frozen=True)
class HeaderCheck:
    """The check of an image in a tar file that stays where it is: complete by its markers, not decoded.

    The rules for sizes are applied to its rows.
    """

    config: IndexConfig
    limits = Limits(None, HEADER_GIB)
    seconds = HEADER_SECONDS

    def row(self, _block: Block, _at: int, item: Item) -> Row:
        """The row of an image."""
        row = start_row(item)
        try:
            data = item.read()
            row["sha256"] = hashlib.sha256(data).hexdigest()
            kind, (width, height) = check_header(
                data, max_pixels=MAX_HEADER_PIXELS, first_frame=self.config.first_frame
            )
        except BadImageError as error:
            return rejected(row, error)
        position, size, text_start, text_end = item.tar_span
        return row | {
            "bytes": size,
            "format": kind,
            "width": width,
            "height": height,
            "position": position,
            "crc32": zlib.crc32(data),
            "text_start": text_start,
            "text_end": text_end,
        }


AnyCheck = Check | HeaderCheck  # what a verb does with each image


def start_row(item: Item) -> Row:
    """The row of an image before it is read."""
    row: Row = {"name": utf8_text(item.name)}
    if item.metadata:
        row["metadata"] = _plain(item.metadata)
    if item.tar_span != (0, 0, 0, 0):
        row["position"] = item.tar_span[0]
    return row


def rejected(row: Row, error: BadImageError) -> Row:
    """The row of an image that is not accepted."""
    return row | {"reason": error.reason, "detail": utf8_text(error.detail)[:1000]}


def _plain(metadata: dict[str, Any]) -> dict[str, Any]:
    """The metadata that JSON can have, at most MAX_METADATA_CHARS of them; texts are those of strangers."""
    plain: dict[str, Any] = {}
    size = 0
    for name, value in metadata.items():
        if isinstance(value, str):
            value = utf8_text(value)
        elif isinstance(value, int) and abs(value) >= 2**63:
            value = str(value)
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, TypeError, RecursionError):  # not what JSON readers accept
            continue
        size += len(name) + len(str(value))
        if size > MAX_METADATA_CHARS:
            break
        plain[utf8_text(name)] = value
    return plain


# ---- Measurements ------------------------------------------------------------------------------------------

TILE, TILES_A_SIDE = 128, 4  # px; sharpness is measured in 4 x 4 tiles at full resolution
ROUNDING = 20 / 12  # levels squared: sum of the Laplacian's squared weights times the variance of rounding
FLAT_TILE = 4.0  # levels squared: below this variance a tile contains noise, not edges
LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # ITU-R BT.601
# ITU-T T.81, table K.1, which libjpeg scales by the quality.
LUMA_TABLE = np.array([
    16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55, 14, 13, 16, 24, 40, 57, 69, 56,
    14, 17, 22, 29, 51, 87, 80, 62, 18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92,
    49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99,
])  # fmt: skip


def measure_image(image: DecodedImage, data: bytes) -> dict[str, Any]:
    """Levels from 0 to 255, sharpness, and `jpeg_quality`, which is None for other formats."""
    height, width = image.pixels.shape[:2]
    sample = image.pixels[:: -(-height // SAMPLE_SIDE), :: -(-width // SAMPLE_SIDE)]  # (h, w, 3)
    # A channel in one piece: a mean over the first axis of (h w, 3) takes four times as long.
    values = np.ascontiguousarray(sample.reshape(-1, 3).T, np.float64)  # (3, h w)
    luma = LUMA @ values
    return {
        "channel_means": values.mean(axis=1).tolist(),
        "channel_squares": (np.einsum("cn,cn->c", values, values) / values.shape[1]).tolist(),
        "brightness": float(luma.mean()),
        "contrast": float(luma.std()),
        "sharpness": sharpness(image.pixels),
        "jpeg_quality": estimate_jpeg_quality(data) if image.format == "JPEG" else None,
    }


def sharpness(pixels: np.ndarray) -> float:
    """Variance of the Laplacian over that of brightness, in the sharpest of 16 tiles; 0 if all are flat.

    White noise has 20, the sum of the Laplacian's squared weights.
    """
    height, width = pixels.shape[:2]
    best = (0.0, 0.0)
    for row in range(TILES_A_SIDE):
        top = max(0, height - TILE) * row // (TILES_A_SIDE - 1)
        for column in range(TILES_A_SIDE):
            left = max(0, width - TILE) * column // (TILES_A_SIDE - 1)
            luma = pixels[top : top + TILE, left : left + TILE].astype(np.float32) @ LUMA  # (h, w)
            if min(luma.shape) < 3 or luma.var() < FLAT_TILE:
                continue
            middle = luma[1:-1, 1:-1]
            around = luma[:-2, 1:-1] + luma[2:, 1:-1] + luma[1:-1, :-2] + luma[1:-1, 2:]
            edges = max(0.0, float((around - 4 * middle).var()) - ROUNDING)
            best = max(best, (edges, edges / float(luma.var())))
    return best[1]


def estimate_jpeg_quality(data: bytes) -> float | None:
    """The libjpeg quality, 1 to 100, with the luminance table nearest to a JPEG's; None without a table."""
    try:
        with Image.open(BytesIO(data), formats=("JPEG", "MPO")) as image:
            table = np.array(image.quantization.get(0, ()), dtype=np.float64)
    except DECODER_ERRORS:
        return None
    if table.shape != (64,):
        return None
    scales = np.array([5000 / q if q < 50 else 200 - 2 * q for q in range(1, 101)])
    tables = np.clip((LUMA_TABLE * scales[:, None] + 50) // 100, 1, 255)  # (100, 64)
    # compare sums, because the order of the entries may differ
    return float(1 + np.argmin(np.abs(tables.sum(axis=1) - table.sum())))
