"""Charts as PNG images with matplotlib, without pyplot, so that nothing in this process changes."""

import io
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

BLUE, ORANGE, GREEN, GREY = "#1f77b4", "#d9640a", "#2ca02c", "#7f7f7f"
AXIS, GRID, MARK = "#5a5a5a", "#e1e1e1", "#a8a8a8"
DPI = 100
PAGE_WIDTH, PAGE_HEIGHT = 440, 240  # px, of a chart in a page
PAGE_SCALE = 2  # for screens with two pixels per px

Points = Sequence[tuple[float, float]]


class Line(NamedTuple):
    """Points (x, y) in the order of x."""

    colour: str
    points: Points
    name: str = ""  # for the legend, with the last value
    sets_range: bool = True  # the y axis includes the line; otherwise its parts outside the range are hidden
    dashes: tuple[int, ...] | None = None  # points drawn, points left out, ...


def new_figure(
    width: int = PAGE_WIDTH, height: int = PAGE_HEIGHT, rows: int = 1, columns: int = 1
) -> tuple[Any, list[Any]]:
    """A figure of `width` x `height` px, and its axes row by row."""
    # It reports that it lists the fonts, once per computer, or that it cannot keep the list.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib.figure import Figure  # half a second, and only charts need it

    figure = Figure((width / DPI, height / DPI), dpi=DPI)
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)  # inches
    axes = [figure.add_subplot(rows, columns, index + 1) for index in range(rows * columns)]
    for panel in axes:
        panel.grid(axis="y", color=GRID)
        panel.set_axisbelow(True)
        panel.tick_params(colors=AXIS)
        panel.spines[:].set_color(AXIS)
    return figure, axes


def draw_lines(axes: Any, lines: Iterable[Line], *, quantile: float = 1.0) -> None:
    """Draw lines with a legend above; values above the `quantile` of y are outside the range."""
    lines = [line for line in lines if line.points]
    values = [y for line in lines if line.sets_range for _, y in line.points]
    low, high = value_range(values, quantile)
    if axes.get_yscale() == "linear":
        axes.set_ylim(low, high)
    for line in lines:
        x, y = zip(*line.points, strict=True)
        where = "" if line.sets_range or low <= y[-1] else " (below)"
        axes.plot(
            x,
            y,
            color=line.colour,
            linestyle=(0, line.dashes),
            marker="o" if len(x) == 1 else "",
            label=f"{line.name} {y[-1]:.4g}{where}" if line.name else None,
        )
    if any(line.name for line in lines):
        above = {
            "loc": "lower right",
            "bbox_to_anchor": (1.01, 0.98),
            "ncols": len(lines),
            "columnspacing": 1,
        }
        axes.legend(**above, frameon=False, fontsize=9, labelcolor="linecolor", handlelength=0.8)
    if not values:
        axes.text(0.5, 0.5, "no values", color=AXIS, ha="center", transform=axes.transAxes)


def mark_x(axes: Any, marks: Mapping[float, str]) -> None:
    """Vertical lines with labels at the lower end."""
    for x, label in marks.items():
        axes.axvline(x, color=MARK, linewidth=1, zorder=0.5)
        axes.text(x, 0.02, f" {label}", color=AXIS, transform=axes.get_xaxis_transform())


def value_range(values: Sequence[float], quantile: float = 1.0) -> tuple[float, float]:
    """Lower and upper end of an axis: all values up to the quantile, and a margin of 5 %."""
    if not values:
        return 0.0, 1.0
    low, high = np.quantile(values, [0, quantile]).tolist()
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = low - (abs(low) or 1) * 0.1, high + (abs(high) or 1) * 0.1
    margin = (high - low) * 0.05
    return low - margin, high + margin


def finite_points(records: Iterable[Mapping[str, Any]], name: str) -> Points:
    """(step, value) of the records that have a finite value of `name`."""
    points = ((float(record["step"]), record.get(name)) for record in records)
    return [(step, value) for step, value in points if value is not None and math.isfinite(value)]


def png(figure: Any, scale: int = 1) -> bytes:
    """The PNG file of a figure; the same figure gives the same bytes."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=scale * DPI, metadata={"Software": None})
    return content.getvalue()
