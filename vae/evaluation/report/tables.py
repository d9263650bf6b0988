"""The tables of the report: quality, speed, latents, probes, the lowest images, configuration."""

from collections.abc import Iterator

from vae.config.evaluate_flags import WHOLE
from vae.evaluation.report.html import (
    column,
    facts,
    name_of,
    shown_number,
    table,
    text_column,
    told,
)
from vae.evaluation.results import Results, SizeResult, VaeResult
from vae.evaluation.tables import DECIMALS, METRICS
from vae.host import GIB

BETTER = {"psnr": max, "ssim": max, "ms_ssim": max, "lpips": min, "rfid": min}
MAX_LISTED = 20  # images of the table of the lowest, reasons of unusable ones; the other files hold all


def size_name(size: int) -> str:
    """A resolution in words."""
    return "whole images" if size == WHOLE else f"{size} × {size} px"


def _at(vae: VaeResult, size: int) -> SizeResult | None:
    return next((one for one in vae.sizes if one.size == size), None)


def reason_for(results: Results, vae: VaeResult, size: int, metric: str) -> str:
    """Why a value is missing, as the comparison found it."""
    place = size or "whole"
    for key in (metric, f"{metric} at {place}", f"{vae.name} at {place}"):
        if key in results.missing:
            return results.missing[key]
    return "not measured"


def metric_columns(
    results: Results, vaes: list[VaeResult], size: int, values: list[dict[str, float | None]]
) -> dict[str, list[str]]:
    """A column per metric for one row of `values` per VAE; classic codecs are shown, but win nothing."""
    networks = [vae.kind != "codec" for vae in vaes]
    columns = {}
    for metric, title in METRICS.items():
        if not any(metric in row for row in values):
            continue
        arrow = "↑" if BETTER[metric] is max else "↓"
        columns[f"{title} {arrow}"] = column(
            [row.get(metric) for row in values],
            lambda value, digits=DECIMALS[metric]: f"{value:.{digits}f}",
            [reason_for(results, vae, size, metric) for vae in vaes],
            BETTER[metric],
            networks,
        )
    return columns


def quality(results: Results) -> Iterator[str]:
    """One table per resolution, then what is missing and why."""
    for size in results.protocol.sizes:
        rows = [(vae, one) for vae in results.vaes if (one := _at(vae, size))]
        vaes = [vae for vae, _ in rows]
        columns = metric_columns(results, vaes, size, [one.metrics for _, one in rows])
        yield table(f"Quality, {size_name(size)}", [vae.name for vae in vaes], columns)
    if results.missing:
        yield '<h3 id="missing">What is missing</h3>\n<ul>\n'
        for name, reason in results.missing.items():
            yield f"<li><b>{name_of(METRICS.get(name, name))}</b>: {told(reason)}</li>\n"
        yield "</ul>\n"


def speed(results: Results) -> Iterator[str]:
    """Throughput and peak memory of the networks; the classic codecs are not timed."""
    for size in results.protocol.sizes:
        rows = [(vae, one) for vae in results.vaes if vae.kind != "codec" and (one := _at(vae, size))]
        columns = {}
        for part in ("encode", "decode"):
            rates = [getattr(one, f"{part}_images_per_s") for _, one in rows]
            columns[f"{part}, images/s ↑"] = column(rates, best=max)
        for part in ("encode", "decode"):
            peaks = [getattr(one, f"{part}_peak_bytes") for _, one in rows]
            columns[f"{part}, peak GiB ↓"] = column(
                [None if peak is None else peak / GIB for peak in peaks],
                lambda value: f"{value:.2f}",
                [reason_for(results, vae, size, "peak memory") for vae, _ in rows],
                min,
            )
        if rows:
            yield table(f"Speed and memory, {size_name(size)}", [vae.name for vae, _ in rows], columns)


def latents(results: Results) -> Iterator[str]:
    """One row of latent facts per network; the channels follow as charts."""
    vaes = [vae for vae in results.vaes if vae.latents]
    found = [vae.latents for vae in vaes]
    if not found:
        return
    yield table(
        f"Latents, {size_name(results.protocol.sizes[-1])}",
        [vae.name for vae in vaes],
        {
            "channels": column([one.channels for one in found]),
            "times smaller": column([one.downsampling for one in found]),
            "KL, nats/image": column([one.kl_nats for one in found]),
            "means": text_column([_span(one.mean) for one in found]),
            "deviations": text_column([_span(one.std) for one in found]),
            "dead channels": text_column([_dead(one.dead_channels, one.channels) for one in found]),
        },
    )


def _span(values: list[float]) -> str:
    return f"{shown_number(min(values))} to {shown_number(max(values))}"


def _dead(dead: list[int], channels: int) -> str:
    named = f" ({', '.join(map(str, dead[:MAX_LISTED]))}{', ...' if len(dead) > MAX_LISTED else ''})"
    return f"{len(dead)} of {channels}{named if dead else ''}"


def probes(results: Results) -> Iterator[str]:
    """Equivariance and grid artefacts, a column per transform and per colour."""
    vaes = [vae for vae in results.vaes if vae.equivariance]
    if vaes:
        columns = {}
        for name in vaes[0].equivariance:
            found = [vae.equivariance.get(name) for vae in vaes]
            columns[f"{name.replace('_', ' ')} ↑"] = column(
                [one and one.latents for one in found],
                lambda value: f"{value:.2f}",
                best=max,
                notes=[f"{one.images:.2f}" if one else "" for one in found],
            )
        yield "<p>PSNR in dB where the latent is turned or scaled and then decoded; in brackets that of the "
        yield "turned or scaled image itself: the closer the two, the more equivariant.</p>\n"
        yield table("Equivariance, dB", [vae.name for vae in vaes], columns)
    vaes = [vae for vae in results.vaes if vae.grid_artefacts]
    if vaes:
        columns = {}
        for colour in vaes[0].grid_artefacts:
            found = [vae.grid_artefacts.get(colour) for vae in vaes]
            columns[f"{colour} ↓"] = column(
                [one and one.levels for one in found],
                lambda value: f"{value:.3f}",
                best=min,
                notes=[f"{100 * one.share:.1f} %" if one and one.share is not None else "" for one in found],
            )
        yield "<p>Images of one colour, reconstructed: the pattern that repeats with the sampling grid, in "
        yield "8-bit levels; in brackets its share of everything that is not constant.</p>\n"
        yield table("Grid artefacts, levels", [vae.name for vae in vaes], columns)


def lowest(results: Results) -> Iterator[str]:
    """The images that all networks find hardest, at the last resolution."""
    size = results.protocol.sizes[-1]
    rows = [(vae.name, one) for vae in results.vaes if vae.kind != "codec" and (one := _at(vae, size))]
    if not rows:
        return
    scores = {
        name: [one.per_image.get(name, {}).get("psnr") for _, one in rows] for name in rows[0][1].per_image
    }
    order = sorted(scores, key=lambda name: _mean_or_lowest(scores[name]))[:MAX_LISTED]
    columns = {
        f"{vae}, dB": column([scores[name][place] for name in order], lambda value: f"{value:.2f}")
        for place, (vae, _) in enumerate(rows)
    }
    of = f"{len(order)} of {len(scores)}" if len(scores) > len(order) else "all"
    yield table(f"PSNR of the hardest images ({of}), {size_name(size)}", order, columns)


def _mean_or_lowest(values: list[float | None]) -> float:
    """One without a value could not be reconstructed, which is the worst."""
    return -1.0 if None in values else sum(values) / len(values)


def configuration(results: Results) -> Iterator[str]:
    """Protocol, the VAEs' shapes side by side, environment, images left out."""
    protocol = results.protocol
    yield facts(
        "Protocol, the same for all",
        {
            "images": f"{protocol.images} of {protocol.data_path}",
            "resolutions": ", ".join(map(size_name, protocol.sizes)),
            "crop": protocol.crop,
            "posterior": protocol.posterior,
            "rounding": protocol.rounding,
            "computed in": f"{protocol.dtype} on {protocol.device}, batches of {protocol.batch_size}",
            "network of LPIPS": protocol.perceptual_net or "none: LPIPS not measured",
            "seed": protocol.seed,
        },
    )
    keys = list(dict.fromkeys(key for vae in results.vaes for key in vae.config))
    columns = {
        vae.name: text_column([vae.kind, vae.path or "–", *(_setting(vae.config.get(key)) for key in keys)])
        for vae in results.vaes
    }
    yield table("What was compared", ["kind", "path", *keys], columns)
    yield facts("Environment", dict(results.environment))
    if results.unusable:
        named = dict(list(results.unusable.items())[:MAX_LISTED])
        of = f", the first {len(named)}" if len(named) < len(results.unusable) else ""
        yield facts(f"{len(results.unusable)} images left out for every VAE{of}", named)


def _setting(value: object) -> str:
    if value is None:
        return "–"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
