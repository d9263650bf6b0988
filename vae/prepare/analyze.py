"""`--mode analyze`: measure a set of images; write statistics, a table of near duplicates, and histograms."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vae.charts import BLUE, new_figure, png, write_chart
from vae.config.prepare_flags import AnalyzeConfig
from vae.config.recipes import RECIPES
from vae.prepare.check import Check
from vae.prepare.database import sql
from vae.prepare.output_folders import check_apart
from vae.prepare.rejection_reasons import count_rejected, group_lines, print_summary
from vae.prepare.rows import open_rows, rules_of
from vae.prepare.source import open_source
from vae.prepare.table import EXACT, Table, drop_exact, flags, name_near_groups
from vae.system import console
from vae.system.console import printable
from vae.system.errors import DataError
from vae.system.files import write_csv_rows, write_json

# Image sizes of the profiles, in px, without the 128 px of the demo.
RESOLUTIONS = sorted({recipe.values["image_size"] for name, recipe in RECIPES.items() if name != "demo"})
QUANTILES = {"min": 0, "p1": 1, "p5": 5, "p25": 25, "p50": 50, "p75": 75, "p95": 95, "p99": 99, "max": 100}
EXAMPLES = 12  # images of each kind


class Column(NamedTuple):
    """A value of each image that has a histogram."""

    title: str
    unit: str
    is_log: bool  # whether its axis is logarithmic


COLUMNS = {
    "short_side": Column("Short side", "px", True),
    "aspect": Column("Aspect", "width / height", True),
    "megapixels": Column("Size", "megapixels", True),
    "bits_per_pixel": Column("File size", "bits per pixel", True),
    "brightness": Column("Brightness", "mean level, 0 to 255", False),
    "contrast": Column("Contrast", "standard deviation of levels", False),
    "sharpness": Column("Sharpness", "fine detail over contrast", True),
    "jpeg_quality": Column("JPEG quality", "estimated, 1 to 100", False),
}


def summarize(
    table: Table, near: dict[str, list[str]], input_dir: str
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The contents of the JSON file, and the value of each image for each of COLUMNS: NaN if it has none."""
    table.run(sql("readable"))
    columns = table.columns(sql("histogram_values"))
    values = {name: np.ma.filled(column, np.nan) for name, column in columns.items()}
    ((space, channels, shapes),) = table.all(sql("statistics"))
    rejected = {
        reason: {"count": count, "examples": [printable(name) for name, _ in table.examples(reason, 6)]}
        for reason, count in sorted(table.counts())
        if reason != EXACT
    }
    stats = {
        "input_dir": printable(input_dir),
        "images": len(values["aspect"]),
        "rejected": rejected,
        "formats": dict(
            table.all("SELECT format, count(*) AS c FROM readable GROUP BY format ORDER BY c DESC, format")
        ),
        "flags": {flag: count for flag, count, _ in flags(table)},
        "resolutions": [
            # Images that can be cropped at an image size without enlarging them.
            {"image_size": size, "images": images, "share": round(images / len(values["aspect"]), 6)}
            for size in RESOLUTIONS
            for images in [int((values["short_side"] >= size).sum())]
        ],
        "space": space,
        "channels": channels,
        "shapes": shapes,
        "quantiles": {name: _quantiles(column) for name, column in values.items()},
        "exact_duplicates": table.count("reason = ?", EXACT),
        "near_duplicates": {"groups": len(near), "images": sum(map(len, near.values()))},
    }
    return stats, values


def examples(table: Table) -> dict[str, list[str]]:
    """The names of example images by kind, after `summarize`."""
    kinds: list[dict[str, Any]] = list(map(json.loads, table.json_rows(sql("examples"), EXAMPLES)))
    return {kind: list(map(printable, names or ())) for kind, names in kinds[0].items()}


def _quantiles(values: np.ndarray) -> dict[str, float | None]:
    """Mean and percentiles; None if no image has the value."""
    values = values[np.isfinite(values)]
    if not len(values):
        return dict.fromkeys(["mean", *QUANTILES])
    numbers = [values.mean(), *np.percentile(values, list(QUANTILES.values()))]
    return {name: float(f"{value:.6g}") for name, value in zip(["mean", *QUANTILES], numbers, strict=True)}


STATS, HISTOGRAMS, NEAR = "stats.json", "histograms.png", "near_duplicates.csv"
MAX_BINS = 40
WIDTH, HEIGHT = 1280, 1200  # px, of the histograms


def run_analyze(config: AnalyzeConfig) -> int:
    """Analyze a source, or a part of it, and print a summary; returns the exit code.

    DataError if no image can be read, and UserError for unusable flags.
    """
    began = time.monotonic()
    check_apart(config.input_dir, config.output_dir)
    source = open_source(config)
    with open_rows(config, "analyze", rules_of(config, source)) as (root, folder):
        folder.run(source, Check(config, measures=True), "analyze")
        if config.part:
            console.info(folder.part_text(source))
            return 0
        return _report(config, Table(folder, source), root, began)


def _report(config: AnalyzeConfig, table: Table, root: Path, began: float) -> int:
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
    look_alikes = table.all(sql("near_groups"))
    write_csv_rows(root / NEAR, [("group", "path", "width", "height", "keep"), *look_alikes])
    near: dict[str, list[str]] = {}
    for group, name, *_ in look_alikes:
        near.setdefault(group, []).append(name)
    stats, values = summarize(table, near, config.input_dir)
    write_json(root / STATS, {**stats, "examples": examples(table)}, indent=1)
    has_chart = write_chart(root / HISTOGRAMS, lambda: draw_histograms(values, stats["quantiles"]))
    sizes = (f"{row['image_size']}: {row['images']} ({row['share']:.0%})" for row in stats["resolutions"])
    print_summary(
        table,
        f"{stats['input_dir']}: {stats['images']} images",
        began,
        f"  at least as large as --image_size  {', '.join(sizes)}",
        *group_lines(near, f"all listed in {root / NEAR}"),
        f"  statistics: {root / STATS}",
        *([f"  histograms: {root / HISTOGRAMS}"] if has_chart else []),
    )
    return 0


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
    bins = int(np.clip(2 * len(values) ** (1 / 3), 8, MAX_BINS))  # Rice's rule
    if not is_log:
        return np.histogram_bin_edges(values, bins)
    edges = np.exp(np.histogram_bin_edges(np.log(values), bins))  # equal values get bins around them
    edges[0], edges[-1] = min(edges[0], values.min()), max(edges[-1], values.max())  # despite rounding
    return edges


def _number_text(value: float) -> str:
    return f"{value:,.0f}" if value == 0 or abs(value) >= 100 else f"{value:.3g}"
