"""Static charts: lines as inline SVG for reports and lists, bars as HTML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .markup import Safe, inert, render
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
    svg = _svg("".join(_polylines(line, lowest, highest, right) for line in lines))
    return render("curves", title=title, lines=lines, low=show(lowest), high=show(highest), steps=f"{right:,.0f}", svg=svg)


def sparkline(points: Sequence[Point], label: str) -> str:
    """Return a small line without axes."""
    values = [value for _, value in points if value is not None]
    if len(values) < 2:
        return f'<span class="ft-spark none">{inert(label)}</span>'
    line = _polylines(Line("", points, "loss"), min(values), max(values), max(step for step, _ in points))
    return f'<span class="ft-spark" role="img" aria-label="{inert(label)}">{_svg(line)}</span>'


def histogram(lengths: Sequence[int], limit: int | None) -> dict[str, Any]:
    """Return bars of row lengths in tokens with their height in percent, and whether they are over the limit."""
    if not lengths:
        return {}
    longest = max(max(lengths), limit or 0)
    width, counts = (longest + 1) / _BARS, [0] * _BARS
    for length in lengths:
        counts[int(length / width)] += 1
    most = max(counts)
    heights = [(100 * count / most, bool(limit and index * width >= limit)) for index, count in enumerate(counts)]
    return {"heights": heights, "most": most, "longest": longest}


def _svg(shapes: str) -> Safe:
    return Safe(f'<svg viewBox="0 0 {_WIDE:g} {_HIGH:g}" preserveAspectRatio="none" aria-hidden="true">{shapes}</svg>')


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
