"""Charts as PNG images with matplotlib, without pyplot, so that nothing in this process changes."""

import io
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vae.system import console
from vae.system.files import replace_bytes

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


def write_chart(path: Path, draw: Callable[[], bytes]) -> bool:
    """Write the PNG file that `draw` returns; if it cannot be drawn, print a warning and return False."""
    try:
        with own_defaults():
            content = draw()
    except Exception as error:  # whatever it is, a picture must not end what has written its numbers
        console.warning(f"{path} cannot be drawn: {str(error) or type(error).__name__}")
        return False
    replace_bytes(path, content)
    return True


@contextmanager
def own_defaults() -> Iterator[None]:
    """Matplotlib with its own defaults, whatever MPLBACKEND and a matplotlibrc of the user set.

    Notebooks set MPLBACKEND for every command that they start, also to a backend that is not installed for
    it: importing matplotlib fails then. Afterwards the process is as before.
    """
    backend = None if "matplotlib" in sys.modules else os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib  # takes half a second, and only charts need it
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    if backend:
        with suppress(ValueError):  # it is not installed
            matplotlib.rcParams["backend"] = backend
    logger = logging.getLogger("matplotlib")
    level = logger.level
    # It reports that it lists the fonts, once per computer, or that it cannot keep the list.
    logger.setLevel(logging.ERROR)
    try:
        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            yield
    finally:
        logger.setLevel(level)


def new_figure(
    width: int = PAGE_WIDTH, height: int = PAGE_HEIGHT, rows: int = 1, columns: int = 1
) -> tuple[Any, list[Any]]:
    """A figure of `width` x `height` px, and its axes row by row."""
    from matplotlib.figure import Figure

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
