"""Static charts: lines as inline SVG for reports and lists, bars as HTML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..language import tr, tr_n
from .markup import inert
from .series import Point

#: Box of the lines, which is stretched, and number of bars.
_WIDE, _HIGH, _BARS = 1000.0, 100.0, 40


@dataclass(frozen=True)
class Line:
    """Points of one curve; `css` sets colour and stroke."""

    label: str
    points: Sequence[Point]
    css: str


def picture(title: str, lines: Sequence[Line], show: Callable[[float], str]) -> str:
    """Return lines over steps; empty without values. `show` formats a value."""
    values = [value for line in lines for _, value in line.points if value is not None]
    if not values:
        return ""
    lowest, highest, right = min(values), max(values), max(step for line in lines for step, _ in line.points)
    legend = "".join(f'<li class="{line.css}">{inert(line.label)}</li>' for line in lines)
    drawn = "".join(_polylines(line, lowest, highest, right) for line in lines)
    label = tr(
        "{title}: {low} to {high}, {steps} steps", title=title, low=show(lowest), high=show(highest), steps=f"{right:,.0f}"
    )
    return (
        f'<div class="ft-curves" role="img" aria-label="{inert(label)}"><h3>{inert(title)}<ul>{legend}</ul>'
        f"</h3><div><span>{inert(show(highest))}</span><span>{inert(show(lowest))}</span>{_svg(drawn)}</div>"
        f"<p>{tr('{n} steps', n=f'{right:,.0f}')}</p></div>"
    )


def sparkline(points: Sequence[Point], label: str) -> str:
    """Return a small line without axes."""
    values = [value for _, value in points if value is not None]
    if len(values) < 2:
        return f'<span class="ft-spark none">{inert(label)}</span>'
    line = _polylines(Line("", points, "loss"), min(values), max(values), max(step for step, _ in points))
    return f'<span class="ft-spark" role="img" aria-label="{inert(label)}">{_svg(line)}</span>'


def histogram(lengths: Sequence[int], limit: int | None, label: str) -> str:
    """Return bars of row lengths in tokens; bars over the limit differ in colour."""
    if not lengths:
        return ""
    right = max(max(lengths), limit or 0)
    width, counts = (right + 1) / _BARS, [0] * _BARS
    for length in lengths:
        counts[int(length / width)] += 1
    bars = "".join(
        f'<i class="{"over" if limit and index * width >= limit else ""}" style="height:{100 * count / max(counts):.1f}%"></i>'
        for index, count in enumerate(counts)
    )
    most, longest = tr_n("{n} row", "{n} rows", max(counts)), tr("{n} tokens per row", n=f"{right:,}")
    return (
        f'<div class="ft-bars" role="img" aria-label="{inert(label)}"><span>{most}</span><div>{bars}</div>'
        f"<p><span>0</span><span>{longest}</span></p></div>"
    )


def _svg(shapes: str) -> str:
    return f'<svg viewBox="0 0 {_WIDE:g} {_HIGH:g}" preserveAspectRatio="none" aria-hidden="true">{shapes}</svg>'


def _polylines(line: Line, lowest: float, highest: float, right: float) -> str:
    stretches: list[list[str]] = [[]]
    for step, value in line.points:
        # a gap starts a new line
        if value is None:
            stretches.append([])
        else:
            stretches[-1].append(
                f"{_WIDE * step / (right or 1):.1f},{96 - 92 * (value - lowest) / ((highest - lowest) or 1):.1f}"
            )
    return "".join(
        # a line of one point would be invisible
        f'<polyline class="{line.css}" points="{" ".join(stretch * (2 if len(stretch) == 1 else 1))}"/>'
        for stretch in stretches if stretch
    )  # fmt: skip
