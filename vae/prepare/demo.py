"""`--mode demo`: synthetic images from a dead-leaves model: opaque shapes of all sizes that hide one another.

Lee, Mumford and Huang, "Occlusion models for natural images", IJCV 41 (2001): if the density of the
shapes' radii falls as r^-3, the images have the statistics of photographs at every scale, with hard edges
and a power spectrum near 1/f^2. Each shape contains a gradient and fractal noise with equal strength per
octave, which has the same spectrum.

The images are drawn with PCG64 and + - * / sqrt only. IEEE 754 defines their rounding, so the pixels are the
same on every machine. Shapes: canvas (S, S, 3) and textures (S, S), float32; a window (h, w) is a part of
either.
"""

from contextlib import closing
from functools import partial
from math import sqrt
from pathlib import Path

import numpy as np

from vae.config.prepare_flags import DemoConfig
from vae.data.workers import resolve_num_workers
from vae.prepare.output_folders import claim_settings, output_folder
from vae.prepare.pool import Failure, Limits, run_tasks
from vae.prepare.preprocess import encode
from vae.progress import Progress
from vae.system import console
from vae.system.errors import DataError
from vae.system.files import remove_temporary, replace_bytes

SETTINGS_NAME = "demo_settings.json"
SETTINGS = ("target_size", "seed")  # flags that decide the pixels; the same for a whole folder
DRAWING_SECONDS = 600.0  # limit for one image: tens of thousands of pixels take minutes


def run_demo(config: DemoConfig) -> int:
    """Draw the demo images that are missing in the output folder; returns the exit code.

    UserError if the folder cannot be written, or contains other files or demo images with other settings.
    """
    num_workers = max(1, resolve_num_workers(config.num_workers))
    with output_folder(config.output_dir, "demo") as folder:
        settings = {name: getattr(config, name) for name in SETTINGS}
        claim_settings(folder / SETTINGS_NAME, settings, f"--output_dir {folder}")
        missing = [index for index in range(config.count) if not _path(folder, index).exists()]
        draw = partial(_draw_and_save, folder, config)
        workers = max(1, min(num_workers, len(missing)))
        try:
            results = run_tasks(draw, missing, workers, Limits(DRAWING_SECONDS))
            done = config.count - len(missing)
            with Progress("demo", config.count, "image", done=done) as bar, closing(results):
                for _, failure in results:
                    if isinstance(failure, Failure):
                        raise DataError(f"an image cannot be drawn: {failure.detail}: lower --num_workers")
                    bar.update()
        finally:
            remove_temporary(folder)  # processes that were ended while they wrote leave them
    console.info(f"{folder}: {config.count} images, {len(missing)} of them drawn now")
    return 0


def _path(folder: Path, index: int) -> Path:
    return folder / f"demo_{index:05d}.png"


def _draw_and_save(folder: Path, config: DemoConfig, index: int) -> None:
    image = draw_image(config.target_size, config.seed, index)
    replace_bytes(_path(folder, index), bytes(encode(image, "png")))


# ---- Drawing -----------------------------------------------------------------------------------------------

# sRGB colours of scenes: foliage, sand and sea, brick and plaster, autumn, stone, flowers, dusk, snow.
PALETTES = (
    ((38, 58, 28), (84, 112, 44), (148, 158, 80), (92, 74, 50), (190, 196, 160)),
    ((208, 186, 144), (160, 130, 92), (62, 116, 148), (150, 190, 206), (238, 232, 214)),
    ((150, 78, 56), (196, 170, 144), (98, 92, 88), (222, 214, 198), (60, 66, 78)),
    ((172, 84, 30), (206, 146, 48), (110, 52, 30), (72, 76, 40), (226, 198, 140)),
    ((118, 116, 112), (74, 74, 78), (166, 160, 148), (132, 122, 100), (208, 206, 202)),
    ((196, 62, 88), (70, 104, 54), (228, 196, 84), (130, 92, 166), (236, 222, 226)),
    ((34, 40, 66), (96, 72, 104), (188, 106, 82), (232, 168, 110), (24, 24, 34)),
    ((222, 228, 236), (154, 172, 192), (88, 98, 110), (58, 66, 60), (246, 246, 244)),
)
LEAVES = 1000  # maximum; they cover most of the ground and take 0.1 s on one core at 256 px
SMALLEST, LARGEST = 1 / 80, 1 / 3  # radii as fractions of the image's side
SOFTNESS = 1.5  # width of an edge at 256 px, in px


def draw_image(size: int, seed: int, index: int) -> np.ndarray:
    """Draw image `index` of the set `seed`: uint8 (size, size, 3), the same on every machine."""
    chance = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, index])))
    palette = np.array(PALETTES[_below(chance, len(PALETTES))], dtype=np.float32) / np.float32(255)
    textures = [  # fine, ridges, cloud: values about -1 to 1
        _fractal(chance, size, keep=1.0),
        1 - 3 * np.abs(_fractal(chance, size, keep=0.8, coarsest=size / 8)),
        _fractal(chance, size, keep=0.55),
    ]
    down = np.linspace(0, 1, size, dtype=np.float32)[:, None]
    blend = np.clip(down + np.float32(0.25) * textures[2], 0, 1)[..., None]
    first, second = _two_colors(chance, palette)
    canvas = (first + (second - first) * blend) * (1 + np.float32(0.1) * textures[0][..., None])
    share = 0.25 + 0.75 * chance.random()  # few shapes on an open ground, up to a covered ground
    for _ in range(int(LEAVES * share)):
        _draw_leaf(chance, canvas, palette, textures)
    return (np.clip(canvas, 0, 1) * np.float32(255) + np.float32(0.5)).astype(np.uint8)


def _below(chance: np.random.Generator, count: int) -> int:
    return int(chance.random() * count)


def _two_colors(chance: np.random.Generator, palette: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return palette[_below(chance, len(palette))], palette[_below(chance, len(palette))]


def _unit_vector(chance: np.random.Generator) -> tuple[np.float32, np.float32]:
    # From a point in the unit disc, without sin and cos, whose last bit differs between machines.
    while True:
        x, y = (2 * value - 1 for value in chance.random(2).tolist())
        length = sqrt(x * x + y * y)
        if 0.1 < length <= 1:
            return np.float32(x / length), np.float32(y / length)


def _fractal(
    chance: np.random.Generator, size: int, *, keep: float, coarsest: float | None = None
) -> np.ndarray:
    """Noise (S, S) in octaves from `coarsest` px down to 2 px, each `keep` times as strong as the one before.

    With keep = 1, every octave is equally strong: amplitudes fall as 1/f.
    """
    cell = coarsest or size / 2
    total = np.zeros((size, size), dtype=np.float32)
    strength = 1.0
    power = 0.0
    while cell >= 1.9:
        total += np.float32(strength) * _value_noise(chance, size, cell)
        power += strength * strength
        strength *= keep
        cell /= 2
    return total * np.float32(1.6 / sqrt(power or 1.0))  # value noise has a standard deviation of about 0.4


def _value_noise(chance: np.random.Generator, size: int, cell: float) -> np.ndarray:
    """Random values from -1 to 1 on a lattice, interpolated smoothly: (S, S)."""
    position = np.arange(size, dtype=np.float32) / np.float32(cell)
    whole = np.floor(position).astype(np.int64)
    part = position - np.floor(position)
    weight = part * part * (3 - 2 * part)
    lattice = chance.random((whole[-1] + 2, whole[-1] + 2), dtype=np.float32) * 2 - 1
    lattice = lattice[whole] + (lattice[whole + 1] - lattice[whole]) * weight[:, None]  # (S, lattice columns)
    left = lattice[:, whole]
    return left + (lattice[:, whole + 1] - left) * weight  # (S, S)


def _draw_leaf(
    chance: np.random.Generator, canvas: np.ndarray, palette: np.ndarray, textures: list[np.ndarray]
) -> None:
    """Draw an ellipse, a polygon or a blob with its shadow: in the window around it."""
    size = len(canvas)
    a, b, c, d, e, f, g, h = chance.random(8).tolist()
    small, large = 1 / (SMALLEST * size) ** 2, 1 / (LARGEST * size) ** 2
    radius = 1 / sqrt(small - c * (small - large))  # density r^-3 between the two radii
    stretch = 1 + 2 * d * d  # long axis over short axis
    reach = radius * stretch * 1.5 + 2
    x, y = a * size, b * size
    top = max(0, int(y - reach))
    bottom = min(size, int(y + reach) + 1)
    left = max(0, int(x - reach))
    right = min(size, int(x + reach) + 1)
    dy = ((np.arange(top, bottom, dtype=np.float32) - np.float32(y)) / np.float32(radius))[:, None]
    dx = ((np.arange(left, right, dtype=np.float32) - np.float32(x)) / np.float32(radius))[None, :]
    row, column = int(e * (size - bottom + top)), int(f * (size - right + left))
    part = slice(row, row + bottom - top), slice(column, column + right - left)
    cos, sin = _unit_vector(chance)
    along = (dx * cos + dy * sin) / np.float32(stretch)
    across = dy * cos - dx * sin
    distance = np.sqrt(along * along + across * across)  # 0 in the middle, 1 on the edge
    kind = _below(chance, 3)
    if kind == 1:
        distance = np.maximum(np.abs(along), np.abs(across))
        for _ in range(3 + _below(chance, 4)):
            normal_x, normal_y = _unit_vector(chance)
            distance = np.maximum(distance, (along * normal_x + across * normal_y) / np.float32(0.85))
    elif kind == 2:
        distance = distance + np.float32(0.3) * textures[2][part]

    window = canvas[top:bottom, left:right]
    if radius > 4:  # the shadow around it
        window *= 1 - np.float32(0.4) * np.clip((np.float32(1.4) - distance) * 2, 0, 1)[..., None]
    sharp = np.float32(radius / (SOFTNESS * max(1.0, size / 256)))
    cover = np.clip((1 - distance) * sharp + np.float32(0.5), 0, 1)[..., None]
    first, second = _two_colors(chance, palette)
    color = (first + (second - first) * np.float32(0.5 * g)) * np.float32(0.7 + 0.6 * chance.random())
    shade = (1 + np.float32(0.2) * (dx + dy))[..., None]
    texture = textures[_below(chance, 3)][part][..., None]
    window += cover * (color * shade * (1 + np.float32(0.04 + 0.22 * h * h) * texture) - window)
