"""Data of `<ft-chart>` as JSON: panels with lines and levels, and new bins."""

# A metric gets a chart by `Chart` in finetune/events.py.

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from finetune.events import CHARTS
from finetune.settings.methods import METRICS
from finetune.units import GIB

from ..language import tr
from .markup import as_on_page
from .run import memory_curves
from .series import Series

if TYPE_CHECKING:
    from finetune.planner.plan import Plan

    from ..live import Digest, LiveRun

#: A budget above this share of the GPU gets no line.
_SAME = 0.99


def layout(digest: Digest, plan: Plan) -> list[dict[str, Any]]:
    """Return the panels of a run."""
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
            for name, label, kind, added in memory_curves(digest, plan)
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
        panels = layout(digest, plan)
        # two panels may draw one metric
        names = {line["name"] for panel in panels for line in panel["lines"]}
        return {
            "have": f"{key}.{0 if digest.is_new_attempt else digest.step}", "from": lowest, "step": digest.step,
            "total": max(live.total_steps or 0, digest.step), "alive": not state.ended,
            "read": None if is_read else round(live.progress, 2), "panels": panels,
            "series": {name: _part(name, digest.series[name], lowest) for name in names if name in digest.series},
            "marks": [[event["name"], event["step"]] for event in digest.marks],
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
