"""Charts as inline SVG made on the server: no scripts, both themes; lines stretch with the page, labels don't.

Lines are drawn in a 1000 x 100 box that is stretched; text is HTML placed at percentages, so it keeps its size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..language import tr, tr_n
from .markup import inert
from .series import Point

WIDE, HIGH = 1000.0, 100.0


@dataclass(frozen=True)
class Line:
    """A series in a panel; `css` chooses colour and stroke."""

    label: str
    points: Sequence[Point]
    css: str


@dataclass(frozen=True)
class Level:
    """A horizontal line, such as a budget, with its value's text. `band` is drawn lightly around it."""

    label: str
    value: float
    css: str
    band: tuple[float, float] | None = None


@dataclass(frozen=True)
class Panel:
    """One measure over the common x axis. `show` writes a value, ticks are round in `unit`s, `zero` begins the axis at 0."""

    title: str
    lines: Sequence[Line]
    show: Callable[[float], str]
    levels: Sequence[Level] = field(default_factory=tuple)
    zero: bool = False
    css: str = ""
    unit: float = 1.0


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step, drawn through all panels."""

    label: str
    step: float
    css: str


def chart(panels: Sequence[Panel], marks: Sequence[Mark], last_step: float, label: str) -> str:
    """Panels over one step axis. `label` is the text for screen readers."""
    right = max(last_step, 1.0)
    drawn = "".join(_panel(panel, marks, right) for panel in panels)
    ticks = "".join(
        f'<span style="left:{100 * step / right:.2f}%">{step:,.0f}</span>' for step in _ticks(0, right, 6) if step == int(step)
    )
    axis = f'<div class="ft-x" aria-hidden="true">{ticks}<em>{tr("step")}</em></div>'
    return f'<figure class="ft-chart" role="img" aria-label="{inert(label)}">{drawn}{axis}</figure>'


def _panel(panel: Panel, marks: Sequence[Mark], right: float) -> str:
    y_min, y_max, beyond = _range(panel)
    span = y_max - y_min or 1.0

    def y_of(value: float) -> float:
        return HIGH * (1 - (value - y_min) / span)

    scale = Scale(WIDE / right, HIGH * (1 + y_min / span), -HIGH / span)
    ticks = [value * panel.unit for value in _ticks(y_min / panel.unit, y_max / panel.unit, 4)]
    heights = [f"{y_of(value):.2f}" for value in ticks]
    shapes = [f'<line class="grid" x1="0" x2="{WIDE:g}" y1="{y}" y2="{y}"/>' for y in heights]
    labels = [
        f'<span class="ft-y" style="top:{y}%">{inert(panel.show(value))}</span>'
        for value, y in zip(ticks, heights, strict=True)
    ]
    named = (
        [line for line in panel.lines if line.points] if len(panel.lines) > 1 or panel.levels else []
    )  # else the title names it
    legend = [f'<li class="{line.css}">{inert(line.label)}</li>' for line in named]
    for level in panel.levels:
        if level in beyond:
            legend.append(
                f'<li class="{level.css} beyond">{inert(level.label)} '
                f"{tr('{value} (above the chart)', value=inert(panel.show(level.value)))}</li>"
            )
            continue
        if level.band:
            top, bottom = y_of(min(level.band[1], y_max)), y_of(max(level.band[0], y_min))
            shapes.append(
                f'<rect class="{level.css} band" x="0" y="{top:.2f}" width="{WIDE:g}" height="{max(0.0, bottom - top):.2f}"/>'
            )
        y = y_of(level.value)
        shapes.append(f'<line class="{level.css} level" x1="0" x2="{WIDE:g}" y1="{y:.2f}" y2="{y:.2f}"/>')
        legend.append(f'<li class="{level.css} level">{inert(level.label)} {inert(panel.show(level.value))}</li>')
    for mark in marks:
        x = WIDE * mark.step / right
        shapes.append(
            f'<line class="mark {mark.css}" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{HIGH:g}">'
            f"<title>{inert(mark.label)}</title></line>"
        )
    for line in panel.lines:
        shapes += [f'<polyline class="{line.css}" points="{points}"/>' for points in _polylines(line.points, scale)]
        shapes += _lone_points(line, scale)
    title = f'<figcaption>{inert(panel.title)}<ul class="ft-legend">{"".join(legend)}</ul></figcaption>'
    svg = (
        f'<svg viewBox="0 0 {WIDE:g} {HIGH:g}" preserveAspectRatio="none" aria-hidden="true" focusable="false">'
        f"{''.join(shapes)}</svg>"
    )
    return f'<div class="ft-panel {panel.css}">{title}<div class="ft-plot">{svg}{"".join(labels)}</div></div>'


def _range(panel: Panel) -> tuple[float, float, list[Level]]:
    values = [value for line in panel.lines for _, value in line.points if value is not None]
    highest = max(values, default=0.0)
    shown = [level for level in panel.levels if not values or level.value <= 2.5 * highest]
    beyond = [level for level in panel.levels if level not in shown]
    values += [level.value for level in shown] + [level.band[1] for level in shown if level.band]
    if not values:
        return 0.0, 1.0, beyond
    lowest, highest = (0.0 if panel.zero else min(values)), max(values)
    margin = (highest - lowest) * 0.06 or abs(highest) * 0.06 or 1.0
    return (lowest if panel.zero else lowest - margin), highest + margin, beyond


@dataclass(frozen=True)
class Scale:
    """From steps and values to the picture: x = step * x_unit, y = y_zero + value * y_unit."""

    x_unit: float
    y_zero: float
    y_unit: float


def _polylines(points: Sequence[Point], scale: Scale) -> list[str]:
    x_unit, y_zero, y_unit = scale.x_unit, scale.y_zero, scale.y_unit
    stretches: list[list[str]] = [[]]
    for step, value in points:
        if value is None:
            stretches.append([])
        else:
            stretches[-1].append("%.1f,%.1f" % (step * x_unit, y_zero + value * y_unit))  # noqa: UP031 - half the time of f""
    return [" ".join(stretch) for stretch in stretches if len(stretch) > 1]


def _lone_points(line: Line, scale: Scale) -> list[str]:
    """Values between two gaps: a polyline of one point would be invisible."""
    dots, before = [], None
    points = line.points
    for index, (step, value) in enumerate(points):
        if value is not None and before is None and (index + 1 == len(points) or points[index + 1][1] is None):
            x, y = step * scale.x_unit, scale.y_zero + value * scale.y_unit
            dots.append(f'<line class="{line.css} dot" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.2f}" y2="{y:.2f}"/>')
        before = value
    return dots


def _ticks(start: float, end: float, count: int) -> list[float]:
    if not end > start:
        return []
    raw_step = (end - start) / count
    power_of_ten = 10.0 ** math.floor(math.log10(raw_step))
    step = next(power_of_ten * factor for factor in (1, 2, 2.5, 5, 10) if power_of_ten * factor >= raw_step)
    first = math.ceil(start / step)
    return [number * step for number in range(first, math.floor(end / step) + 1)]


def sparkline(points: Sequence[Point], label: str) -> str:
    """A small line without axes."""
    values = [value for _, value in points if value is not None]
    if len(values) < 2:
        return f'<span class="ft-spark none">{inert(label)}</span>'
    lowest, span, right = min(values), (max(values) - min(values)) or 1.0, max(step for step, _ in points) or 1.0
    scale = Scale(WIDE / right, 96 + 92 * lowest / span, -92 / span)
    lines = "".join(f'<polyline class="loss" points="{text}"/>' for text in _polylines(points, scale))
    return (
        f'<span class="ft-spark" role="img" aria-label="{inert(label)}"><svg viewBox="0 0 {WIDE:g} {HIGH:g}" '
        f'preserveAspectRatio="none" aria-hidden="true">{lines}</svg></span>'
    )


def histogram(lengths: Sequence[int], limit: int | None, label: str, bins: int = 40) -> str:
    """Rows by length in tokens, the limit drawn in."""
    if not lengths:
        return ""
    right = max(max(lengths), limit or 0) * 1.04
    width = right / bins
    counts = [0] * bins
    for length in lengths:
        counts[min(bins - 1, int(length / width))] += 1
    highest = max(counts)
    bars = "".join(
        f'<rect class="{"over" if limit and index * width >= limit else "part-weights"}" x="{WIDE * index / bins:.1f}" '
        f'y="{HIGH * (1 - count / highest):.2f}" width="{WIDE / bins - 2:.1f}" height="{HIGH * count / highest:.2f}"/>'
        for index, count in enumerate(counts) if count
    )  # fmt: skip
    line = ""
    if limit:
        x = WIDE * limit / right
        line = f'<line class="level budget" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{HIGH:g}"/>'
    ticks = "".join(f'<span style="left:{100 * value / right:.2f}%">{value:,.0f}</span>' for value in _ticks(0, right, 6))
    top = f'<span class="ft-y" style="top:0%">{tr_n("{n} row", "{n} rows", highest)}</span>'
    svg = f'<svg viewBox="0 0 {WIDE:g} {HIGH:g}" preserveAspectRatio="none" aria-hidden="true">{bars}{line}</svg>'
    axis = f'<div class="ft-x" aria-hidden="true">{ticks}<em>{tr("tokens per row")}</em></div>'
    return (
        f'<figure class="ft-chart" role="img" aria-label="{inert(label)}"><div class="ft-panel short">'
        f'<div class="ft-plot">{svg}{top}</div></div>{axis}</figure>'
    )
