"""Curves, messages and log of a run as HTML."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from finetune.errors import DiskFull
from finetune.events import OutOfMemory, Retry, RunWarning, Start, State
from finetune.run.out_of_memory import explanation_lines
from finetune.run.state import RunState
from finetune.units import format_bytes

from ..language import mark, tr
from .markup import Safe, as_on_page, inert, render
from .series import smoothed
from .svg_charts import Line, picture
from .words import STATES, state_name

if TYPE_CHECKING:
    from finetune.planner.plan import Plan

    from ..live import Digest, LiveRun

#: Event kinds that are messages.
_KINDS = {
    "state": mark("state"), "start": mark("start"), "retry": mark("retry"), "warning": mark("warning"),
    "out_of_memory": mark("out of memory"),
}  # fmt: skip
#: Metric of the host's memory, for runs without a GPU's.
_HOST = "process_rss_bytes"
#: Curves of memory: metric, label, kind.
_CURVES = (
    ("peak_reserved_bytes", mark("this process"), "process"), ("peak_allocated_bytes", mark("allocated"), "allocated"),
    ("card_used_bytes", mark("whole GPU, with other programs"), "whole"), (_HOST, mark("this process"), "process"),
)  # fmt: skip
#: Metric that stands for a run's memory.
MEMORY = ("peak_allocated_bytes", _HOST)
_SMOOTHING = 0.8
LOG_BYTES = 16 * 2**10
_loss = "{:.4f}".format


def curves(live: LiveRun) -> str:
    """Return loss and memory over steps as SVG, with a summary."""
    digest, plan, end = live.digest, live.plan(), float(max(1, live.digest.step))
    loss, held_out = digest.series.get("loss"), digest.series.get("eval_loss")
    losses = (
        [Line(tr("each step"), loss.points(), "raw"), Line(tr("smoothed"), smoothed(loss.points(), _SMOOTHING), "loss")]
        if loss
        else []
    )
    losses += [Line(tr("held out"), held_out.points(), "eval")] if held_out else []
    memory = _memory_lines(digest, plan)
    if plan.forecast and memory:
        memory.append(Line(tr("forecast"), [(0.0, plan.forecast.peak_bytes), (end, plan.forecast.peak_bytes)], "forecast"))
    title = tr("Process memory" if plan.card.is_cpu else "GPU memory")
    pictures = picture(tr("Loss"), losses, "{:.3g}".format) + picture(title, memory, format_bytes)
    return f'{pictures}<p class="ft-summary">{inert(summary_of(digest, plan))}</p>'


def summary_of(digest: Digest, plan: Plan) -> str:
    """Return the chart's summary as text."""
    loss = digest.series.get("loss")
    if loss is None:
        return tr("No step yet.")
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


def messages(digest: Digest) -> Safe:
    """Return states, retries and warnings."""
    rows = []
    for event in reversed(digest.messages):
        match event:
            case State():
                message = as_on_page(event.message) or state_name(event.state)
            case Start():
                message = tr("training from the beginning")
                if event.resumed_from:
                    message = tr("training from {checkpoint}", checkpoint=event.resumed_from)
            case Retry():
                changes = ", ".join(f"{name}={value}" for name, value in event.changes.items())
                message = f"{as_on_page(event.reason)}: {changes}"
            case OutOfMemory():
                message = f"{event.message} {' '.join(map(as_on_page, explanation_lines(event)))}"
            case RunWarning():
                message = as_on_page(event.message)
            case _:
                continue
        rows.append((time.strftime("%H:%M:%S", time.localtime(event.time_s or 0)), tr(_KINDS[event.kind]), message))
    return render("messages", rows=rows)


def pill(state: RunState) -> Safe:
    """Return the state as a coloured word."""
    name, css = STATES.get(state.state, (state.state.capitalize(), "plain"))
    if state.exit_code == DiskFull.exit_code:
        name = mark("Paused, disk full")
    live = " live" if state.state in ("running", "starting", "pausing") else ""
    return Safe(f'<span class="ft-pill {css}{live}" data-state="{inert(state.state)}"><i></i>{inert(tr(name))}</span>')


def log_tail(live: LiveRun) -> str:
    """Return the end of log.txt."""
    try:
        with live.run.log.open("rb") as file:
            file.seek(max(0, live.run.log.stat().st_size - LOG_BYTES))
            return file.read(LOG_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def memory_curves(digest: Digest, plan: Plan) -> list[tuple[str, str, str, int]]:
    """Return metric, label, kind and the bytes to add to each value of each curve of memory."""
    # the forecast includes the CUDA context, the allocator's reserved memory does not
    added = {"peak_reserved_bytes": context_bytes(digest, plan)}
    curves = [(name, tr(label), kind, added.get(name, 0)) for name, label, kind in _CURVES if name in digest.series]
    return [curve for curve in curves if curve[0] != _HOST] or curves


def _memory_lines(digest: Digest, plan: Plan) -> list[Line]:
    return [
        Line(label, [(step, size and size + added) for step, size in digest.series[name].points(highest=True)], kind)
        for name, label, kind, added in memory_curves(digest, plan)
    ]


def context_bytes(digest: Digest, plan: Plan) -> int:
    """Return the CUDA context's bytes."""
    # the plan's CUDA context where the driver does not report other programs
    return (digest.newest_step.context_bytes if digest.newest_step else None) or plan.card.context_bytes or 0


def measured_peak(digest: Digest, plan: Plan) -> tuple[str, int | None]:
    """Return name and bytes of the measured peak to compare with the forecast's `peak_bytes`."""
    # the training process without other programs, as in the forecast
    reserved = digest.peaks.get("peak_reserved_bytes")
    if reserved is None:
        return mark("Process memory"), digest.peaks.get("process_peak_rss_bytes") if plan.card.is_cpu else None
    return mark("Reserved memory and CUDA context"), reserved + context_bytes(digest, plan)
