"""Results as text for the terminal and as CSV files."""

from pathlib import Path
from statistics import fmean, stdev

from vae.evaluation.diffusability import RANK, rank_warning
from vae.evaluation.report.tables import (
    Cell,
    Table,
    diffusability_table,
    latent_table,
    quality_tables,
    result_at,
    speed_tables,
)
from vae.evaluation.results import METRICS, PER_IMAGE, Results
from vae.system.console import counted, printable
from vae.system.files import write_csv_rows

SPEED = ("encode_images_per_s", "decode_images_per_s", "encode_peak_bytes", "decode_peak_bytes")
MIN_STANDARD_ERRORS = 2.0  # of the mean difference over images, below which it may be chance (5 %)
MAX_NAMED = 10  # unusable images in the terminal; results.json contains all


def terminal_text(results: Results) -> str:
    """The protocol, the tables of the report, and missing values with their reasons."""
    protocol = results.protocol
    lines = [
        f"{protocol.images} images from {printable(protocol.data_path)}; {protocol.crop}; posterior "
        f"{protocol.posterior}; reconstructions in 8 bit; {protocol.dtype} on {protocol.device}, "
        f"batch size {protocol.batch_size}"
    ]
    tables = [*quality_tables(results), *speed_tables(results)]
    for table in [*tables, latent_table(results), diffusability_table(results)]:
        if table is not None:
            lines += ["", *aligned(table)]
    lines += ["", *quality_lines(results), *rank_lines(results)]
    if results.missing:
        lines += ["", *(f"missing: {name}: {why}" for name, why in results.missing.items())]
    if results.unusable:
        lines += ["", f"{len(results.unusable)} images left out:"]
        named = list(results.unusable.items())[:MAX_NAMED]
        lines += [f"  {printable(name)}: {why}" for name, why in named]
        if len(results.unusable) > MAX_NAMED:
            lines.append("  (results.json lists all)")
    return "\n".join(lines)


def quality_lines(results: Results) -> list[str]:
    """For each measure of images, which VAE is best at the last size, and whether the images tell."""
    size = results.protocol.sizes[-1]
    found = {vae.name: result for vae in results.vaes if vae.is_network and (result := result_at(vae, size))}
    lines = []
    for metric in PER_IMAGE:
        sign = 1 if METRICS[metric].better == "higher" else -1
        means = {name: sign * mean for name, at in found.items() if (mean := at.metrics[metric]) is not None}
        if len(means) < 2:
            continue
        best, second = sorted(means, key=lambda name: -means[name])[:2]
        values, others = (
            {
                key: value
                for key, row in found[name].per_image.items()
                if (value := row.get(metric)) is not None
            }
            for name in (best, second)
        )
        gains = [sign * (values[key] - others[key]) for key in values if key in others]
        won = f"on {sum(gain > 0 for gain in gains)} of {counted(len(gains), 'image')}"
        shown = f"{METRICS[metric].title}: {printable(best)}"
        if len(gains) < 2 or fmean(gains) < MIN_STANDARD_ERRORS * stdev(gains) / len(gains) ** 0.5:
            lines.append(f"{shown} and {printable(second)} cannot be told apart; the first is better {won}")
        else:
            by = f"{fmean(gains):.{METRICS[metric].decimals}f}"
            lines.append(f"{shown} is best, by {by} before {printable(second)}, and better {won}")
    return lines


def rank_lines(results: Results) -> list[str]:
    """Whose channels repeat each other."""
    warnings = (
        rank_warning(printable(vae.name), vae.diffusability.get(RANK), vae.latents.channels)
        for vae in results.vaes
        if vae.latents
    )
    return [line for line in warnings if line is not None]


def aligned(table: Table) -> list[str]:
    """Lines with the names left-aligned and the values right-aligned."""
    columns = [[table.caption, *map(printable, table.row_names)]]
    columns += [[heading, *map(_text, cells)] for heading, cells in table.known.items()]
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
        for row in zip(*columns, strict=True)
    ]


def _text(cell: Cell) -> str:
    return "-" if cell.kind == "missing" else cell.text


def write_results_csv(results: Results, path: Path) -> None:
    """Write one row per VAE and size; missing values are empty."""
    header = ["vae", "kind", "path", "size", *METRICS, *SPEED]
    rows = [
        [vae.name, vae.kind, vae.path, result.size, *(result.metrics[name] for name in METRICS)]
        + [getattr(result, name) for name in SPEED]
        for vae in results.vaes
        for result in vae.sizes
    ]
    write_csv_rows(path, [header, *rows])


def write_per_image_csv(results: Results, path: Path) -> None:
    """Write one row per VAE, size and image; within each VAE and size, the worst PSNR comes first."""
    rows = []
    for vae in results.vaes:
        for result in vae.sizes:
            worst_first = sorted(result.per_image.items(), key=lambda item: item[1]["psnr"] or 0.0)
            for name, values in worst_first:
                rows.append([vae.name, result.size, name, *(values[metric] for metric in PER_IMAGE)])
    write_csv_rows(path, [["vae", "size", "image", *PER_IMAGE], *rows])
