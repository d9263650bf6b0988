"""Coordinates of the report's charts: training curves and latent channels. The template draws them as SVG.

All coordinates are px of the view box, which is WIDTH x HEIGHT.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from vae.evaluation.report.tables import shown_number
from vae.evaluation.results import METRICS, LatentFacts, VaeResult

WIDTH, HEIGHT = 360, 200
LEFT, RIGHT, TOP, BOTTOM = 58, 8, 8, 22  # margins around the plot
LOG_FROM = 50  # ratio of the largest to the smallest value above which the axis is logarithmic
MAX_DOTS = 40  # a line with more points is drawn without dots
NUM_COLOURS = 6  # classes s0 to s5 in report.css
KINDS = {"validation": "Validation images", "train": "Training"}
NOT_DRAWN = {"kind", "step", "epoch", "image_size", "images"}  # keys of a record that are not measurements
MAX_VALUE = 1e300  # above it, sums of two values could overflow

Series = list[tuple[float, float]]  # (step, value)
Span = tuple[float, float]  # lowest and highest value of an axis


@dataclass(frozen=True)
class Tick:
    """One label of an axis."""

    at: float
    text: str
    anchor: str = "end"


@dataclass(frozen=True)
class Point:
    """One value of a line."""

    x: float
    y: float
    label: str


@dataclass(frozen=True)
class Line:
    """One VAE in a line chart."""

    colour: int
    points: list[Point]

    @property
    def dots(self) -> list[Point]:
        return self.points if len(self.points) <= MAX_DOTS else []


@dataclass(frozen=True)
class Bar:
    """One latent channel: mean - std to mean + std, with a mark at the mean."""

    x: float
    width: float
    top: float
    height: float
    mean: float
    mark_left: float
    mark_right: float
    label: str
    is_dead: bool


@dataclass(frozen=True)
class Chart:
    """What every chart has; `label` is its text for screen readers."""

    width: ClassVar[int] = WIDTH
    height: ClassVar[int] = HEIGHT
    left: ClassVar[int] = LEFT
    right: ClassVar[int] = WIDTH - RIGHT

    title: str
    label: str
    y_ticks: list[Tick]
    x_ticks: list[Tick]


@dataclass(frozen=True)
class LineChart(Chart):
    """One metric by step, one line per VAE."""

    is_log: bool
    lines: list[Line]


@dataclass(frozen=True)
class ChannelChart(Chart):
    """The latent channels of one VAE."""

    bars: list[Bar]


def curve_colours(vaes: list[VaeResult]) -> dict[str, int]:
    """Name -> colour of each VAE with training records."""
    return {vae.name: i % NUM_COLOURS for i, vae in enumerate(vae for vae in vaes if vae.curves)}


def curve_charts(vaes: list[VaeResult]) -> dict[str, list[LineChart]]:
    """Every value that the runs recorded, as charts grouped by the kind of record."""
    colours = curve_colours(vaes)
    groups = {}
    for kind, title in KINDS.items():
        series = {vae.name: _series_of(vae.curves, kind) for vae in vaes if vae.curves}
        metrics = dict.fromkeys(metric for found in series.values() for metric in found)
        charts = []
        for metric in metrics:
            shown = {name: found[metric] for name, found in series.items() if metric in found}
            heading = METRICS[metric].title if metric in METRICS else metric.replace("_", " ")
            charts.append(_line_chart(heading, shown, colours))
        if charts:
            groups[title] = charts
    return groups


def _series_of(records: list[dict[str, Any]], kind: str) -> dict[str, Series]:
    """Metric -> (step, value) of one kind of record, without values that are not finite numbers."""
    found: dict[str, Series] = {}
    for record in records:
        if record.get("kind") != kind or not _is_number(record.get("step")):
            continue
        for key, value in record.items():
            if key not in NOT_DRAWN and _is_number(value):
                found.setdefault(str(key), []).append((record["step"], value))
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_VALUE


def _line_chart(title: str, series: dict[str, Series], colours: dict[str, int]) -> LineChart:
    """One metric; every series has at least one point."""
    steps = [step for points in series.values() for step, _ in points]
    values = [value for points in series.values() for _, value in points]
    is_log = min(values) > 0 and max(values) / min(values) > LOG_FROM
    scale: Callable[[float], float] = math.log10 if is_log else float
    x_span, y_span = _span(steps), _span([scale(value) for value in values])
    lines = []
    for name, points in series.items():
        found = [
            Point(_x(step, x_span), _y(scale(value), y_span), f"{name}: {shown_number(value)} at step {step}")
            for step, value in points
        ]
        lines.append(Line(colours[name], found))
    ranges = "; ".join(
        f"{name} from {shown_number(points[0][1])} to {shown_number(points[-1][1])}"
        for name, points in series.items()
    )
    return LineChart(
        title=title,
        label=f"{title} by step: {ranges}",
        y_ticks=_y_ticks(y_span, is_log),
        x_ticks=_step_ticks(x_span),
        is_log=is_log,
        lines=lines,
    )


def channel_chart(name: str, facts: LatentFacts) -> ChannelChart:
    """Mean and standard deviation of each latent channel."""
    ranges = [(mean - std, mean + std) for mean, std in zip(facts.mean, facts.std, strict=True)]
    y_span = _span([bound for both in ranges for bound in both])
    slot = (WIDTH - LEFT - RIGHT) / facts.channels
    centres = [LEFT + (channel + 0.5) * slot for channel in range(facts.channels)]
    bars = []
    for channel, (low, high) in enumerate(ranges):
        mean, top, bottom = (_y(value, y_span) for value in (facts.mean[channel], high, low))
        shown = f"{shown_number(facts.mean[channel])} ± {shown_number(facts.std[channel])}"
        bars.append(
            Bar(
                x=round(centres[channel] - 0.3 * slot, 1),
                width=round(0.6 * slot, 1),
                top=top,
                height=round(max(bottom - top, 1), 1),
                mean=mean,
                mark_left=round(centres[channel] - 0.45 * slot, 1),
                mark_right=round(centres[channel] + 0.45 * slot, 1),
                label=f"channel {channel}: {shown}",
                is_dead=channel in facts.dead_channels,
            )
        )
    ends = dict.fromkeys((0, facts.channels - 1))
    return ChannelChart(
        title=name,
        label=f"mean and standard deviation of {facts.channels} latent channels of {name}",
        y_ticks=_y_ticks(y_span, is_log=False),
        x_ticks=[Tick(round(centres[channel], 1), str(channel), "middle") for channel in ends],
        bars=bars,
    )


def _span(values: list[float]) -> Span:
    """The lowest and the highest value; a span around a constant, so that it is drawn in the middle."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - max(abs(low), 1) / 2, high + max(abs(high), 1) / 2)


def _x(value: float, span: Span) -> float:
    return round(LEFT + (value - span[0]) / (span[1] - span[0]) * (WIDTH - LEFT - RIGHT), 1)


def _y(value: float, span: Span) -> float:
    return round(HEIGHT - BOTTOM - (value - span[0]) / (span[1] - span[0]) * (HEIGHT - TOP - BOTTOM), 1)


def _y_ticks(span: Span, is_log: bool) -> list[Tick]:
    """The lowest, middle and highest value."""
    ticks = []
    for share in (0, 0.5, 1):
        on_scale = span[0] + share * (span[1] - span[0])
        value = 10**on_scale if is_log else on_scale
        text = f"{value:.3g}" if abs(value) < 1000 else shown_number(value)
        ticks.append(Tick(_y(on_scale, span), text))
    return ticks


def _step_ticks(span: Span) -> list[Tick]:
    """The first, middle and last step."""
    ticks = []
    for share, anchor in ((0, "start"), (0.5, "middle"), (1, "end")):
        step = span[0] + share * (span[1] - span[0])
        ticks.append(Tick(_x(step, span), f"{step:,.0f}", anchor))
    return ticks
