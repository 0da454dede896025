"""What `<ft-chart>` draws, as JSON: the panels of a run with their lines and levels, and the bins that are new."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from finetune.settings.methods import METRICS
from finetune.units import GIB, format_count

from ..language import mark, tr
from .markup import as_on_page
from .series import MOST_BINS, Bin, Series

if TYPE_CHECKING:
    from finetune.planner.plan import Plan

    from ..live import Digest, LiveRun

#: Small charts have a share of the bins of a large one.
_SMALL = 3
_SMALL_PANELS = (
    ("learning_rate", mark("Learning rate"), "short", "{:.3g}".format),
    ("grad_norm", mark("Gradient norm"), "short", "{:.3g}".format),
    ("tokens_per_s", mark("Tokens per second"), "count", format_count),
    ("token_accuracy", mark("Token accuracy"), "percent", "{:.0%}".format),
    ("temperature_c", mark("Temperature"), "°C", "{:.0f} °C".format),
    ("power_w", mark("Power"), "W", "{:.0f} W".format),
)
#: Names of bytes, and what they are called.
_GPU_LINES = (
    ("peak_reserved_bytes", mark("this process"), "process"), ("peak_allocated_bytes", mark("allocated"), "allocated"),
    ("card_used_bytes", mark("whole GPU, with other programs"), "whole"),
)  # fmt: skip
_HOST_LINES = (("process_rss_bytes", mark("this process"), "process"),)


def layout(digest: Digest, plan: Plan) -> list[dict[str, Any]]:
    """The panels of a run: loss, memory, and a small one for each other metric that it has."""
    loss = [
        {"name": name, "label": label, "kind": kind}
        for name, label, kind in (("loss", tr("each step"), "loss"), ("eval_loss", tr("held out"), "held"))
        if name in digest.series
    ]
    return [
        {"title": tr("Loss"), "unit": "loss", "log": True, "lines": loss, "levels": []},
        _memory(digest, plan),
        *_small_panels(digest),
    ]


def _memory(digest: Digest, plan: Plan) -> dict[str, Any]:
    """Memory in GiB. The forecast is of the process: where the driver has it apart, its CUDA context is added to its line."""
    lines = [line for line in _GPU_LINES if line[0] in digest.series] or [
        line for line in _HOST_LINES if line[0] in digest.series
    ]
    newest = digest.newest_step
    added = round(((newest.context_bytes if newest else None) or plan.card.context_bytes or 0) / GIB, 3)
    levels = []
    if plan.forecast:
        forecast = {
            "value": plan.forecast.peak_bytes, "low": plan.forecast.peak_low_bytes, "high": plan.forecast.peak_high_bytes
        }  # fmt: skip
        gib = {name: round(size / GIB, 3) for name, size in forecast.items()}
        levels.append({"label": tr("forecast"), **gib, "kind": "forecast"})
    if plan.budget_bytes:
        levels.append({"label": tr("budget"), "value": round(plan.budget_bytes / GIB, 3), "kind": "budget"})
    whole = tr("host memory" if plan.card.is_cpu else "size of the GPU")
    levels.append({"label": whole, "value": round(plan.card.total_bytes / GIB, 3), "kind": "card"})
    return {
        "title": tr("Process memory, GiB" if plan.card.is_cpu else "GPU memory, GiB"), "unit": "GiB", "levels": levels,
        "lines": [
            {"name": name, "label": tr(label), "kind": kind, "add": added if name == "peak_reserved_bytes" else 0}
            for name, label, kind in lines
        ],
    }  # fmt: skip


def _small_panels(digest: Digest) -> Iterator[dict[str, Any]]:
    for name, title, unit, _ in small_curves():
        if name in digest.series:
            lines = [{"name": name, "label": "", "kind": "mean"}]
            yield {"title": title, "unit": unit, "small": True, "lines": lines, "levels": []}


def small_curves() -> Iterator[tuple[str, str, str, Callable[[float], str]]]:
    """Name, title and unit of each metric beside loss and memory, and how a value is written; those of methods are the last."""
    for name, title, unit, show in _SMALL_PANELS:
        yield name, tr(title), unit, show
    for name, (label, text) in METRICS.items():
        unit = "percent" if "%" in text else "short"
        yield name, as_on_page(label).capitalize(), unit, text.format
        yield f"eval/{name}", tr("Held-out {metric}", metric=as_on_page(label)), unit, text.format


def answer(live: LiveRun, have: tuple[str, int, int] | None, points: int = MOST_BINS) -> dict[str, Any]:
    """What is new since the version `have` (name, number, checksum of the layout); everything where that is another one's."""
    is_read, state = live.refresh(), live.state()
    with live.lock:
        digest, plan = live.digest, live.plan()
        panels = layout(digest, plan)
        checksum = zlib.crc32(json.dumps(panels).encode())
        is_new = have is None or have[0] != live.name or have[1] > live.version or have[2] != checksum
        lowest = 0.0 if is_new or have is None else live.changed_from(have[1])
        step = digest.newest_step
        total = (step.total_steps if step else None) or plan.total_steps or 0
        events = [event for event in digest.marks if event["step"] >= lowest and event["name"] != "start"]
        marks = [[event["name"], event["step"]] for event in events]
        return {
            "version": f"{live.name}-{live.version}-{checksum}", "all": lowest <= 0,
            "from": lowest if math.isfinite(lowest) else None,
            "step": digest.step, "total": max(total, digest.step), "alive": not state.ended,
            "epochs_per_step": step.epoch / step.step if step and step.epoch and step.step else None,
            "read": None if is_read else round(live.progress, 2),
            "series": _parts(digest.series, panels, points, lowest), "marks": marks,
            **({"panels": panels} if is_new else {}),
        }  # fmt: skip


def zoomed(live: LiveRun, start: int, stop: int, points: int = MOST_BINS) -> dict[str, Any]:
    """The bins of the steps `start` to `stop`, finer than those of the whole run; none where the range is too wide."""
    with live.lock:
        panels = layout(live.digest, live.plan())
    series = live.finer(start, stop, points)
    return {"from": start, "to": stop, "series": _parts(series or {}, panels, points, 0.0)}


def _parts(series: dict[str, Series], panels: list[dict[str, Any]], points: int, lowest: float) -> dict[str, Any]:
    """The bins from the step `lowest` on of each metric that a panel draws, and the seconds of each step for the time axis."""
    wanted = {line["name"]: points // (_SMALL if panel.get("small") else 1) for panel in panels for line in panel["lines"]}
    wanted["step_s"] = points // _SMALL
    return {name: _part(name, series[name], most, lowest) for name, most in wanted.items() if name in series}


def _part(name: str, series: Series, points: int, lowest: float) -> dict[str, Any]:
    """Width, indices (of those that follow each other only the first), means, and where they differ lowest and highest values;
    `gaps` counts the values that are no number.

    More than `points` bins are merged by the same rule as in the series, so that they, too, are stable when steps are added.
    """
    factor = 1
    indices = set(series.bins)
    while len(indices) > points:
        factor, indices = factor * 2, {index // 2 for index in indices}
    width = series.width * factor
    merged: dict[int, Bin] = {}
    for index in sorted(series.bins):
        coarse = index // factor
        if coarse * width + width > lowest:
            part = merged.get(coarse)
            merged[coarse] = part.merged(series.bins[index]) if part else series.bins[index]
    scale = GIB if name.endswith("_bytes") else 1.0
    gaps = {index: part.missing for index, part in merged.items() if part.missing}
    values = {"m": [part.total / part.count if part.count else None for part in merged.values()]}
    if width > 1:
        values["l"] = [part.low if part.count else None for part in merged.values()]
        values["h"] = [part.high if part.count else None for part in merged.values()]
    shown = {key: [None if value is None else _short(value / scale) for value in column] for key, column in values.items()}
    positions = list(merged)
    if positions and positions[-1] - positions[0] == len(positions) - 1:
        positions = positions[:1]
    return {"w": width, "i": positions, **shown, **({"gaps": gaps} if gaps else {})}


def _short(value: float) -> float:
    """Five significant digits: what a chart can show."""
    return float(f"{value:.5g}")
