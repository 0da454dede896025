"""Charts: static ones as SVG or HTML, and data of `<ft-chart>`: panels, marks and bins."""

# A metric gets a chart by `Chart` in finetune/events.py.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.events import CHARTS
from finetune.planner.plan import Plan
from finetune.settings.methods import METRICS
from finetune.units import GIB, format_bytes

from ..language import mark, tr
from ..live import Digest, LiveRun, Point, Series, smoothed
from .markup import Safe, as_on_page, inert, render

#: Box of the lines, which is stretched, and number of bars.
_WIDE, _HIGH, _BARS = 1000.0, 100.0, 40
#: Metric of the host's memory, for runs without a GPU's.
_HOST = "process_rss_bytes"
#: Curves of memory: metric, label, kind.
_CURVES = (
    ("peak_reserved_bytes", mark("this process"), "process"), ("peak_allocated_bytes", mark("allocated"), "allocated"),
    ("card_used_bytes", mark("whole GPU, with other programs"), "whole"), (_HOST, mark("this process"), "process"),
)  # fmt: skip
#: Metric that stands for a run's memory.
MEMORY = ("peak_allocated_bytes", _HOST)
#: A budget above this share of the GPU gets no line.
_SAME = 0.99


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
    counts, edges = np.histogram(lengths, _BARS, (0, longest + 1))
    heights = [(100 * count / max(counts), bool(limit and edge >= limit)) for count, edge in zip(counts, edges, strict=False)]
    return {"heights": heights, "most": int(max(counts)), "longest": longest}


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


def curves(live: LiveRun) -> str:
    """Return loss and memory over steps as SVG."""
    digest, plan, end = live.digest, live.plan(), float(max(1, live.digest.step))
    loss, held_out = digest.series.get("loss"), digest.series.get("eval_loss")
    losses = (
        [Line(tr("each step"), loss.points(), "raw"), Line(tr("smoothed"), smoothed(loss.points()), "loss")] if loss else []
    )
    losses += [Line(tr("held out"), held_out.points(), "eval")] if held_out else []
    memory = _memory_lines(digest, plan)
    if plan.forecast and memory:
        memory.append(Line(tr("forecast"), [(0.0, plan.forecast.peak_bytes), (end, plan.forecast.peak_bytes)], "forecast"))
    title = tr("Process memory" if plan.card.is_cpu else "GPU memory")
    return picture(tr("Loss"), losses, "{:.3g}".format) + picture(title, memory, format_bytes)


def _memory_curves(digest: Digest, plan: Plan) -> list[tuple[str, str, str, int]]:
    # metric, label, kind, and the bytes to add to each value
    # the forecast includes the CUDA context, the allocator's reserved memory does not
    added = {"peak_reserved_bytes": _context_bytes(digest, plan)}
    curves = [(name, tr(label), kind, added.get(name, 0)) for name, label, kind in _CURVES if name in digest.series]
    return [curve for curve in curves if curve[0] != _HOST] or curves


def _memory_lines(digest: Digest, plan: Plan) -> list[Line]:
    return [
        Line(label, [(step, size and size + added) for step, size in digest.series[name].points(highest=True)], kind)
        for name, label, kind, added in _memory_curves(digest, plan)
    ]


def _context_bytes(digest: Digest, plan: Plan) -> int:
    # the plan's CUDA context where the driver does not report other programs
    return (digest.newest_step.context_bytes if digest.newest_step else None) or plan.card.context_bytes or 0


def measured_peak(digest: Digest, plan: Plan) -> int | None:
    """Return the bytes of the measured peak to compare with the forecast's `peak_bytes`."""
    # the training process without other programs, as in the forecast
    reserved = digest.peaks.get("peak_reserved_bytes")
    if reserved is None:
        return digest.peaks.get("process_peak_rss_bytes") if plan.card.is_cpu else None
    return reserved + _context_bytes(digest, plan)


def _panels(digest: Digest, plan: Plan) -> list[dict[str, Any]]:
    loss = [
        {"name": name, "label": label, "kind": kind}
        for name, label, kind in (("loss", tr("each step"), "loss"), ("eval_loss", tr("held out"), "held"))
        if name in digest.series
    ]
    return [{"title": tr("Loss"), "unit": "loss", "lines": loss, "levels": []}, _memory(digest, plan), *_small_panels(digest)]


def _memory(digest: Digest, plan: Plan) -> dict[str, Any]:
    levels = []
    if plan.forecast:
        forecast = {
            "value": plan.forecast.peak_bytes, "low": plan.forecast.peak_low_bytes, "high": plan.forecast.peak_high_bytes
        }  # fmt: skip
        gib = {name: round(size / GIB, 3) for name, size in forecast.items()}
        levels.append({"label": tr("forecast"), **gib, "kind": "forecast"})
    if plan.budget_bytes and plan.budget_bytes < _SAME * plan.card.total_bytes:
        levels.append({"label": tr("budget"), "value": round(plan.budget_bytes / GIB, 3), "kind": "budget"})
    whole = tr("host memory" if plan.card.is_cpu else "size of the GPU")
    levels.append({"label": whole, "value": round(plan.card.total_bytes / GIB, 3), "kind": "card"})
    return {
        "title": tr("Process memory, GiB" if plan.card.is_cpu else "GPU memory, GiB"), "unit": "GiB", "levels": levels,
        "lines": [
            {"name": name, "label": label, "kind": kind, "add": round(added / GIB, 3)}
            for name, label, kind, added in _memory_curves(digest, plan)
        ],
    }  # fmt: skip


def _small_panels(digest: Digest) -> Iterator[dict[str, Any]]:
    # every metric besides loss and memory, metrics of methods last
    charts = {name: (tr(title), unit) for name, (title, unit) in CHARTS.items()}
    for name, (label, text) in METRICS.items():
        unit = "percent" if "%" in text else "short"
        charts[name] = as_on_page(label).capitalize(), unit
        charts[f"eval/{name}"] = tr("Held-out {metric}", metric=as_on_page(label)), unit
    for name, (title, unit) in charts.items():
        if name in digest.series:
            lines = [{"name": name, "label": "", "kind": "mean"}]
            yield {"title": title, "unit": unit, "small": True, "lines": lines, "levels": []}


def answer(live: LiveRun, have: str = "") -> dict[str, Any]:
    """Return panels, marks, and bins that `have` from an earlier answer lacks."""
    is_read, state = live.refresh(), live.state()
    with live.lock:
        digest, plan, key = live.digest, live.plan(), live.key
        before, _, step = have.rpartition(".")
        lowest = int(step) if before == key and step.isdecimal() else 0
        panels = _panels(digest, plan)
        # two panels may draw one metric
        names = {line["name"] for panel in panels for line in panel["lines"]}
        return {
            "have": f"{key}.{0 if digest.is_new_attempt else digest.step}", "from": lowest, "step": digest.step,
            "total": max(live.total_steps or 0, digest.step), "alive": not state.ended,
            "read": None if is_read else round(live.progress, 2), "panels": panels,
            "series": {name: _part(name, digest.series[name], lowest) for name in names if name in digest.series},
            "marks": list(map(list, digest.marks)),
        }  # fmt: skip


def _part(name: str, series: Series, lowest: int) -> dict[str, Any]:
    # a bin: index, mean, and if they differ: lowest, highest, count of missing values
    bins, scale = [], GIB if name.endswith("_bytes") else 1.0
    for index, part in sorted(series.bins.items()):
        # the newest bin may have grown since
        if (index + 1) * series.width > lowest:
            numbers = [part.mean, part.low, part.high] if part.count else [None] * 3
            shown = [None if value is None else float(f"{value / scale:.5g}") for value in numbers]
            bins.append(
                [index, *(shown if part.count > 1 or part.missing else shown[:1]), *([part.missing] * bool(part.missing))]
            )
    return {"width": series.width, "bins": bins}
