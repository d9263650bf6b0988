"""One chart with lines, drawn with Pillow: axes, ticks, legend."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from PIL import ImageDraw, ImageFont

Point = tuple[float, float]
Colour = tuple[int, int, int]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

BLUE, ORANGE, GREY, GREEN = (31, 119, 180), (255, 127, 14), (127, 127, 127), (44, 160, 44)
_AXIS, _GRID = (90, 90, 90), (225, 225, 225)


@dataclass(frozen=True)
class Line:
    """Points (x, y) in the order of x, and the name for the legend."""

    name: str
    colour: Colour
    points: list[Point]
    sets_range: bool = True  # the y axis includes the line; otherwise its parts outside the range are hidden


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels."""

    left: float
    top: float
    right: float
    bottom: float


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, about `count`."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def value_range(values: Iterable[float], quantile: float = 1.0) -> tuple[float, float]:
    """Lower and upper end of an axis: all values up to the quantile, and a margin of 5 %."""
    ordered = sorted(values) or [0.0, 1.0]
    low, high = ordered[0], ordered[int(quantile * (len(ordered) - 1))]
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = low - (abs(low) or 1) * 0.1, high + (abs(high) or 1) * 0.1
    margin = (high - low) * 0.05
    return low - margin, high + margin


@dataclass(frozen=True)
class Axes:
    """The area of a chart: x from 0 to `last_x`, y from `low` to `high`."""

    area: Box
    last_x: float
    low: float
    high: float

    def place(self, x: float, y: float) -> Point:
        """The pixel of (x, y); values outside of the y axis are at its end."""
        share = (min(max(y, self.low), self.high) - self.low) / (self.high - self.low)
        width, height = self.area.right - self.area.left, self.area.bottom - self.area.top
        return self.area.left + x / self.last_x * width, self.area.bottom - share * height


def draw_chart(
    draw: ImageDraw.ImageDraw,
    box: Box,
    title: str,
    lines: list[Line],
    *,
    last_x: float,
    marks: dict[float, str],
    quantile: float = 1.0,
    font_size: int = 14,
) -> None:
    """Draw lines over x from 0 to `last_x` into `box`, with a labelled vertical line at each of `marks`.

    Values above the `quantile` of y are cut off at the upper edge.
    """
    font = ImageFont.load_default(font_size)
    text_height = 2.2 * font_size
    area = Box(
        box.left + 5 * font_size, box.top + text_height, box.right - font_size, box.bottom - text_height
    )
    values = [y for line in lines if line.sets_range for _, y in line.points]
    axes = Axes(area, max(last_x, 1.0), *value_range(values, quantile))
    draw.text((area.left, box.top), title, fill="black", font=font)
    _draw_axes(draw, axes, marks, font, font_size)
    for line in lines:
        shown = [axes.place(x, y) for x, y in line.points if line.sets_range or axes.low <= y <= axes.high]
        draw.line(shown, fill=line.colour, width=max(1, font_size // 6))
        for x, y in shown if len(shown) == 1 else []:
            draw.ellipse([x - 3, y - 3, x + 3, y + 3], fill=line.colour)
    _draw_legend(draw, axes, [line for line in lines if line.points], font, font_size)
    if not values:
        middle = (area.left + area.right) / 2, (area.top + area.bottom) / 2
        draw.text(middle, "no values", fill=_AXIS, font=font, anchor="mm")


def _draw_axes(
    draw: ImageDraw.ImageDraw, axes: Axes, marks: dict[float, str], font: Font, font_size: int
) -> None:
    area = axes.area
    for value in ticks(axes.low, axes.high):
        x, y = axes.place(0, value)
        draw.line([(x, y), (area.right, y)], fill=_GRID, width=1)
        draw.text((x - font_size / 2, y), f"{value:.4g}", fill=_AXIS, font=font, anchor="rm")
    for value in ticks(0, axes.last_x):
        x, y = axes.place(value, axes.low)
        label = f"{value:g}" if value else "step 0"
        draw.text((x, y + font_size / 2), label, fill=_AXIS, font=font, anchor="mt")
    for step, label in marks.items():
        x, _ = axes.place(step, axes.low)
        draw.line([(x, area.top), (x, area.bottom)], fill=_GRID, width=2)
        draw.text((x + 3, area.bottom - font_size / 2), label, fill=_AXIS, font=font, anchor="ls")
    draw.rectangle([area.left, area.top, area.right, area.bottom], outline=_AXIS, width=1)


def _draw_legend(
    draw: ImageDraw.ImageDraw, axes: Axes, lines: list[Line], font: Font, font_size: int
) -> None:
    """The names and last values of the lines, above the chart at the right."""
    right, middle = axes.area.right, axes.area.top - font_size
    for line in reversed(lines):
        value = line.points[-1][1]
        where = "" if line.sets_range or axes.low <= value else " (below)"
        text = f"{line.name} {value:.4g}{where}"
        draw.text((right, middle), text, fill=line.colour, font=font, anchor="rm")
        right -= draw.textlength(text, font=font) + font_size
