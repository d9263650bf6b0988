"""`--mode analyze`: measure a set of images; write the statistics as JSON and as an HTML page."""

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vae.charts import BLUE, PAGE_SCALE, new_figure, png
from vae.config.prepare_flags import AnalyzeConfig
from vae.html import data_uri, page_chart, write_page
from vae.images.formats import BadImageError
from vae.prepare.blocks import Block
from vae.prepare.check import Check, check_image
from vae.prepare.dataset_stats import (
    COLUMNS,
    Column,
    Groups,
    Rows,
    exact_groups,
    example_sections,
    near_groups,
    summarize,
)
from vae.prepare.folders import check_apart, inside
from vae.prepare.measures import thumbnail
from vae.prepare.pool import count_workers, run_tasks
from vae.prepare.reasons import broken_lines, count_rejected, group_lines
from vae.prepare.rows import open_rows, rules_of
from vae.prepare.selection import drop_exact, name_near_groups
from vae.prepare.source import open_source
from vae.prepare.table import Table
from vae.system import console
from vae.system.console import printable
from vae.system.errors import DataError
from vae.system.files import write_csv_rows, write_json

STATS, PAGE, NEAR = "stats.json", "page.html", "near_duplicates.csv"
MAX_BINS = 40


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
    """Write the statistics, the page and the list of near duplicates."""
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
    sections = example_sections(table, near, exact)
    thumbnails = _thumbnails(table, config, sections)
    for name in (STATS, PAGE, NEAR):
        inside(root, name)
    write_json(root / STATS, stats, indent=1)
    write_csv_rows(root / NEAR, _near_duplicate_rows(near))
    write_analysis_page(root / PAGE, stats, values, sections, thumbnails)
    console.info("\n".join([*_summary_lines(stats, near, root), *broken_lines(table)]))
    return 0


class _Examples(NamedTuple):
    """Example images of a block."""

    block: Block
    places: dict[int, tuple[int, int]]  # by their number in the block
    numbers: dict[int, int]  # in the table


def _thumbnails(table: Table, config: AnalyzeConfig, sections: dict[str, Rows]) -> dict[int, bytes]:
    """A small JPEG of each example image that can be read, by its number in the table."""
    shown = {n for rows in sections.values() for row in rows for n, _, _ in row}
    tasks: dict[int, _Examples] = {}
    query = f"SELECT n, block, number, coalesce(position, 0), bytes FROM images WHERE n IN {(*shown, -1)}"
    for n, block, number, position, size in table.all(query):
        examples = tasks.setdefault(block, _Examples(table.blocks[block], {}, {}))
        examples.places[number] = position, size
        examples.numbers[number] = n
    thumbnails: dict[int, bytes] = {}
    workers = max(1, min(count_workers(config.num_workers), len(tasks)))
    limits = Check(config).limits._replace(seconds=config.time_limit * 4)
    with closing(run_tasks(partial(_thumbnails_of, config), tasks.values(), workers, limits)) as results:
        for _, made in results:
            thumbnails |= made if isinstance(made, dict) else {}
    return thumbnails


def _thumbnails_of(config: AnalyzeConfig, task: _Examples) -> dict[int, bytes]:
    made = {}
    with suppress(BadImageError, OSError):  # it has changed just now
        for number, data in task.block.chosen(task.places):
            with suppress(BadImageError, MemoryError):
                made[task.numbers[number]] = thumbnail(check_image(data, "", config).pixels)
    return made


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
        f"  statistics: {root / STATS}, page: {root / PAGE}",
    ]


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
