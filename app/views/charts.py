"""Static charts, and the data of `<ft-chart>`: panels, marks and bins. `Chart` in finetune/events.py gives a metric a chart."""

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
from .markup import Safe, inert, render

#: Size of the SVG box, which the browser stretches, and number of bars of a histogram.
_WIDE, _HIGH, _BARS = 1000.0, 100.0, 40
_HOST_METRIC = "process_rss_bytes"  # of runs without a GPU
#: Curves of memory: metric, label, and kind, which decides the stroke.
_MEMORY_CURVES = (
    ("peak_reserved_bytes", mark("this process"), "process"), ("peak_allocated_bytes", mark("allocated"), "allocated"),
    ("card_used_bytes", mark("whole GPU, with other programs"), "whole"), (_HOST_METRIC, mark("this process"), "process"),
)  # fmt: skip
MEMORY_METRICS = ("peak_allocated_bytes", _HOST_METRIC)  # a comparison shows the first that a run has
_WHOLE_SHARE = 0.99  # a budget above this share of the GPU gets no line


@dataclass(frozen=True)
class Line:
    """Points of one curve; `css` sets colour and stroke."""

    label: str
    points: Sequence[Point]
    css: str


def svg_chart(title: str, lines: Sequence[Line], label_of: Callable[[float], str]) -> str:
    """Return lines over steps as SVG with axis labels; empty without values."""
    values = [value for line in lines for _, value in line.points if value is not None]
    if not values:
        return ""
    lowest, highest, last_step = min(values), max(values), max(step for line in lines for step, _ in line.points)
    svg = _svg("".join(_polylines(line, lowest, highest, last_step) for line in lines))
    labels = {"low": label_of(lowest), "high": label_of(highest), "steps": f"{last_step:,.0f}"}
    return render("curves", title=title, lines=lines, svg=svg, **labels)


def sparkline(points: Sequence[Point], label: str) -> str:
    """Return a small line without axes."""
    values = [value for _, value in points if value is not None]
    if len(values) < 2:
        return f'<span class="ft-spark none">{inert(label)}</span>'
    line = _polylines(Line("", points, "loss"), min(values), max(values), max(step for step, _ in points))
    return f'<span class="ft-spark" role="img" aria-label="{inert(label)}">{_svg(line)}</span>'


def histogram(lengths: Sequence[int], limit: int | None) -> dict[str, Any]:
    """Return bar heights in percent for row lengths, and which bars exceed the limit."""
    if not lengths:
        return {}
    longest = max(max(lengths), limit or 0)
    counts, edges = np.histogram(lengths, _BARS, (0, longest + 1))
    heights = [(100 * count / max(counts), bool(limit and edge >= limit)) for count, edge in zip(counts, edges, strict=False)]
    return {"heights": heights, "most": int(max(counts)), "longest": longest}


def _svg(shapes: str) -> Safe:
    return Safe(f'<svg viewBox="0 0 {_WIDE:g} {_HIGH:g}" preserveAspectRatio="none" aria-hidden="true">{shapes}</svg>')


def _polylines(line: Line, lowest: float, highest: float, last_step: float) -> str:
    segments: list[list[str]] = [[]]
    for step, value in line.points:
        # a gap starts a new line
        if value is None:
            segments.append([])
        else:
            # 4 % of the height stay free below and above
            height = (value - lowest) / ((highest - lowest) or 1)
            segments[-1].append(f"{_WIDE * step / (last_step or 1):.1f},{96 - 92 * height:.1f}")
    return "".join(
        # a line of one point would be invisible
        f'<polyline class="{line.css}" points="{" ".join(segment * (2 if len(segment) == 1 else 1))}"/>'
        for segment in segments if segment
    )  # fmt: skip


def curves(live: LiveRun) -> str:
    """Return loss and memory over steps as SVG."""
    digest, plan, losses = live.digest, live.plan(), list[Line]()
    if loss := digest.series.get("loss"):
        losses += [Line(tr("each step"), loss.points(), "raw"), Line(tr("smoothed"), smoothed(loss.points()), "loss")]
    if held_out := digest.series.get("eval_loss"):
        losses.append(Line(tr("held out"), held_out.points(), "eval"))
    memory = _memory_lines(digest, plan)
    if plan.forecast and memory:
        peak_bytes = plan.forecast.peak_bytes
        memory.append(Line(tr("forecast"), [(0.0, peak_bytes), (float(max(1, digest.step)), peak_bytes)], "forecast"))
    title = tr("Process memory" if plan.card.is_cpu else "GPU memory")
    return svg_chart(tr("Loss"), losses, "{:.3g}".format) + svg_chart(title, memory, format_bytes)


def _memory_curves(digest: Digest, plan: Plan) -> list[tuple[str, str, str, int]]:
    # metric, label, kind, and the bytes to add to each value
    # forecasts include the CUDA context: it is added to the allocator's reserved memory
    added = {"peak_reserved_bytes": _context_bytes(digest, plan)}
    curves = [(name, tr(label), kind, added.get(name, 0)) for name, label, kind in _MEMORY_CURVES if name in digest.series]
    # the host's memory only without a GPU's
    return [curve for curve in curves if curve[0] != _HOST_METRIC] or curves


def _memory_lines(digest: Digest, plan: Plan) -> list[Line]:
    return [
        Line(label, [(step, size and size + added) for step, size in digest.series[name].points(highest=True)], kind)
        for name, label, kind, added in _memory_curves(digest, plan)
    ]


def _context_bytes(digest: Digest, plan: Plan) -> int:
    # as measured; as planned if the driver does not list the memory of other programs
    return (digest.newest_step.context_bytes if digest.newest_step else None) or plan.card.context_bytes or 0


def measured_peak(digest: Digest, plan: Plan) -> int | None:
    """Return the process's measured peak bytes, comparable to the forecast's `peak_bytes`."""
    reserved = digest.peaks.get("peak_reserved_bytes")
    if reserved is None:
        return digest.peaks.get("process_peak_rss_bytes") if plan.card.is_cpu else None
    return reserved + _context_bytes(digest, plan)


def _memory_panel(digest: Digest, plan: Plan) -> dict[str, Any]:
    levels = []
    if plan.forecast:
        spread = {"low": _in_gib(plan.forecast.peak_low_bytes), "high": _in_gib(plan.forecast.peak_high_bytes)}
        levels.append({"label": tr("forecast"), "value": _in_gib(plan.forecast.peak_bytes), **spread, "kind": "forecast"})
    if plan.budget_bytes and plan.budget_bytes < _WHOLE_SHARE * plan.card.total_bytes:
        levels.append({"label": tr("budget"), "value": _in_gib(plan.budget_bytes), "kind": "budget"})
    total_label = tr("host memory" if plan.card.is_cpu else "size of the GPU")
    levels.append({"label": total_label, "value": _in_gib(plan.card.total_bytes), "kind": "card"})
    return {
        "title": tr("Process memory, GiB" if plan.card.is_cpu else "GPU memory, GiB"), "unit": "GiB", "levels": levels,
        "lines": [
            {"name": name, "label": label, "kind": kind, "add": _in_gib(added)}
            for name, label, kind, added in _memory_curves(digest, plan)
        ],
    }  # fmt: skip


def _in_gib(size_bytes: int) -> float:
    return round(size_bytes / GIB, 3)


def _small_panels(digest: Digest) -> Iterator[dict[str, Any]]:
    # every metric besides loss and memory, metrics of methods last
    charts = {name: (tr(title), unit) for name, (title, unit) in CHARTS.items()}
    for name, (label, text) in METRICS.items():
        unit = "percent" if "%" in text else "short"
        charts[name] = label.capitalize(), unit
        charts[f"eval/{name}"] = tr("Held-out {metric}", metric=label), unit
    for name, (title, unit) in charts.items():
        if name in digest.series:
            lines = [{"name": name, "label": "", "kind": "mean"}]
            yield {"title": title, "unit": unit, "small": True, "lines": lines, "levels": []}


def chart_data(live: LiveRun, have: str = "") -> dict[str, Any]:
    """Return panels, marks, and the bins since the answer whose `have` the browser sends."""
    has_read_all, state = live.refresh(), live.state()
    with live.lock:
        digest, plan, key = live.digest, live.plan(), live.key
        earlier_key, _, step = have.rpartition(".")
        from_step = int(step) if earlier_key == key and step.isdecimal() else 0
        loss = [
            {"name": name, "label": label, "kind": kind}
            for name, label, kind in (("loss", tr("each step"), "loss"), ("eval_loss", tr("held out"), "held"))
            if name in digest.series
        ]
        loss_panel = {"title": tr("Loss"), "unit": "loss", "lines": loss, "levels": []}
        panels = [loss_panel, _memory_panel(digest, plan), *_small_panels(digest)]
        # two panels may draw one metric
        names = {line["name"] for panel in panels for line in panel["lines"]}
        return {
            "have": f"{key}.{0 if digest.is_new_attempt else digest.step}", "from": from_step, "step": digest.step,
            "total": max(live.total_steps or 0, digest.step), "alive": not state.ended,
            "read": None if has_read_all else round(live.read_share, 2), "panels": panels,
            "series": {name: _sent_bins(name, digest.series[name], from_step) for name in names if name in digest.series},
            "marks": list(map(list, digest.marks)),
        }  # fmt: skip


def _sent_bins(name: str, series: Series, from_step: int) -> dict[str, Any]:
    # a bin: index, mean; for several values also lowest and highest, and the count of missing values if there are any
    bins, scale = [], GIB if name.endswith("_bytes") else 1.0
    for index, bin_ in sorted(series.bins.items()):
        if (index + 1) * series.width <= from_step:  # the bin of `from_step` may have grown since
            continue
        numbers = [bin_.mean, bin_.low, bin_.high] if bin_.count else [None] * 3
        fields = [index, *(None if number is None else float(f"{number / scale:.5g}") for number in numbers)]
        if bin_.missing:
            fields.append(bin_.missing)
        elif bin_.count == 1:
            del fields[2:]
        bins.append(fields)
    return {"width": series.width, "bins": bins}
