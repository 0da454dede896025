"""The row of figures of a run and its memory, measured beside forecast, as HTML."""

from __future__ import annotations

import math
from dataclasses import dataclass

from finetune.events import Evaluation, Step
from finetune.planner.plan import Plan
from finetune.units import GIB, gib

from ..language import mark, tr
from ..live import Digest
from .markup import as_on_page, inert, note
from .memory_parts import parts_of
from .run import measured_peak
from .series import smoothed
from .words import loss_text

_SMOOTHING = 0.8
#: Phases by their name in the events.
_PHASES = {"load": mark("Loading"), "train": mark("Training"), "evaluate": mark("Evaluating"), "save": mark("Saving")}
#: Parts of the bar of the Fit page that training does not take.
_NOT_TAKEN = ("spread", "free", "held")


@dataclass(frozen=True)
class Pair:
    """Bytes that were forecast and measured; None where there is none."""

    name: str
    forecast: int | None
    measured: int | None


def figures(digest: Digest, plan: Plan) -> str:
    """Loss, held-out loss, peak memory, speed and GPU, each with what it is to be compared with; where a step's time goes."""
    cells = [_loss(digest), _held_out(digest), _peak(digest, plan), _speed(digest.newest_step, plan), _gpu(digest, plan)]
    shown = "".join(
        f"<div><dt>{inert(name)}</dt><dd>{inert(value)}</dd><dd class='sub'>{more}</dd></div>"
        for name, value, more in filter(None, cells)
    )
    clauses, values = digest.pace.step_time(plan)
    step_time = as_on_page(" ".join(tr(clause, **values) for clause in clauses))
    return f'<dl class="ft-box ft-figures">{shown}</dl>{note(step_time) if step_time else ""}'


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
    """Whether memory is as forecast, the peak of each phase and, as forecast, what it is made of."""
    on_gpu = not plan.card.is_cpu
    keys = "".join(f'<span><i class="{css}"></i>{tr(css)}</span>' for css in (mark("measured"), mark("forecast")))
    title = tr("GPU memory" if on_gpu else "Process memory")
    head = f'<div class="ft-boxhead"><h2>{title}</h2><span class="ft-key">{keys}</span></div>'
    process = Pair(tr("Process"), plan.forecast.peak_bytes if plan.forecast else None, measured_peak(digest, plan)[1])
    peaks = [process, *(_phases(digest, plan) if on_gpu else [])]
    measured = [pair for pair in peaks if pair.measured is not None or pair.forecast is not None]
    scale = max([1, *(max(pair.forecast or 0, pair.measured or 0) for pair in measured)]) * 1.06
    rows = "".join(_bullet(pair, scale) for pair in measured)
    note = tr(
        "Process: reserved memory and the CUDA context. Phases: allocated at most. Other programs are not counted."
        if on_gpu
        else "On a CPU only the process as a whole can be measured; its parts are the forecast's."
    )
    first = f'<p class="ft-note">{tr("Measured from the first step on.")}</p>'
    body = f"<h3>{tr('Peak, GiB')}</h3>{rows}" if rows else first
    return f'{head}{_summary(digest, plan)}{body}{_parts(plan)}<p class="ft-foot">{note}</p>'


def _summary(digest: Digest, plan: Plan) -> str:
    measured, forecast = measured_peak(digest, plan)[1], plan.forecast
    if forecast is None:
        return f'<p class="ft-calm plain">{tr("There was no forecast for this run.")}</p>'
    if measured is None:
        return f'<p class="ft-calm plain">{tr("Nothing is measured yet.")}</p>'
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
        beyond = tr("{size} outside its range.", size=gib(outside))
        return f'<p class="ft-calm warn"><b>{word}</b> {beyond} {free}</p>'
    off = measured / forecast.peak_bytes - 1
    how = tr("{percent} below it." if off < 0 else "{percent} above it.", percent=f"{100 * abs(off):.1f} %")
    return f'<p class="ft-calm ok"><b>{tr("As forecast.")}</b> {how} {free}</p>'


def _phases(digest: Digest, plan: Plan) -> list[Pair]:
    pairs = []
    for phase, name in _PHASES.items():
        measured = digest.phases.get(phase, {}).get("peak_allocated_bytes")
        if measured is not None:
            expected = plan.forecast.of_phase(phase).allocated_bytes if plan.forecast else None
            pairs.append(Pair(tr(name), expected, measured))
    return pairs


def _bullet(pair: Pair, scale: float) -> str:
    tick = f'<u style="left:{100 * pair.forecast / scale:.2f}%"></u>' if pair.forecast is not None else ""
    bar = f'<i style="width:{100 * pair.measured / scale:.2f}%"></i>' if pair.measured is not None else ""
    value = pair.measured if pair.measured is not None else pair.forecast or 0
    off = tr("forecast") if pair.measured is None else _percent(pair.measured, pair.forecast) if pair.forecast else ""
    sizes = {tr("measured"): pair.measured, tr("forecast"): pair.forecast}
    label = f"{pair.name}: {', '.join(f'{name} {gib(size)}' for name, size in sizes.items() if size is not None)}"
    css = "" if pair.measured is not None else ' class="soft"'
    return (
        f'<div class="ft-bullet"><span>{inert(pair.name)}</span><span class="track" role="img" aria-label="{inert(label)}">'
        f"{bar}{tick}</span><b{css}>{value / GIB:.2f}</b><span>{off}</span></div>"
    )


def _parts(plan: Plan) -> str:
    if plan.forecast is None:
        return ""
    shown = [(part.key, part.name, part.size) for part in parts_of(plan, "train")[0] if part.key not in _NOT_TAKEN]
    whole = sum(size for _, _, size in shown) or 1
    pieces = "".join(f'<i class="part-{key}" style="width:{100 * size / whole:.2f}%"></i>' for key, _, size in shown)
    names = "".join(
        f'<li><i class="swatch part-{key}"></i><span>{inert(name)}</span><b>{gib(size)}</b></li>' for key, name, size in shown
    )
    label = ", ".join(f"{name} {gib(size)}" for _, name, size in shown)
    return (
        f"<h3>{tr('What training takes, forecast')}</h3>"
        f'<div class="ft-split" role="img" aria-label="{inert(label)}">{pieces}</div>'
        f'<ul class="ft-split-key">{names}</ul>'
    )
