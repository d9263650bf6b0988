"""Curves and latent statistics as inline SVG: no script, no image files."""

import math
from collections.abc import Iterator

from vae.evaluation.report.html import name_of, shown_number, told
from vae.evaluation.results import LatentFacts, VaeResult
from vae.evaluation.tables import METRICS

WIDTH, HEIGHT = 360, 200  # px of the view box
LEFT, RIGHT, TOP, BOTTOM = 58, 8, 8, 22  # px around the plot
LOG_FROM = 50  # ratio of the largest value to the smallest above which the axis is logarithmic
MAX_DOTS = 40  # points of a line that are also drawn as dots
NUM_COLOURS = 6  # in report.css
KINDS = {"validation": "Held-out images", "train": "Training"}
NOT_DRAWN = {"kind", "step", "epoch", "image_size", "images"}  # they place a record and measure nothing
Points = list[tuple[float, float]]


def curves(vaes: list[VaeResult]) -> Iterator[str]:
    """Every value that the runs recorded, by step, one line per VAE."""
    with_curves = [vae for vae in vaes if vae.curves]
    if not with_curves:
        yield "<p>No VAE of this comparison lies beside a metrics.jsonl of its training.</p>\n"
        return
    places = {vae.name: place for place, vae in enumerate(with_curves)}
    yield legend(list(places))
    for kind, title in KINDS.items():
        lines = {vae.name: _points_of(vae.curves, kind) for vae in with_curves}
        metrics = list(dict.fromkeys(metric for found in lines.values() for metric in found))
        if metrics:
            yield f'<h3>{title}</h3>\n<div class="plots">\n'
            for metric in metrics:
                shown = {name: found[metric] for name, found in lines.items() if metric in found}
                yield line_chart(METRICS.get(metric, metric.replace("_", " ")), shown, places)
            yield "</div>\n"


def _points_of(records: list[dict], kind: str) -> dict[str, Points]:
    """The lines of one kind of record: metric -> (step, value), without what is no finite number."""
    found: dict[str, Points] = {}
    for record in records:
        if record.get("kind") != kind or not _is_number(record.get("step")):
            continue
        for key, value in record.items():
            if key not in NOT_DRAWN and _is_number(value):
                found.setdefault(str(key), []).append((record["step"], value))
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def legend(names: list[str]) -> str:
    """Names beside a stroke in the colour and dashes of their lines."""
    entries = "".join(
        f'<li><svg class="key" viewBox="0 0 30 10" aria-hidden="true"><line x1="1" y1="5" x2="29" y2="5" '
        f'class="line s{place % NUM_COLOURS}"/></svg>{name_of(name)}</li>'
        for place, name in enumerate(names)
    )
    return f'<ul class="legend">{entries}</ul>\n'


def line_chart(title: str, lines: dict[str, Points], places: dict[str, int]) -> str:
    """One plot; `places` give each line its colour. Every line has at least one point."""
    steps = [step for points in lines.values() for step, _ in points]
    values = [value for points in lines.values() for _, value in points]
    log = min(values) > 0 and max(values) / min(values) > LOG_FROM
    scale = math.log10 if log else float
    x_range, y_range = _span(steps, float), _span(values, scale)
    spoken = "; ".join(
        f"{name} from {shown_number(points[0][1])} to {shown_number(points[-1][1])}"
        for name, points in lines.items()
    )
    parts = [
        f'<figure class="plot"><figcaption>{told(title)}{" <small>log scale</small>" if log else ""}'
        f'</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{told(title)} by step: {told(spoken)}">',
        *_heights(y_range, log),
        *_steps(x_range),
    ]
    for name, points in lines.items():
        style = f"s{places[name] % NUM_COLOURS}"
        spots = [(_x(step, x_range), _y(scale(value), y_range)) for step, value in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        tip = f"<title>{told(name)}: {told(shown_number(points[-1][1]))} at step {points[-1][0]}</title>"
        parts.append(f'<polyline class="line {style}" points="{path}">{tip}</polyline>')
        if len(points) <= MAX_DOTS:
            for (x, y), (step, value) in zip(spots, points, strict=True):
                tip = f"<title>{told(name)}: {told(shown_number(value))} at step {step}</title>"
                parts.append(f'<circle class="dot {style}" cx="{x:.1f}" cy="{y:.1f}" r="2.4">{tip}</circle>')
    return "".join(parts) + "</svg></figure>\n"


def _span(values: list[float], scale) -> tuple[float, float]:
    """Lowest and highest on the scale; a constant lies in the middle."""
    low, high = scale(min(values)), scale(max(values))
    return (low, high) if high > low else (low - max(abs(low), 1) / 2, high + max(abs(high), 1) / 2)


def _x(value: float, span: tuple[float, float]) -> float:
    return LEFT + (value - span[0]) / (span[1] - span[0]) * (WIDTH - LEFT - RIGHT)


def _y(value: float, span: tuple[float, float]) -> float:
    return HEIGHT - BOTTOM - (value - span[0]) / (span[1] - span[0]) * (HEIGHT - TOP - BOTTOM)


def _heights(y_range: tuple[float, float], log: bool) -> Iterator[str]:
    """Lines and numbers at three heights."""
    for place in (0, 0.5, 1):
        value = y_range[0] + place * (y_range[1] - y_range[0])
        y = _y(value, y_range)
        yield f'<line class="axis" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
        value = 10**value if log else value
        shown = f"{value:.3g}" if abs(value) < 1000 else shown_number(value)
        yield f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{shown}</text>'


def _steps(x_range: tuple[float, float]) -> Iterator[str]:
    """The first, middle and last step."""
    for place, anchor in ((0, "start"), (0.5, "middle"), (1, "end")):
        step = x_range[0] + place * (x_range[1] - x_range[0])
        yield f'<text x="{_x(step, x_range):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{step:,.0f}</text>'


def channel_chart(name: str, facts: LatentFacts) -> str:
    """Mean and one standard deviation on either side of it for each latent channel."""
    spans = [(m - s, m + s) for m, s in zip(facts.mean, facts.std, strict=True)]
    y_range = _span([bound for span in spans for bound in span], float)
    spoken = f"mean and deviation of {facts.channels} latent channels of {name}"
    parts = [
        f'<figure class="plot"><figcaption>{name_of(name)} <small>mean ± deviation of each channel</small>'
        f'</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{told(spoken)}">',
        *_heights(y_range, log=False),
    ]
    room = (WIDTH - LEFT - RIGHT) / facts.channels
    for channel, ((low, high), mean) in enumerate(zip(spans, facts.mean, strict=True)):
        x = LEFT + (channel + 0.5) * room
        tip = f"channel {channel}: {shown_number(mean)} ± {shown_number(facts.std[channel])}"
        state = "spread dead" if channel in facts.dead_channels else "spread"
        top, bottom = _y(high, y_range), _y(low, y_range)
        parts.append(
            f'<g class="{state}"><rect x="{x - 0.3 * room:.1f}" y="{top:.1f}" width="{0.6 * room:.1f}" '
            f'height="{max(bottom - top, 1):.1f}"/><line x1="{x - 0.45 * room:.1f}" '
            f'y1="{_y(mean, y_range):.1f}" x2="{x + 0.45 * room:.1f}" y2="{_y(mean, y_range):.1f}"/>'
            f"<title>{told(tip)}</title></g>"
        )
        if channel in (0, facts.channels - 1):
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{channel}</text>')
    return "".join(parts) + "</svg></figure>\n"
