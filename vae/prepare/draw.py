"""Synthetic images from a dead-leaves model: opaque shapes of all sizes that occlude one another.

Lee, Mumford and Huang, "Occlusion models for natural images", IJCV 41 (2001): if the density of the
shapes' radii falls as r^-3, the images have the statistics of photographs at every scale, with hard edges
and a power spectrum near 1/f^2. Each shape contains a gradient, shading, and fractal noise with equal
strength per octave, which has the same spectrum. Soft edges and shadows make our spectrum steeper: 1/f^2.9
from 0.02 to 0.3 cycles per pixel at 256 px.

The images are drawn with PCG64 and + - * / sqrt only. IEEE 754 defines their rounding, so the pixels are the
same on every machine. Shapes: canvas (S, S, 3) and textures (S, S), float32; a window (h, w) is a part of
either.
"""

from math import sqrt
from typing import NamedTuple

import numpy as np

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
LEAVES = 1000  # at most; they cover most of the ground and take 0.1 s on one core at 256 px
SMALLEST, LARGEST = (1 / 160, 1 / 50), 1 / 3  # radii as fractions of the image's side


class Leaf(NamedTuple):
    """One shape before it is drawn; lengths in px, colours from 0 to 1."""

    kind: str
    x: float
    y: float
    radius: float
    stretch: float  # long axis over short axis
    direction: tuple[float, ...]  # unit vector (x, y) of the long axis
    corners: int
    softness: float  # width of the edge
    color: tuple[float, ...]  # red, green, blue
    texture: int
    texture_at: tuple[float, ...]  # (row, column) as fractions
    contrast: float
    tint: tuple[float, ...]  # red, green, blue: strength of the texture in each channel
    roundness: float
    slope: tuple[float, ...]  # (x, y): brightness gradient across the shape


def draw_image(size: int, seed: int, index: int) -> np.ndarray:
    """Draw image `index` of the set `seed`: uint8 (size, size, 3), the same on every machine."""
    chance = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, index])))
    palette = np.array(PALETTES[_below(chance, len(PALETTES))], dtype=np.float32) / np.float32(255)
    textures = _draw_textures(chance, size)
    light = _unit_vector(chance)
    canvas = _draw_ground(chance, size, palette, textures)
    share = 0.25 + 0.75 * chance.random()  # from few shapes on an open ground to a covered ground
    smallest = size * (SMALLEST[0] + (SMALLEST[1] - SMALLEST[0]) * chance.random())
    softest = max(1.0, size / 256) * (1 + 2 * chance.random())
    for _ in range(int(LEAVES * share)):
        _draw_leaf(canvas, _choose_leaf(chance, size, palette, light, smallest, softest), textures, chance)
    canvas *= _light_falloff(chance, size)[..., None]
    return (np.clip(canvas, 0, 1) * np.float32(255) + np.float32(0.5)).astype(np.uint8)


def _below(chance: np.random.Generator, count: int) -> int:
    return int(chance.random() * count)


def _unit_vector(chance: np.random.Generator) -> tuple[float, float]:
    # From a point in the unit disc, without sin and cos, whose last bit differs between machines.
    while True:
        x, y = (2 * value - 1 for value in chance.random(2).tolist())
        length = sqrt(x * x + y * y)
        if 0.1 < length <= 1:
            return x / length, y / length


def _draw_textures(chance: np.random.Generator, size: int) -> list[np.ndarray]:
    """Six fields (S, S) with values about -1 to 1: rough, fine, grain, ridges, stripes and cloud."""
    rough = _fractal(chance, size, keep=1.0)
    fine = _fractal(chance, size, keep=1.0, coarsest=size / 16)
    grain = _fractal(chance, size, keep=1.0, coarsest=size / 6, stretch=6)
    ridges = 1 - 3 * np.abs(_fractal(chance, size, keep=0.8, coarsest=size / 8))
    period = size / (12 + 24 * chance.random())
    along = np.arange(size, dtype=np.float32)[:, None] / np.float32(period)
    phase = along + 2 * _fractal(chance, size, keep=0.5, coarsest=size / 3)
    stripes = 4 * np.abs(phase - np.floor(phase) - np.float32(0.5)) - 1 + np.float32(0.5) * fine
    cloud = _fractal(chance, size, keep=0.55)
    return [rough, fine, grain, ridges, stripes, cloud]


def _fractal(
    chance: np.random.Generator, size: int, *, keep: float, coarsest: float = 0.0, stretch: float = 1.0
) -> np.ndarray:
    """Noise (S, S) in octaves from `coarsest` px down to 2 px, each `keep` times as strong as the one before.

    With keep = 1, every octave is equally strong: amplitudes fall as 1/f. `stretch` elongates it along x.
    """
    cell = coarsest or size / 2
    total, strength, power = np.zeros((size, size), dtype=np.float32), 1.0, 0.0
    while cell >= 1.9:
        total += np.float32(strength) * _value_noise(chance, size, cell, cell * stretch)
        power += strength * strength
        strength *= keep
        cell /= 2
    return total * np.float32(1.6 / sqrt(power or 1.0))  # value noise has a standard deviation of about 0.4


def _value_noise(chance: np.random.Generator, size: int, cell_y: float, cell_x: float) -> np.ndarray:
    """Random values from -1 to 1 on a lattice, interpolated smoothly: (S, S)."""
    (rows, row_weight), (columns, column_weight) = (
        _lattice_position(size, cell) for cell in (cell_y, cell_x)
    )
    lattice = chance.random((rows[-1] + 2, columns[-1] + 2), dtype=np.float32) * 2 - 1
    row_weight = row_weight[:, None]
    lattice = lattice[rows] + (lattice[rows + 1] - lattice[rows]) * row_weight  # (S, lattice columns)
    left = lattice[:, columns]
    return left + (lattice[:, columns + 1] - left) * column_weight  # (S, S)


def _lattice_position(size: int, cell: float) -> tuple[np.ndarray, np.ndarray]:
    position = np.arange(size, dtype=np.float32) / np.float32(cell)
    whole = np.floor(position)
    part = position - whole
    return whole.astype(np.int64), part * part * (3 - 2 * part)


def _draw_ground(
    chance: np.random.Generator, size: int, palette: np.ndarray, textures: list[np.ndarray]
) -> np.ndarray:
    """The background of all leaves: a blend of two colours, and one texture."""
    first, second = (palette[_below(chance, len(palette))] for _ in range(2))
    down = np.linspace(0, 1, size, dtype=np.float32)[:, None]
    blend = np.clip(down + np.float32(0.25) * textures[5], 0, 1)[..., None]
    texture = textures[_below(chance, len(textures))][..., None]
    return (first + (second - first) * blend) * (1 + np.float32(0.12 * chance.random()) * texture)


def _choose_leaf(
    chance: np.random.Generator,
    size: int,
    palette: np.ndarray,
    light: tuple[float, float],
    smallest: float,
    softest: float,
) -> Leaf:
    small, large = 1 / (smallest * smallest), 1 / (LARGEST * size) ** 2
    a, b, c, d, e, f, g, h, i, j, k = chance.random(11).tolist()
    first, second = (palette[_below(chance, len(palette))] for _ in range(2))
    brightness = 0.7 + 0.6 * d
    color = (first + (second - first) * np.float32(0.5 * e)) * np.float32(brightness)
    lit = 0.35 * f
    return Leaf(
        kind=("ellipse", "ellipse", "polygon", "polygon", "lens", "bar", "blob", "blob")[int(8 * a)],
        x=b * size,
        y=c * size,
        radius=1 / sqrt(small - g * (small - large)),  # density r^-3 between the two radii
        stretch=1 + 2 * h * h,
        direction=_unit_vector(chance),
        corners=3 + int(4 * h),
        softness=1 + (softest - 1) * i,
        color=tuple(color.tolist()),
        texture=_below(chance, 6),
        texture_at=tuple(chance.random(2).tolist()),
        contrast=0.04 + 0.22 * j * j,
        tint=tuple(0.6 + 0.8 * value for value in chance.random(3).tolist()),
        roundness=0.4 * k,
        slope=(lit * light[0], lit * light[1]),
    )


def _draw_leaf(
    canvas: np.ndarray, leaf: Leaf, textures: list[np.ndarray], chance: np.random.Generator
) -> None:
    size = len(canvas)
    reach = leaf.radius * leaf.stretch * 1.5 + 2
    top, bottom = max(0, int(leaf.y - reach)), min(size, int(leaf.y + reach) + 1)
    left, right = max(0, int(leaf.x - reach)), min(size, int(leaf.x + reach) + 1)
    height, width = bottom - top, right - left
    if height <= 0 or width <= 0:
        return
    dy = (np.arange(top, bottom, dtype=np.float32) - np.float32(leaf.y))[:, None]
    dx = (np.arange(left, right, dtype=np.float32) - np.float32(leaf.x))[None, :]
    row, column = int(leaf.texture_at[0] * (size - height)), int(leaf.texture_at[1] * (size - width))
    texture = textures[leaf.texture][row : row + height, column : column + width]
    cloud = textures[5][row : row + height, column : column + width]
    distance = _distance(leaf, dx, dy, cloud, chance)  # (h, w): 0 in the middle, 1 on the edge

    window = canvas[top:bottom, left:right]
    if leaf.radius > 4:  # the shadow around it
        window *= 1 - np.float32(0.4) * np.clip((np.float32(1.4) - distance) * 2, 0, 1)[..., None]
    cover = np.clip((1 - distance) * np.float32(leaf.radius / leaf.softness) + np.float32(0.5), 0, 1)[
        ..., None
    ]
    shade = (
        1
        + (dx * np.float32(leaf.slope[0]) + dy * np.float32(leaf.slope[1])) / np.float32(leaf.radius)
        - np.float32(leaf.roundness) * np.minimum(distance * distance, 1)
    )
    color, tint = (np.array(value, dtype=np.float32) for value in (leaf.color, leaf.tint))
    painted = color * shade[..., None] * (1 + np.float32(leaf.contrast) * tint * texture[..., None])
    window += cover * (painted - window)


def _distance(
    leaf: Leaf, dx: np.ndarray, dy: np.ndarray, cloud: np.ndarray, chance: np.random.Generator
) -> np.ndarray:
    """Distance of each pixel of the window from the leaf's centre, in units where its edge is 1: (h, w)."""
    cos, sin = (np.float32(value / leaf.radius) for value in leaf.direction)
    along = (dx * cos + dy * sin) / np.float32(leaf.stretch)
    across = dy * cos - dx * sin
    if leaf.kind == "polygon":
        distance = np.zeros_like(along)
        for _ in range(leaf.corners + 2):
            x, y = _unit_vector(chance)
            reach = np.float32(0.75 + 0.25 * chance.random())
            distance = np.maximum(distance, (along * np.float32(x) + across * np.float32(y)) / reach)
        return np.maximum(distance, np.maximum(np.abs(along), np.abs(across)))
    if leaf.kind == "bar":
        return np.maximum(np.abs(along), np.abs(across) * 4)
    if leaf.kind == "lens":  # the overlap of two discs: the outline of a leaf
        return np.sqrt(along * along + (np.abs(across) * 2 + np.float32(0.75)) ** 2) * np.float32(0.8)
    distance = np.sqrt(along * along + across * across)
    return distance + np.float32(0.3) * cloud if leaf.kind == "blob" else distance


def _light_falloff(chance: np.random.Generator, size: int) -> np.ndarray:
    """Brightness over the image: higher on one side, lower in the corners."""
    x, y = _unit_vector(chance)
    strength, corner = (np.float32(value) for value in (0.25 * chance.random(), 0.2 * chance.random()))
    side = np.linspace(-1, 1, size, dtype=np.float32)
    across, down = side[None, :], side[:, None]
    return 1 + strength * (np.float32(x) * across + np.float32(y) * down) - corner * (across**2 + down**2) / 2
