"""The row of figures of a run and its memory, measured beside forecast, as HTML."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.events import Evaluation, Step
from finetune.planner.plan import Plan
from finetune.units import GIB, gib

from .fit import parts_of
from .markup import inert
from .run import measured_peak
from .series import smoothed
from .words import loss_text

if TYPE_CHECKING:
    from ..live import Digest

_SMOOTHING = 0.8
#: Phases by their name in the events.
_PHASES = {"load": "Loading", "train": "Training", "evaluate": "Evaluating", "save": "Saving"}
#: Parts of the bar of the Fit page that training does not take.
_NOT_TAKEN = ("spread", "free", "held")
#: Differences up to this share are as forecast.
_CLOSE = 0.02


@dataclass(frozen=True)
class Pair:
    """Bytes that were forecast and measured; None where there is none."""

    name: str
    forecast: int | None
    measured: int | None


def figures(digest: Digest, plan: Plan) -> str:
    """Loss, held-out loss, peak memory, speed and GPU, each with what it is to be compared with."""
    cells = [_loss(digest), _held_out(digest), _peak(digest, plan), _speed(digest.newest_step, plan), _gpu(digest, plan)]
    shown = "".join(
        f"<div><dt>{inert(name)}</dt><dd>{inert(value)}</dd><dd class='sub'>{more}</dd></div>"
        for name, value, more in filter(None, cells)
    )
    return f'<dl class="ft-box ft-figures">{shown}</dl>'


Cell = tuple[str, str, str]


def _loss(digest: Digest) -> Cell:
    series = digest.series.get("loss")
    if series is None:
        return "Loss", "not yet", "with the first step"
    if series.missing:
        step, _ = series.missing
        last = f", {loss_text(series.last)} at {series.last_step:,} before" if series.last is not None else ""
        return "Loss", "not a number", f"at step {step:,}{last}"
    average = next((value for _, value in reversed(smoothed(series.means(), _SMOOTHING)) if value is not None), None)
    first = f"from {loss_text(series.first)}" if series.first is not None else ""
    return "Loss, smoothed", loss_text(average) if average is not None else "not yet", first


def _held_out(digest: Digest) -> Cell | None:
    series = digest.series.get("eval_loss")
    if series is None or series.last is None:
        return None
    newest = digest.newest.get(Evaluation.kind)
    step = newest.step if isinstance(newest, Evaluation) else series.last_step
    if series.missing:
        return "Held out", "not a number", f"at step {step:,}"
    if series.low is not None and series.last <= series.low:
        return "Held out", loss_text(series.last), f"<b>best so far</b>, at step {step:,}"
    lowest = min((part.low, part.low_step) for part in series.bins.values() if part.count)
    return "Held out", loss_text(series.last), f"best {loss_text(lowest[0])}, at step {lowest[1]:,}"


def _peak(digest: Digest, plan: Plan) -> Cell | None:
    measured = measured_peak(digest, plan)[1]
    name = "Host memory, peak" if plan.card.is_cpu else "Memory peak"
    if measured is None:
        return (name, "not yet", f"forecast {gib(plan.forecast.peak_bytes)}") if plan.forecast else None
    if plan.forecast is None:
        return name, gib(measured), "no forecast"
    forecast = plan.forecast.peak_bytes
    return name, gib(measured), f"forecast {gib(forecast)}, <b>{_percent(measured, forecast)}</b>"


def _speed(step: Step | None, plan: Plan) -> Cell | None:
    rate = step.tokens_per_s if step else None
    if rate is None or not math.isfinite(rate):
        return None
    forecast = plan.forecast.tokens_per_s if plan.forecast else None
    return "Speed", f"{rate:,.0f}", f"tokens/s{f', forecast {forecast:,.0f}' if forecast else ''}"


def _gpu(digest: Digest, plan: Plan) -> Cell | None:
    step = digest.newest_step
    if step is None or plan.card.is_cpu:
        return ("Step time", f"{step.step_s:.2f} s", "of the newest step") if step and step.step_s is not None else None
    if step.temperature_c is None:
        return None
    return "GPU", f"{step.temperature_c:.0f} °C", f"{step.power_w:.0f} W" if step.power_w is not None else ""


def _percent(measured: float, forecast: float) -> str:
    """How much more or less than forecast was measured."""
    off = round(100 * (measured / forecast - 1), 1)
    return f"{'−' if off < 0 else '+' if off else ''}{abs(off):.1f} %"


def memory(digest: Digest, plan: Plan) -> str:
    """Whether memory is as forecast, the peak of each phase and, as forecast, what it is made of."""
    head = (
        '<div class="ft-boxhead"><h2>Memory</h2><span class="ft-key"><span><i class="measured"></i>measured</span>'
        '<span><i class="forecast"></i>forecast</span></span></div>'
    )
    on_gpu = not plan.card.is_cpu
    peaks = [_whole(digest, plan), *(_phases(digest, plan) if on_gpu else [])]
    measured = [pair for pair in peaks if pair.measured is not None or pair.forecast is not None]
    scale = max([1, *(max(pair.forecast or 0, pair.measured or 0) for pair in measured)]) * 1.06
    rows = "".join(_bullet(pair, scale) for pair in measured)
    note = (
        "Process: reserved memory and the CUDA context. Phases: allocated at most. Other programs are not counted."
        if on_gpu
        else "On a CPU only the process as a whole can be measured; its parts are the forecast's."
    )
    body = f"<h3>Peak, GiB</h3>{rows}" if rows else '<p class="ft-note">Measured from the first step on.</p>'
    return f'{head}{_summary(digest, plan)}{body}{_parts(plan)}<p class="ft-foot">{note}</p>'


def _summary(digest: Digest, plan: Plan) -> str:
    """One sentence: as forecast or not, and what stays free."""
    measured, forecast = measured_peak(digest, plan)[1], plan.forecast
    if forecast is None:
        return '<p class="ft-calm plain">There was no forecast for this run.</p>'
    if measured is None:
        return '<p class="ft-calm plain">Nothing is measured yet.</p>'
    budget = plan.budget_bytes or plan.card.free_bytes
    where = "host memory" if plan.card.is_cpu else "the GPU"
    free = f" {gib(budget - measured)} of {where} stay free." if budget > measured else ""
    off = abs(measured / forecast.peak_bytes - 1)
    how = f"{100 * off:.1f} % {'below' if measured < forecast.peak_bytes else 'above'} it."
    if measured > forecast.peak_high_bytes:
        above = gib(measured - forecast.peak_high_bytes)
        return f'<p class="ft-calm warn"><b>More than forecast.</b> {above} above its range.{free}</p>'
    word = "As forecast." if off <= _CLOSE else "Within the forecast."
    if measured < forecast.peak_low_bytes:
        word = "Less than forecast."
    return f'<p class="ft-calm ok"><b>{word}</b> {how}{free}</p>'


def _whole(digest: Digest, plan: Plan) -> Pair:
    """The process: what the forecast's peak is of."""
    return Pair("Process", plan.forecast.peak_bytes if plan.forecast else None, measured_peak(digest, plan)[1])


def _phases(digest: Digest, plan: Plan) -> list[Pair]:
    """The allocated peak of each phase that was measured."""
    pairs = []
    for phase, name in _PHASES.items():
        measured = digest.phases.get(phase, {}).get("peak_allocated_bytes")
        if measured is not None:
            expected = plan.forecast.of_phase(phase).allocated_bytes if plan.forecast else None
            pairs.append(Pair(name, expected, measured))
    return pairs


def _bullet(pair: Pair, scale: float) -> str:
    """A bar for what was measured, a tick for the forecast, and the numbers."""
    tick = f'<u style="left:{100 * pair.forecast / scale:.2f}%"></u>' if pair.forecast is not None else ""
    bar = f'<i style="width:{100 * pair.measured / scale:.2f}%"></i>' if pair.measured is not None else ""
    value = pair.measured if pair.measured is not None else pair.forecast or 0
    off = "forecast" if pair.measured is None else _percent(pair.measured, pair.forecast) if pair.forecast else ""
    sizes = {"measured": pair.measured, "forecast": pair.forecast}
    label = f"{pair.name}: {', '.join(f'{name} {gib(size)}' for name, size in sizes.items() if size is not None)}"
    css = "" if pair.measured is not None else ' class="soft"'
    return (
        f'<div class="ft-bullet"><span>{inert(pair.name)}</span><span class="track" role="img" aria-label="{inert(label)}">'
        f"{bar}{tick}</span><b{css}>{value / GIB:.2f}</b><span>{off}</span></div>"
    )


def _parts(plan: Plan) -> str:
    """What the training peak is made of, by the forecast."""
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
        f'<h3>What training takes, forecast</h3><div class="ft-split" role="img" aria-label="{inert(label)}">{pieces}</div>'
        f'<ul class="ft-split-key">{names}</ul>'
    )
