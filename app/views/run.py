"""Figures, memory, settings, messages and log of a run as HTML, measured beside forecast."""

from __future__ import annotations

import math
import time

from finetune.errors import DiskFull
from finetune.events import Evaluation, OutOfMemory, Retry, RunWarning, Start, State
from finetune.planner.plan import AS_SET, Plan
from finetune.run.out_of_memory import explanation_lines
from finetune.run.state import RunState

from ..language import mark, tr
from ..live import Digest, LiveRun, smoothed
from .charts import measured_peak
from .markup import Safe, as_on_page, inert, render
from .words import STATES, state_name

#: Event kinds that are messages.
_KINDS = {
    "state": mark("state"), "start": mark("start"), "retry": mark("retry"), "warning": mark("warning"),
    "out_of_memory": mark("out of memory"),
}  # fmt: skip
LOG_BYTES = 16 * 2**10
#: Phases by their name in the events.
_PHASES = {"load": mark("Loading"), "train": mark("Training"), "evaluate": mark("Evaluating"), "save": mark("Saving")}
#: Parts of New run's bar that training does not take.
_NOT_TAKEN = ("spread", "free", "held")


def figures(digest: Digest, plan: Plan) -> str:
    """Return loss, held-out loss, peak, speed and GPU, each beside a reference."""
    loss, held_out = digest.series.get("loss"), digest.series.get("eval_loss")
    # the newest step may have no value
    smooth = smoothed(loss.points()) if loss else []
    evaluation, step = digest.newest.get(Evaluation.kind), digest.newest_step
    rate = step.tokens_per_s if step else None
    clauses, values = digest.pace.step_time(plan)
    return render(
        "figures", loss=loss, average=next((value for _, value in reversed(smooth) if value is not None), None),
        held_out=held_out if held_out and held_out.last is not None else None,
        held_out_step=evaluation.step if isinstance(evaluation, Evaluation) else held_out and held_out.last_step,
        lowest=min(((part.low, part.low_step) for part in held_out.bins.values() if part.count), default=None)
        if held_out else None,
        measured=measured_peak(digest, plan)[1], forecast=plan.forecast, is_cpu=plan.card.is_cpu, step=step,
        rate=rate if rate is not None and math.isfinite(rate) else None, percent=_percent,
        step_time=as_on_page(" ".join(tr(clause, **values) for clause in clauses)),
    )  # fmt: skip


def _percent(measured: float, forecast: float) -> str:
    off = round(100 * (measured / forecast - 1), 1)
    return f"{'−' if off < 0 else '+' if off else ''}{abs(off):.1f} %"


def memory(digest: Digest, plan: Plan) -> str:
    """Return the measured memory beside the forecast, by phase and part."""
    forecast, measured = plan.forecast, measured_peak(digest, plan)[1]
    # name, forecast and measured bytes; None if unknown
    pairs = [(tr("Process"), forecast.peak_bytes if forecast else None, measured)]
    if not plan.card.is_cpu:
        pairs += [
            (tr(name), forecast.of_phase(phase).allocated_bytes if forecast else None, digest.phases[phase])
            for phase, name in _PHASES.items() if phase in digest.phases
        ]  # fmt: skip
    pairs = [pair for pair in pairs if pair[1:] != (None, None)]
    # 6 % of space right of the longest bar
    scale = 1.06 * max([1, *(size or 0 for pair in pairs for size in pair[1:])])
    parts = {name: size for name, size in parts_of(plan)[0].items() if name not in _NOT_TAKEN} if forecast else {}
    return render(
        "memory", plan=plan, measured=measured, pairs=pairs, parts=parts, share=lambda size: f"{100 * size / scale:.2f}%",
        percent=_percent,
    )  # fmt: skip


def parts_of(plan: Plan) -> tuple[dict[str, int], int]:
    """Return the bytes of the parts, which sum to the GPU's memory, and the excess bytes; memory_parts.html names the parts."""
    forecast, total = plan.forecast, plan.card.total_bytes
    assert forecast is not None

    def of(*names: str) -> int:
        return sum(forecast.parts.get(name, 0) for name in names)

    parts = {
        "weights": of("weights"), "gathered": of("gathered"), "adapters": of("adapters", "gradients", "optimizer"),
        "activations": of("activations", "recomputed"), "loss": of("loss", "workspace"),
        # the CUDA context, and memory that the allocator holds
        "overhead": max(0, forecast.peak_bytes - forecast.allocated_bytes),
        # the plan must fit with the whole margin
        "spread": max(0, forecast.peak_high_bytes - forecast.peak_bytes),
    }  # fmt: skip
    used, budget = sum(parts.values()), min(plan.usable_bytes, total)
    parts |= {"free": max(0, budget - used), "held": total - budget}
    return {key: size for key, size in parts.items() if size > 0}, max(0, used - budget)


def chosen(plan: Plan) -> Safe:
    """Return six settings with their reasons, then all settings."""
    return render("choices", plan=plan, settings=plan.settings, as_set=AS_SET)


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
