"""Figures and memory of a run, measured beside forecast, as HTML."""

from __future__ import annotations

import math

from finetune.events import Evaluation, Step
from finetune.planner.plan import Plan
from finetune.units import gib

from ..language import mark, tr
from ..live import Digest
from .markup import Safe, as_on_page, render
from .memory_parts import parts_of
from .run import measured_peak
from .series import smoothed
from .words import loss_text

_SMOOTHING = 0.8
#: Phases by their name in the events.
_PHASES = {"load": mark("Loading"), "train": mark("Training"), "evaluate": mark("Evaluating"), "save": mark("Saving")}
#: Parts of New run's bar that training does not take.
_NOT_TAKEN = ("spread", "free", "held")


#: Name, forecast and measured bytes; None if unknown.
_Pair = tuple[str, int | None, int | None]


def figures(digest: Digest, plan: Plan) -> str:
    """Return loss, held-out loss, peak, speed and GPU, each beside a reference."""
    cells = [_loss(digest), _held_out(digest), _peak(digest, plan), _speed(digest.newest_step, plan), _gpu(digest, plan)]
    clauses, values = digest.pace.step_time(plan)
    step_time = as_on_page(" ".join(tr(clause, **values) for clause in clauses))
    shown = [(name, value, Safe(more)) for name, value, more in filter(None, cells)]
    return render("figures", cells=shown, step_time=step_time)


Cell = tuple[str, str, str]


def _loss(digest: Digest) -> Cell:
    series = digest.series.get("loss")
    if series is None:
        return tr("Loss"), tr("not yet"), tr("with the first step")
    if series.missing:
        where = tr("at step {step}", step=f"{series.missing[0]:,}")
        if series.last is not None:
            last, last_step = loss_text(series.last), f"{series.last_step:,}"
            where = tr("at step {step}, {loss} at {before} before", step=f"{series.missing[0]:,}", loss=last, before=last_step)
        return tr("Loss"), tr("not a number"), where
    # the newest step may have no value
    average = next((value for _, value in reversed(smoothed(series.points(), _SMOOTHING)) if value is not None), None)
    first = tr("from {loss}", loss=loss_text(series.first)) if series.first is not None else ""
    return tr("Loss, smoothed"), loss_text(average) if average is not None else tr("not yet"), first


def _held_out(digest: Digest) -> Cell | None:
    series = digest.series.get("eval_loss")
    if series is None or series.last is None:
        return None
    newest = digest.newest.get(Evaluation.kind)
    step = newest.step if isinstance(newest, Evaluation) else series.last_step
    if series.missing:
        return tr("Held out"), tr("not a number"), tr("at step {step}", step=f"{step:,}")
    if series.low is not None and series.last <= series.low:
        return tr("Held out"), loss_text(series.last), tr("<b>best so far</b>, at step {step}", step=f"{step:,}")
    lowest = min((part.low, part.low_step) for part in series.bins.values() if part.count)
    best = tr("best {loss}, at step {step}", loss=loss_text(lowest[0]), step=f"{lowest[1]:,}")
    return tr("Held out"), loss_text(series.last), best


def _peak(digest: Digest, plan: Plan) -> Cell | None:
    measured = measured_peak(digest, plan)[1]
    name = tr("Host memory, peak" if plan.card.is_cpu else "Memory peak")
    if plan.forecast is None:
        return None if measured is None else (name, gib(measured), tr("no forecast"))
    forecast = plan.forecast.peak_bytes
    expected = tr("forecast {size}", size=gib(forecast))
    if measured is None:
        return name, tr("not yet"), expected
    return name, gib(measured), f"{expected}, <b>{_percent(measured, forecast)}</b>"


def _speed(step: Step | None, plan: Plan) -> Cell | None:
    rate = step.tokens_per_s if step else None
    if rate is None or not math.isfinite(rate):
        return None
    forecast = plan.forecast.tokens_per_s if plan.forecast else None
    more = tr("tokens/s, forecast {rate}" if forecast else "tokens/s", rate=f"{forecast or 0:,.0f}")
    return tr("Speed"), f"{rate:,.0f}", more


def _gpu(digest: Digest, plan: Plan) -> Cell | None:
    step = digest.newest_step
    if step is None or plan.card.is_cpu:
        if step is None or step.step_s is None:
            return None
        return tr("Step time"), tr("{s} s", s=f"{step.step_s:.2f}"), tr("of the newest step")
    if step.temperature_c is None:
        return None
    return "GPU", f"{step.temperature_c:.0f} °C", f"{step.power_w:.0f} W" if step.power_w is not None else ""


def _percent(measured: float, forecast: float) -> str:
    off = round(100 * (measured / forecast - 1), 1)
    return f"{'−' if off < 0 else '+' if off else ''}{abs(off):.1f} %"


def memory(digest: Digest, plan: Plan) -> str:
    """Return the measured memory beside the forecast, by phase and part."""
    on_gpu = not plan.card.is_cpu
    process = (tr("Process"), plan.forecast.peak_bytes if plan.forecast else None, measured_peak(digest, plan)[1])
    pairs = [pair for pair in (process, *(_phases(digest, plan) if on_gpu else [])) if pair[1:] != (None, None)]
    # 6 % of space right of the longest bar
    scale = 1.06 * max([1, *(size or 0 for pair in pairs for size in pair[1:])])
    parts = [part for part in parts_of(plan)[0] if part.key not in _NOT_TAKEN] if plan.forecast else []
    foot = tr(
        "Process: reserved memory and CUDA context. Phases: peak allocated memory. Other programs are not counted."
        if on_gpu
        else "On a CPU only the whole process can be measured. The parts are forecasts."
    )
    css, summary = _summary(digest, plan)
    return render(
        "memory", title=tr("GPU memory" if on_gpu else "Process memory"), css=css, summary=Safe(summary), pairs=pairs,
        parts=parts, whole=sum(part.size for part in parts) or 1, gib=gib, share=lambda size: f"{100 * size / scale:.2f}%",
        foot=foot, percent=_percent,
    )  # fmt: skip


def _summary(digest: Digest, plan: Plan) -> tuple[str, str]:
    measured, forecast = measured_peak(digest, plan)[1], plan.forecast
    if forecast is None:
        return "plain", tr("This run has no forecast.")
    if measured is None:
        return "plain", tr("No measurement yet.")
    budget = plan.usable_bytes
    free = ""
    if budget > measured:
        free = tr(
            "{size} of host memory stay free." if plan.card.is_cpu else "{size} of the GPU stay free.",
            size=gib(budget - measured),
        )
    outside = max(measured - forecast.peak_high_bytes, forecast.peak_low_bytes - measured)
    if outside > 0:
        word = tr("More than forecast." if measured > forecast.peak_bytes else "Less than forecast.")
        beyond = tr("{size} outside the forecast range.", size=gib(outside))
        return "warn", f"<b>{word}</b> {beyond} {free}"
    off = measured / forecast.peak_bytes - 1
    how = tr("{percent} below it." if off < 0 else "{percent} above it.", percent=f"{100 * abs(off):.1f} %")
    return "ok", f"<b>{tr('As forecast.')}</b> {how} {free}"


def _phases(digest: Digest, plan: Plan) -> list[_Pair]:
    return [
        (tr(name), plan.forecast.of_phase(phase).allocated_bytes if plan.forecast else None, digest.phases[phase])
        for phase, name in _PHASES.items() if phase in digest.phases
    ]  # fmt: skip
