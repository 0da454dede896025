"""What another value of a setting would cost, as bars made from plans; a plan that is not made yet is an outline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from finetune.units import GIB, gib

from ..language import current, mark, tr
from ..planning.what_if import Outcome
from .markup import action, inert
from .words import slower_in_words


@dataclass(frozen=True)
class Measure:
    """What bars show: how to read it, how to write it on a bar, and its name."""

    value: Callable[[Outcome], float | None]
    text: Callable[[float], str]
    name: str


_TIME = Measure(lambda outcome: outcome.seconds, lambda seconds: _minutes(seconds), mark("minutes of training"))
_SPEED = Measure(lambda outcome: outcome.tokens_per_s, lambda speed: f"{speed:,.0f}", mark("tokens/s"))
_SIZE = Measure(lambda outcome: outcome.peak_high_bytes, lambda size: f"{size / GIB:.1f}", mark("GiB at most"))


def what_if(name: str, label: str, outcomes: Sequence[Outcome], now: Outcome, measure: Measure, *, is_auto: bool) -> str:
    """Bars of one setting, `now` the plan that is shown."""
    highest = max((measure.value(outcome) or 0.0 for outcome in outcomes), default=0.0) or 1.0
    bars = "".join(_bar(name, outcome, now, measure, highest) for outcome in outcomes)
    auto = (
        f'<span class="ft-badge">{tr("auto")}</span>' if is_auto
        else f'<button type="button" class="ft-small" data-key="auto-{name}" {action(auto=name)}>{tr("back to auto")}</button>'
    )  # fmt: skip
    group = tr("{change}: {result}", change=label, result=tr(measure.name))
    return (
        f'<div class="ft-knob"><div class="ft-bars" role="radiogroup" aria-label="{inert(group)}">{bars}</div>'
        f'<p class="ft-note">{auto} <span data-said="{inert(compared(now, now))}">{inert(compared(now, now))}</span></p></div>'
    )


def measure_of(outcomes: Sequence[Outcome]) -> Measure:
    """Time where it is known, else speed, else memory."""
    return next((measure for measure in (_TIME, _SPEED) if any(measure.value(outcome) for outcome in outcomes)), _SIZE)


def compared(outcome: Outcome, now: Outcome) -> str:
    """The way a plan fits and what it costs against the plan that is shown."""
    if outcome.problem:
        return tr(outcome.problem.rstrip(":"))
    if not outcome.is_made:
        return tr("not planned yet")
    parts = [outcome.summaries.get(current(), "")]
    if outcome.value != now.value:
        parts += [slower_in_words(outcome.tokens_per_s, now.tokens_per_s), _memory(outcome, now)]
    if not outcome.fits:
        over = (outcome.peak_high_bytes or 0) - (outcome.budget_bytes or 0)
        parts.append(tr("too big by {size}", size=gib(over)))
    return " · ".join(filter(None, [*parts, outcome.rows_problem]))


def _memory(outcome: Outcome, now: Outcome) -> str:
    if outcome.peak_high_bytes is None or now.peak_high_bytes is None:
        return ""
    change = outcome.peak_high_bytes - now.peak_high_bytes
    return tr("{size} less" if change < 0 else "{size} more", size=gib(abs(change)))


def _bar(name: str, outcome: Outcome, now: Outcome, measure: Measure, highest: float) -> str:
    checked, value = outcome.value == now.value, measure.value(outcome)
    css = "none" if value is None else "" if outcome.fits else "over"
    height = 0.0 if value is None else max(0.04, value / highest)
    text = "×" if outcome.problem else "" if value is None else measure.text(value)
    amount = [] if value is None else [f"{measure.text(value)} {tr(measure.name)}"]
    description = tr(", ").join([*amount, compared(outcome, now)])
    label = tr("{change}: {result}", change=f"{outcome.value:,}", result=description)
    return (
        f'<button type="button" role="radio" aria-checked="{str(checked).lower()}" tabindex="{0 if checked else -1}" '
        f'class="{css}" data-key="{name}-{outcome.value}" {action(set=name, value=outcome.value)} style="--h:{height:.3f}" '
        f'aria-label="{inert(label)}"><em>{inert(text)}</em><span>{_short(outcome.value)}</span></button>'
    )


def _minutes(seconds: float) -> str:
    whole = seconds / 60
    return f"{whole:,.0f}" if whole >= 9.5 else f"{whole:.1f}"


def _short(value: int) -> str:
    return f"{value / 1024:g}k" if value >= 1024 and value % 512 == 0 else str(value)
