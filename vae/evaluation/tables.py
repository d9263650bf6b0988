"""The tables of a comparison as data: quality, speed, the hardest images, latents; as text and as CSV."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal

from vae.config.trained_vae_flags import WHOLE
from vae.evaluation.diagnose import DEFECTS
from vae.evaluation.latents import RANK, rank_warning
from vae.evaluation.results import METRICS, PER_IMAGE, Results, VaeResult, mean_psnr
from vae.system.console import counted, printable
from vae.system.files import write_csv_rows
from vae.system.host import GIB

Best = Callable[[Sequence[float]], float]  # min or max
MAX_LISTED = 20  # hardest images and reasons of unusable ones; results.json contains all


@dataclass(frozen=True)
class Cell:
    """One value of a table."""

    text: str
    kind: Literal["text", "number", "best", "missing"] = "text"


Columns = dict[str, list[Cell]]  # by heading


@dataclass(frozen=True)
class Table:
    """A table with one row per name, at least one."""

    caption: str
    row_names: list[str]
    columns: Columns

    @property
    def known(self) -> Columns:
        """The columns that have a value; the reasons of the others are in the list of missing values."""
        return {
            heading: cells
            for heading, cells in self.columns.items()
            if any(cell.kind != "missing" for cell in cells)
        }


def shown_number(value: float) -> str:
    """A number with four significant digits, and without decimals from 1000 on."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def number_column(
    values: Sequence[float | None],
    show: Callable[[float], str] = shown_number,
    best: Best | None = None,
    candidates: Sequence[bool] | None = None,
) -> list[Cell]:
    """The cells of one column; a None is shown as missing.

    `best` (min or max) marks the winner among the `candidates` if at least two have values. Values that look
    the same when shown win together. If all look the same, none wins.
    """
    candidates = candidates or [True] * len(values)
    rivals = [value for value, rival in zip(values, candidates, strict=True) if rival and value is not None]
    winner = show(best(rivals)) if best and len({show(value) for value in rivals}) > 1 else None
    cells = []
    for value, rival in zip(values, candidates, strict=True):
        if value is None:
            cells.append(Cell("missing", "missing"))
        else:
            cells.append(Cell(show(value), "best" if rival and show(value) == winner else "number"))
    return cells


def text_column(texts: Sequence[object]) -> list[Cell]:
    """Cells of words."""
    return [Cell(str(text)) for text in texts]


def _pairs(caption: str, pairs: Mapping[str, object]) -> Table:
    """A table of names and their values."""
    return Table(caption, list(pairs), {"": text_column(list(pairs.values()))})


def fixed(decimals: int) -> Callable[[float], str]:
    """Shows numbers with so many decimals."""
    return lambda value: f"{value:.{decimals}f}"


def size_name(size: int) -> str:
    """A resolution in words."""
    return "whole images" if size == WHOLE else f"{size} × {size} px"


def metric_columns(vaes: list[VaeResult], values: list[dict[str, float | None]]) -> Columns:
    """A column per metric, for one row of `values` per VAE. Classic codecs are never marked best."""
    networks = [vae.is_network for vae in vaes]
    columns = {}
    for name, metric in METRICS.items():
        if not any(name in row for row in values):
            continue
        best, arrow = (max, "↑") if metric.better == "higher" else (min, "↓")
        columns[f"{metric.title} {arrow}"] = number_column(
            [row.get(name) for row in values], fixed(metric.decimals), best, networks
        )
    return columns


def quality_tables(results: Results) -> list[Table]:
    """One table per resolution."""
    tables = []
    for number, size in enumerate(results.protocol.sizes):
        columns = metric_columns(results.vaes, [vae.sizes[number].metrics for vae in results.vaes])
        tables.append(Table(f"Quality, {size_name(size)}", [vae.name for vae in results.vaes], columns))
    return tables


def speed_tables(results: Results) -> list[Table]:
    """Throughput and peak memory of the networks per resolution; classic codecs are not timed."""
    tables = []
    vaes = results.networks
    for number, size in enumerate(results.protocol.sizes):
        at_size = [vae.sizes[number] for vae in vaes]
        columns: Columns = {}
        for part in ("encode", "decode"):
            rates = [getattr(result, f"{part}_images_per_s") for result in at_size]
            columns[f"{part}r speed, images/s ↑"] = number_column(rates, best=max)
        for part in ("encode", "decode"):
            peaks = [getattr(result, f"{part}_peak_bytes") for result in at_size]
            gib = [None if peak is None else peak / GIB for peak in peaks]
            columns[f"{part}r memory, peak GiB ↓"] = number_column(gib, fixed(2), min)
        tables.append(Table(f"Speed and memory, {size_name(size)}", [vae.name for vae in vaes], columns))
    return tables


def hardest_table(results: Results) -> Table:
    """The images with the lowest mean PSNR over all networks, at the last resolution."""
    per_image = {vae.name: vae.sizes[-1].per_image for vae in results.networks}
    names = list(results.networks[0].sizes[-1].per_image)
    order = sorted(names, key=lambda name: mean_psnr([of[name]["psnr"] for of in per_image.values()]))
    shown = order[:MAX_LISTED]
    columns = {
        f"{vae}, dB": number_column([of[name]["psnr"] for name in shown], fixed(2))
        for vae, of in per_image.items()
    }
    count = f"{len(shown)} of {len(order)}" if len(order) > len(shown) else "all"
    title = f"PSNR of the hardest images ({count}), {size_name(results.protocol.sizes[-1])}"
    return Table(title, shown, columns)


def latent_table(results: Results) -> Table | None:
    """One row of latent facts per network."""
    rows = [(vae.name, vae.latents) for vae in results.vaes if vae.latents]
    if not rows:
        return None
    facts = [latents for _, latents in rows]
    return Table(
        f"Latents, {size_name(results.protocol.sizes[-1])}",
        [name for name, _ in rows],
        {
            "channels": number_column([fact.channels for fact in facts]),
            "downsampling": number_column([fact.downsampling for fact in facts]),
            "KL, nats/px": number_column([fact.kl_nats_per_pixel for fact in facts]),
            "σ / std(μ)": number_column([fact.sigma_over_std for fact in facts]),
            "means": text_column([_range(fact.mean) for fact in facts]),
            "standard deviations": text_column([_range(fact.std) for fact in facts]),
            "dead channels": text_column([_dead(fact.dead_channels, fact.channels) for fact in facts]),
        },
    )


def _range(values: list[float]) -> str:
    return f"{shown_number(min(values))} to {shown_number(max(values))}"


def _dead(dead: list[int], channels: int) -> str:
    named = f" ({', '.join(map(str, dead[:MAX_LISTED]))}{', ...' if len(dead) > MAX_LISTED else ''})"
    return f"{len(dead)} of {channels}{named if dead else ''}"


def diffusability_table(results: Results) -> Table | None:
    """A column per measure for diffusion models: noise in dB, and the rank, which is only a warning."""
    vaes = [vae for vae in results.vaes if vae.diffusability]
    if not vaes:
        return None
    columns = {
        f"{name}{' ↑' if name.startswith('noise') else ''}": number_column(
            [vae.diffusability[name] for vae in vaes]
        )
        for name in vaes[0].diffusability
    }
    size = next(size for size in results.protocol.sizes if size != WHOLE)
    return Table(f"Latents for diffusion, {size_name(size)}", [vae.name for vae in vaes], columns)


def diagnosis_table(results: Results) -> Table | None:
    """A column per defect: its measure, of every VAE that was diagnosed."""
    vaes = [vae for vae in results.vaes if vae.diagnosis]
    if not vaes:
        return None
    columns = {
        f"{defect.title}, {defect.unit} ↓": number_column([vae.diagnosis[name] for vae in vaes], fixed(2))
        for name, defect in DEFECTS.items()
    }
    return Table(f"Defects, {size_name(results.protocol.sizes[-1])}", [vae.name for vae in vaes], columns)


def configuration_tables(results: Results) -> list[Table]:
    """The protocol, the VAEs side by side, the environment, and the images that were left out."""
    protocol = results.protocol
    protocol_facts = {
        "images": f"{protocol.images} from {protocol.data_path}"
        + (f", without those of a list (SHA-256 {protocol.exclude})" if protocol.exclude else ""),
        "resolutions": ", ".join(map(size_name, protocol.sizes)),
        "crop": protocol.crop,
        "posterior": protocol.posterior,
        "precision": f"{protocol.dtype} on {protocol.device}, batch size {protocol.batch_size}",
        "LPIPS network": protocol.perceptual_net or "none: LPIPS was not measured",
        "seed": protocol.seed,
    }
    keys = list(dict.fromkeys(key for vae in results.vaes for key in vae.config))
    columns = {
        vae.name: text_column([vae.kind, vae.path or "–", *(_setting(vae.config.get(key)) for key in keys)])
        for vae in results.vaes
    }
    tables = [
        _pairs("Protocol, the same for all", protocol_facts),
        Table("Compared VAEs", ["kind", "path", *keys], columns),
        _pairs("Environment", results.environment),
    ]
    if results.unusable:
        listed = dict(list(results.unusable.items())[:MAX_LISTED])
        first = f", the first {len(listed)}" if len(listed) < len(results.unusable) else ""
        tables.append(_pairs(f"{len(results.unusable)} images left out for every VAE{first}", listed))
    return tables


def _setting(value: object) -> str:
    if value is None:
        return "–"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


# ---- The terminal and spreadsheets -------------------------------------------------------------------------
SPEED = ("encode_images_per_s", "decode_images_per_s", "encode_peak_bytes", "decode_peak_bytes")
MIN_STANDARD_ERRORS = 2.0  # of the mean difference over images, below which it may be chance (5 %)
MIN_BLUR_DB = 0.1  # of PSNR above another VAE, whose LPIPS is better by MIN_BLUR_SHARE
MIN_BLUR_SHARE = 0.1
MAX_NAMED = 10  # unusable images in the terminal; results.json contains all


def terminal_text(results: Results) -> str:
    """The protocol, the tables of the report, and missing values with their reasons."""
    protocol = results.protocol
    lines = [
        f"{protocol.images} images from {printable(protocol.data_path)}; {protocol.crop}; posterior "
        f"{protocol.posterior}; reconstructions in 8 bit; {protocol.dtype} on {protocol.device}, "
        f"batch size {protocol.batch_size}"
    ]
    tables: list[Table | None] = [*quality_tables(results), *speed_tables(results)]
    tables += [latent_table(results), diffusability_table(results), diagnosis_table(results)]
    for table in tables:
        if table is not None:
            lines += ["", *aligned(table)]
    lines += ["", *quality_lines(results), *rank_lines(results), *diagnosis_lines(results)]
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
    last = {vae.name: vae.sizes[-1] for vae in results.networks}
    lines = []
    for metric in PER_IMAGE:
        sign = 1 if METRICS[metric].better == "higher" else -1
        means = {name: sign * mean for name, at in last.items() if (mean := at.metrics[metric]) is not None}
        if len(means) < 2:
            continue
        best, second = sorted(means, key=lambda name: -means[name])[:2]
        pairs = zip(
            *([row[metric] or 0.0 for row in last[name].per_image.values()] for name in (best, second)),
            strict=True,
        )
        gains = [sign * (value - other) for value, other in pairs]
        won = f"on {sum(gain > 0 for gain in gains)} of {counted(len(gains), 'image')}"
        shown = f"{METRICS[metric].title}: {printable(best)}"
        if len(gains) < 2 or fmean(gains) < MIN_STANDARD_ERRORS * stdev(gains) / len(gains) ** 0.5:
            lines.append(f"{shown} and {printable(second)} cannot be told apart; the first is better {won}")
        else:
            by = f"{fmean(gains):.{METRICS[metric].decimals}f}"
            lines.append(f"{shown} is best, by {by} before {printable(second)}, and better {won}")
    return lines


def rank_lines(results: Results) -> list[str]:
    """Warnings of VAEs whose channels repeat each other."""
    warnings = (
        rank_warning(printable(vae.name), vae.diffusability.get(RANK), vae.latents.channels)
        for vae in results.vaes
        if vae.latents
    )
    return [line for line in warnings if line is not None]


def diagnosis_lines(results: Results) -> list[str]:
    """The defects of each VAE that was diagnosed, with the next step."""
    lines = []
    for vae in (vae for vae in results.networks if vae.diagnosis):
        defects = [
            f"{defect.title}, {value:.2f} {defect.unit} (from {defect.limit:g} on): {defect.remedy}"
            for name, defect in DEFECTS.items()
            if (value := vae.diagnosis[name]) is not None and value >= defect.limit
        ]
        missing = [defect.title for name, defect in DEFECTS.items() if vae.diagnosis[name] is None]
        found = defects + _blur(vae, results.networks)
        if missing:
            found.append(f"not measured: {', '.join(missing)}")
        elif not defects:
            found.append("no grid, speckles, cast or border in these images")
        lines += [f"{printable(vae.name)}: {line}" for line in found]
    return lines


def _blur(vae: VaeResult, others: list[VaeResult]) -> list[str]:
    """Whether PSNR is higher than that of another VAE, and LPIPS worse."""
    own = vae.sizes[-1].metrics
    for other in others:
        metrics = other.sizes[-1].metrics
        psnr, lpips = ((own[name], metrics[name]) for name in ("psnr", "lpips"))
        if psnr[0] is None or psnr[1] is None or not lpips[0] or not lpips[1]:
            continue
        if psnr[0] - psnr[1] >= MIN_BLUR_DB and lpips[0] / lpips[1] - 1 >= MIN_BLUR_SHARE:
            return [
                f"blur, PSNR {psnr[0] - psnr[1]:.2f} dB above {printable(other.name)}, but LPIPS "
                f"{lpips[0] / lpips[1] - 1:.0%} worse: choose by LPIPS, or raise --perceptual_weight"
            ]
    return []


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
