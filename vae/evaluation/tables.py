"""Results as text for the terminal and as JSON and CSV files."""

import csv
import json
from pathlib import Path

from vae.config.evaluate_flags import WHOLE
from vae.evaluation.results import (
    METRICS,
    PER_IMAGE,
    Equivariance,
    Results,
    SizeResult,
    VaeResult,
    as_json,
)
from vae.system.console import printable
from vae.system.files import atomic_path, csv_cell
from vae.system.host import GIB

SPEED = ("encode_images_per_s", "decode_images_per_s", "encode_peak_bytes", "decode_peak_bytes")
MAX_NAMED = 10  # unusable images in the terminal; results.json contains all


def terminal_text(results: Results) -> str:
    """The protocol, the tables, and missing values with their reasons."""
    protocol = results.protocol
    lines = [
        f"{protocol.images} images from {printable(protocol.data_path)}; {protocol.crop}; posterior "
        f"{protocol.posterior}; {protocol.rounding}; {protocol.dtype} on {protocol.device}, "
        f"batch size {protocol.batch_size}",
        "",
        *_aligned(_quality_rows(results)),
        "",
        *_aligned(_latent_rows(results)),
    ]
    if results.missing:
        lines += ["", *(f"missing: {name}: {why}" for name, why in results.missing.items())]
    if results.unusable:
        lines += ["", f"{len(results.unusable)} images left out:"]
        named = list(results.unusable.items())[:MAX_NAMED]
        lines += [f"  {printable(name)}: {why}" for name, why in named]
        if len(results.unusable) > MAX_NAMED:
            lines.append("  (results.json lists all)")
    return "\n".join(lines)


def _quality_rows(results: Results) -> list[list[str]]:
    measured = [
        metric
        for metric in METRICS
        if any(one.metrics[metric] is not None for vae in results.vaes for one in vae.sizes)
    ]
    titles = [METRICS[name].title for name in measured]
    rows = [["", "size", *titles, "encode/s", "decode/s", "encode", "decode"]]
    for size in results.protocol.sizes:
        for vae in results.vaes:
            one = next(result for result in vae.sizes if result.size == size)
            quality = [_number(one.metrics[name], METRICS[name].decimals) for name in measured]
            rows.append([vae.name, _size(size), *quality, *_speed(one)])
    return rows


def _speed(one: SizeResult) -> list[str]:
    rates = [_number(rate, 2) for rate in (one.encode_images_per_s, one.decode_images_per_s)]
    peaks = [one.encode_peak_bytes, one.decode_peak_bytes]
    return rates + ["-" if peak is None else f"{peak / GIB:.2f} GiB" for peak in peaks]


def _latent_rows(results: Results) -> list[list[str]]:
    """One row per VAE: statistics of its latents, and the probes."""
    rows = [["", "latent", "KL nats/px", "σ/std", "dead", "std", "turn dB", "scale dB", "grid levels"]]
    for vae in results.vaes:
        facts = vae.latents
        if facts is None:
            continue
        turn, scale = (_probe(vae, kind) for kind in ("turn_", "scale_"))
        grid = max((one.levels for one in vae.grid_artefacts.values()), default=None)
        deviations = f"{min(facts.std):.3g}..{max(facts.std):.3g}"
        shape = f"{facts.channels} ch /{facts.downsampling}"
        noise = [_number(value, 3) for value in (facts.kl_nats_per_pixel, facts.sigma_over_std)]
        dead = f"{len(facts.dead_channels)} of {facts.channels}"
        rows.append([vae.name, shape, *noise, dead, deviations, turn, scale, _number(grid, 2)])
    return rows


def _probe(vae: VaeResult, kind: str) -> str:
    """Mean over the transforms of one kind: of the latents, and in parentheses of the images."""
    found: list[Equivariance] = [one for name, one in vae.equivariance.items() if name.startswith(kind)]
    if not found:
        return "-"
    by_latents, by_images = (
        sum(getattr(one, way) for one in found) / len(found) for way in ("latents", "images")
    )
    return f"{by_latents:.2f} ({by_images:.2f})"


def _aligned(rows: list[list[str]]) -> list[str]:
    """Lines with the first column left-aligned and the others right-aligned."""
    rows = [[printable(row[0]), *row[1:]] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]


def _size(size: int) -> str:
    return "whole" if size == WHOLE else str(size)


def _number(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"


def write_json(results: Results, path: Path) -> None:
    """Write all results; paths of sample images are relative to the folder of `path`."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(as_json(results, path.parent), indent=1) + "\n", encoding="ascii")


def write_csv(results: Results, path: Path) -> None:
    """Write one row per VAE and size; missing values are empty."""
    header = ["vae", "kind", "path", "size", *METRICS, *SPEED]
    rows = [
        [vae.name, vae.kind, vae.path, one.size, *(one.metrics[name] for name in METRICS)]
        + [getattr(one, name) for name in SPEED]
        for vae in results.vaes
        for one in vae.sizes
    ]
    _write_rows(path, header, rows)


def write_per_image_csv(results: Results, path: Path) -> None:
    """Write one row per VAE, size and image; within each VAE and size, the worst PSNR comes first."""
    rows = []
    for vae in results.vaes:
        for one in vae.sizes:
            worst_first = sorted(one.per_image.items(), key=lambda item: item[1]["psnr"] or 0.0)
            for name, values in worst_first:
                rows.append([vae.name, one.size, name, *(values[metric] for metric in PER_IMAGE)])
    _write_rows(path, ["vae", "size", "image", *PER_IMAGE], rows)


def _write_rows(path: Path, header: list[str], rows: list[list]) -> None:
    with (
        atomic_path(path) as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file,
    ):
        writer = csv.writer(file)
        writer.writerows([csv_cell(cell) for cell in row] for row in (header, *rows))
