"""Curves, messages and log of a run as HTML: charts as SVG, their summary and table, the end of the log."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from finetune.events import OutOfMemory, Retry, RunWarning, Start, State
from finetune.run.out_of_memory import explanation_lines
from finetune.units import GIB, format_bytes

from ..language import mark, tr
from .chart_series import small_curves
from .charts import Level, Line, Mark, Panel, chart
from .markup import as_on_page, inert, note, table
from .series import Point, smoothed

if TYPE_CHECKING:
    from finetune.planner.plan import Plan

    from ..live import Digest, LiveRun

#: What happened at a step: the name in the digest, and how it looks.
_MARK_CSS = {
    mark("first step"): "first", mark("evaluation"): "evaluation", mark("save"): "save", mark("retry"): "retry",
    mark("resume"): "resume", mark("start"): "start",
}  # fmt: skip
#: Kinds of the events that are messages.
_KINDS = {
    "state": mark("state"), "start": mark("start"), "retry": mark("retry"), "warning": mark("warning"),
    "out_of_memory": mark("out of memory"),
}  # fmt: skip
_MARKS_SHOWN = 60
_SMOOTHING = 0.8
_LOG_BYTES = 16 * 2**10
_TABLE_ROWS = 12
_loss = "{:.4f}".format


def plain_curves(live: LiveRun) -> str:
    """The curves as SVG, with the numbers in a table: where the page has no `<ft-chart>`."""
    rows = f"<details><summary>{tr('Loss and memory as a table')}</summary>{numbers(live.digest)}</details>"
    return f"{curves(live, _SMOOTHING)}{rows}<h2>{tr('More curves')}</h2>{more_curves(live.digest)}"


def curves(live: LiveRun, factor: float) -> str:
    """Loss and memory over the same steps as SVG, with forecast, budget and card, and marks for what happened."""
    digest, plan = live.digest, live.plan()
    panels = [_loss_panel(digest, factor), _memory_panel(digest, plan)]
    shown = [(event["name"], event["step"]) for event in digest.marks if event["name"] != "start"][-_MARKS_SHOWN:]
    marks = [Mark(tr("{event}, step {step}", event=tr(name), step=step), step, _MARK_CSS[name]) for name, step in shown]
    summary = summary_of(digest, plan)
    legend = "".join(
        f'<li class="{css}">{tr(name)}</li>'
        for name, css in _MARK_CSS.items()
        if any(shown_name == name for shown_name, _ in shown)
    )
    marked = f'<ul class="ft-legend marks">{legend}</ul>' if legend else ""
    return f'{chart(panels, marks, digest.step, summary)}{marked}<p class="ft-summary">{inert(summary)}</p>'


def summary_of(digest: Digest, plan: Plan) -> str:
    """The chart's summary as text."""
    loss = digest.series.get("loss")
    if loss is None:
        return tr("No step is complete yet.")
    summary = tr("Loss {loss}.", loss=loss.newest_text(_loss))
    if loss.first is not None and loss.first_step != loss.last_step:
        summary = tr(
            "Loss {loss}, {first} at step {step}, lowest {lowest}.",
            loss=loss.newest_text(_loss), first=_loss(loss.first), step=f"{loss.first_step:,}", lowest=_loss(loss.low),
        )  # fmt: skip
    name, peak = measured_peak(digest, plan)
    if peak is None:
        return summary
    forecast = format_bytes(plan.forecast.peak_bytes) if plan.forecast else ""
    highest = tr(
        "{memory}, peak: {size}, forecast {forecast}." if forecast else "{memory}, peak: {size}.",
        memory=tr(name), size=format_bytes(peak), forecast=forecast,
    )  # fmt: skip
    return f"{summary} {highest}"


def more_curves(digest: Digest) -> str:
    """Held-out loss, learning rate, gradient norm, speed, sensors: small, over the same steps."""
    charts = []
    for name, title, _, show in (("eval_loss", tr("Held-out loss"), "", _loss), *small_curves()):
        series = digest.series.get(name)
        if series is None:
            continue
        label = f"{title}: {series.newest_text(show)}"
        if series.low is not None and series.high is not None:
            label = tr("{reading}, between {low} and {high}", reading=label, low=show(series.low), high=show(series.high))
        newest = tr(series.missing[1]) if series.missing else show(series.last or 0.0)
        panel = Panel(f"{title} {newest}", [Line(title, series.means(), "loss")], show, css="small")
        charts.append(chart([panel], [], digest.step, label))
    return f'<div class="ft-grid">{"".join(charts)}</div>' if charts else note(tr("These curves start with the first step."))


def messages(digest: Digest) -> str:
    """The run's messages: states, retries, warnings."""
    from .run_head import STATES

    rows = []
    for event in reversed(digest.messages):
        match event:
            case State():
                message = as_on_page(event.message) or tr(STATES.get(event.state, (event.state, ""))[0])
            case Start():
                message = tr("training from the beginning")
                if event.resumed_from:
                    message = tr("training from {checkpoint}", checkpoint=event.resumed_from)
            case Retry():
                changes = ", ".join(f"{name}={value}" for name, value in event.changes.items())
                message = f"{as_on_page(event.reason)}: {changes}"
            case RunWarning():
                message = as_on_page(event.message)
            case OutOfMemory():
                message = f"{event.message} {' '.join(map(as_on_page, explanation_lines(event)))}"
            case _:
                continue
        kind = tr(_KINDS.get(event.kind, event.kind.replace("_", " ")))
        rows.append([time.strftime("%H:%M:%S", time.localtime(event.time_s or 0)), kind, message])
    if not rows:
        return note(tr("No messages yet."))
    return table([tr("time"), tr("event"), tr("message")], rows, tr("Messages"), hidden_caption=True)


def log_tail(live: LiveRun) -> str:
    """The end of log.txt."""
    try:
        with live.run.log.open("rb") as file:
            file.seek(max(0, live.run.log.stat().st_size - _LOG_BYTES))
            text = file.read(_LOG_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        text = ""
    shown = inert(text, _LOG_BYTES) or tr("The log is empty.")
    return f'<pre class="ft-log" tabindex="0" role="region" aria-label="{tr("End of the log")}">{shown}</pre>'


def numbers(digest: Digest) -> str:
    """The chart as a table: steps evenly spaced, with loss and memory."""
    loss = digest.series.get("loss")
    if loss is None or not loss.bins:
        return note(tr("No step is complete yet."))
    name = _memory_lines(digest)[-1][0] if _memory_lines(digest) else None
    memory_at = dict(digest.series[name].means()) if name else {}
    points = loss.means()
    chosen = points[:: max(1, len(points) // _TABLE_ROWS)]
    if points[-1] not in chosen:
        chosen.append(points[-1])
    rows = [
        [f"{step:,.0f}", tr("not a number") if value is None else _loss(value), format_bytes(memory_at.get(step))]
        for step, value in chosen
    ]
    columns = [f">{tr('step')}", f">{tr('loss')}", f">{tr('memory')}"]
    return table(columns, rows, tr("Loss and memory by step"), hidden_caption=True)


def _loss_panel(digest: Digest, factor: float) -> Panel:
    lines = []
    if "loss" in digest.series:
        raw = digest.series["loss"]
        lines.append(Line(tr("loss, raw" if factor else "loss"), raw.points(), "loss raw" if factor else "loss"))
        if factor:
            lines.append(Line(tr("loss, smoothed"), smoothed(raw.means(), factor), "loss"))
    if "eval_loss" in digest.series:
        lines.append(Line(tr("held-out loss"), digest.series["eval_loss"].points(), "eval"))
    return Panel(tr("Loss"), lines, lambda value: f"{value:.3g}")


def _memory_panel(digest: Digest, plan: Plan) -> Panel:
    lines = [Line(label, _of_process(name, digest, plan), css) for name, label, css in _memory_lines(digest)]
    levels = []
    if plan.forecast:
        on_card = "peak_allocated_bytes" in digest.series
        forecast = plan.forecast
        band = None if on_card else (float(forecast.peak_low_bytes), float(forecast.peak_high_bytes))
        levels.append(Level(tr("forecast"), float(forecast.peak_bytes), "forecast", band))
    if plan.budget_bytes:
        levels.append(Level(tr("budget"), float(plan.budget_bytes), "budget"))
    levels.append(Level(tr("host memory") if plan.card.is_cpu else "GPU", float(plan.card.total_bytes), "card"))
    title = tr("Process memory" if plan.card.is_cpu else "GPU memory")
    return Panel(title, lines, lambda value: f"{value / GIB:.3g} GiB", levels, zero=True, unit=GIB)


def _memory_lines(digest: Digest) -> list[tuple[str, str, str]]:
    card = [
        ("card_used_bytes", tr("whole GPU, with other programs"), "whole"),
        ("peak_reserved_bytes", tr("Reserved memory and CUDA context"), "reserved"),
        ("peak_allocated_bytes", tr("allocated, peak of the step"), "memory"),
    ]  # fmt: skip
    host = [("process_rss_bytes", tr("process"), "memory")]
    lines = [line for line in card if line[0] in digest.series]
    return lines or [line for line in host if line[0] in digest.series]


def _of_process(name: str, digest: Digest, plan: Plan) -> list[Point]:
    """A curve of memory; that of reserved memory with the CUDA context, like the forecast beside it."""
    added = _context_bytes(digest, plan) if name == "peak_reserved_bytes" else 0
    return [(step, None if size is None else size + added) for step, size in digest.series[name].points()]


def _context_bytes(digest: Digest, plan: Plan) -> int:
    return (digest.newest_step.context_bytes if digest.newest_step else None) or plan.card.context_bytes or 0


def measured_peak(digest: Digest, plan: Plan) -> tuple[str, int | None]:
    """The peak of what the forecast's `peak_bytes` is of, with its name: the training process alone, without other programs.

    On a GPU that is the allocator's reserved memory and the CUDA context, which is the plan's where the driver does not report
    other programs.
    """
    reserved = digest.peaks.get("peak_reserved_bytes")
    if reserved is None:
        return mark("Process memory"), digest.peaks.get("process_peak_rss_bytes") if plan.card.is_cpu else None
    return mark("Reserved memory and CUDA context"), reserved + _context_bytes(digest, plan)
