"""`--mode analyze`: measure a set of images; write statistics, a table of near duplicates, and histograms."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vae.charts import BLUE, new_figure, png
from vae.config.prepare_flags import AnalyzeConfig
from vae.prepare.check import Check
from vae.prepare.dataset_stats import COLUMNS, Column, Groups, exact_groups, examples, near_groups, summarize
from vae.prepare.folders import check_apart, inside
from vae.prepare.reasons import broken_lines, count_rejected, group_lines
from vae.prepare.rows import open_rows, rules_of
from vae.prepare.selection import drop_exact, name_near_groups
from vae.prepare.source import open_source
from vae.prepare.table import Table
from vae.system import console
from vae.system.errors import DataError
from vae.system.files import replace_bytes, write_csv_rows, write_json

STATS, HISTOGRAMS, NEAR = "stats.json", "histograms.png", "near_duplicates.csv"
MAX_BINS = 40
WIDTH, HEIGHT = 1280, 1200  # px, of the histograms


def run_analyze(config: AnalyzeConfig) -> int:
    """Analyze a source, or a part of it, and print a summary; returns the exit code.

    DataError if no image can be read, and UserError for unusable flags.
    """
    check_apart(config.input_dir, config.output_dir)
    source = open_source(config)
    with open_rows(config, "analyze", rules_of(config, source)) as (root, folder):
        folder.run(source, Check(config, measures=True), "analyze")
        if config.part:
            console.info(folder.part_text(source))
            return 0
        return _report(config, Table(folder, source.blocks), root)


def _report(config: AnalyzeConfig, table: Table, root: Path) -> int:
    """Write the statistics, the histograms and the list of near duplicates."""
    if not table.accepted:
        (reason, _), *_ = table.counts() or [("no_image", 0)]
        raise DataError(
            f"--input_dir {config.input_dir}: none of {count_rejected(table)} images can be read, for "
            f"example {', '.join(name for name, _ in table.examples(reason, 1))} ({reason}): "
            "--mode validate reports every file"
        )
    drop_exact(table)
    name_near_groups(table)
    near = near_groups(table)
    exact = exact_groups(table)
    stats, values = summarize(table, near, exact, config.input_dir)
    for name in (STATS, HISTOGRAMS, NEAR):
        inside(root, name)
    write_json(root / STATS, {**stats, "examples": examples(table)}, indent=1)
    write_csv_rows(root / NEAR, _near_duplicate_rows(near))
    replace_bytes(root / HISTOGRAMS, draw_histograms(values, stats["quantiles"]))
    console.info("\n".join([*_summary_lines(stats, near, root), *broken_lines(table)]))
    return 0


def _near_duplicate_rows(near: Groups) -> Iterator[tuple[Any, ...]]:
    """The rows of the list of near duplicates; --drop_duplicates keeps the first image of each group."""
    yield "group", "path", "width", "height", "keep"
    for group, images in near.items():
        for image in images:
            yield group, image.name, image.width, image.height, int(image == images[0])


def _summary_lines(stats: dict[str, Any], near: Groups, root: Path) -> list[str]:
    rejected = sum(one["count"] for one in stats["rejected"].values())
    sizes = [
        f"{one['image_size']}: {one['images']} ({100 * one['share']:.0f} %)" for one in stats["resolutions"]
    ]
    names = {group: [image.name for image in images] for group, images in near.items()}
    return [
        f"{stats['input_dir']}: {stats['images']} images, {rejected} rejected",
        f"  at least as large as --image_size  {', '.join(sizes)}",
        f"  exact copies: {stats['exact_duplicates']['superfluous']}",
        *group_lines(names, f"all listed in {os.path.join(root, NEAR)}"),
        f"  statistics: {root / STATS}, histograms: {root / HISTOGRAMS}",
    ]


def draw_histograms(
    values: Mapping[str, np.ndarray], quantiles: Mapping[str, Mapping[str, float | None]]
) -> bytes:
    """A PNG file with a histogram of each of COLUMNS."""
    figure, panels = new_figure(WIDTH, HEIGHT, rows=-(-len(COLUMNS) // 2), columns=2)
    for axes, (name, column) in zip(panels, COLUMNS.items(), strict=False):
        _draw(axes, column, values[name], quantiles[name])
    return png(figure)


def _draw(axes: Any, column: Column, values: np.ndarray, quantiles: Mapping[str, float | None]) -> None:
    """The numbers of images by value, below the median and the range of the middle 90 %."""
    edges = bin_edges(values, column.is_log)
    if not len(edges):
        axes.set_title(f"{column.title}: no image has this value", loc="left")
        return
    median, low, high = (_number_text(quantiles[name] or 0.0) for name in ("p50", "p5", "p95"))
    axes.set_title(f"{column.title}: median {median}, 90 % {low} to {high}", loc="left")
    axes.set_xscale("log" if column.is_log else "linear")
    axes.hist(values, edges, color=BLUE)
    axes.minorticks_off()
    ticks = edges[[0, len(edges) // 2, -1]]
    axes.set_xticks(ticks, [_number_text(tick) for tick in ticks])
    axes.set_xlabel(column.unit + (", log scale" if column.is_log else ""))


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
