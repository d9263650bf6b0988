"""The HTML page of an analysis: its charts, for the template analysis.html.jinja."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vae.charts import BLUE, PAGE_SCALE, new_figure, png
from vae.html import data_uri, page_chart, write_page
from vae.prepare.dataset_stats import COLUMNS, Column, Rows
from vae.system.console import printable

MAX_BINS = 40


def write_analysis_page(
    path: Path,
    stats: dict[str, Any],
    values: Mapping[str, np.ndarray],
    sections: Mapping[str, Rows],
    thumbnails: Mapping[int, bytes],
) -> None:
    """Write the page; `thumbnails` has a JPEG of each example image, by its number in the table."""
    figures = {
        heading: [
            [
                {"name": printable(name), "caption": caption, "uri": data_uri(thumbnails[n], "image/jpeg")}
                if n in thumbnails
                else {"name": printable(name), "caption": caption, "uri": None}
                for n, name, caption in row
            ]
            for row in rows
        ]
        for heading, rows in sections.items()
    }
    charts = [_chart(column, values[name], stats["quantiles"][name]) for name, column in COLUMNS.items()]
    write_page(path, "analysis.html.jinja", stats=stats, charts=charts, sections=figures)


def _chart(column: Column, values: np.ndarray, quantiles: Mapping[str, float | None]) -> dict[str, Any]:
    """A histogram and what is below it."""
    edges = bin_edges(values, column.is_log)
    if not len(edges):
        return {"title": column.title, "note": "", "uri": "", "summary": "no image has this value"}
    figure, (axes,) = new_figure()
    axes.set_xscale("log" if column.is_log else "linear")
    axes.hist(values, edges, color=BLUE)
    axes.minorticks_off()
    ticks = edges[[0, len(edges) // 2, -1]]
    axes.set_xticks(ticks, [_number_text(tick) for tick in ticks])
    label = f"{column.title}: {_number_text(edges[0])} to {_number_text(edges[-1])}"
    note = column.unit + (", log scale" if column.is_log else "")
    median, low, high = (_number_text(quantiles[name] or 0.0) for name in ("p50", "p5", "p95"))
    chart = page_chart(png(figure, PAGE_SCALE), column.title, note, label)
    return {**chart._asdict(), "summary": f"median {median}, 90 % {low} to {high}"}


def bin_edges(values: np.ndarray, is_log: bool) -> np.ndarray:
    """Edges of bins for the finite values; at equal ratios, for those above 0, if `is_log`."""
    values = values[np.isfinite(values) & ((values > 0) | (not is_log))]
    if not len(values):
        return np.zeros(0)
    low, high = float(values.min()), float(values.max())
    if high - low <= 1e-9 * max(abs(high), 1.0):
        low, high = (low / 1.1, high * 1.1) if is_log else (low - 0.5, high + 0.5)
    bins = int(np.clip(2 * len(values) ** (1 / 3), 8, MAX_BINS))  # Rice's rule
    edges = np.geomspace(low, high, bins + 1) if is_log else np.linspace(low, high, bins + 1)
    edges[0], edges[-1] = low, high  # rounding must exclude no image
    return edges


def _number_text(value: float) -> str:
    return f"{value:,.0f}" if value == 0 or abs(value) >= 100 else f"{value:.3g}"
