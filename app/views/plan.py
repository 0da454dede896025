"""A plan as HTML for a report: verdict, ledger, reasons; and what keeps a run from starting."""

from __future__ import annotations

from typing import Any

from finetune.errors import DataError
from finetune.memory.forecast import PARTS
from finetune.planner.plan import Plan, Verdict
from finetune.units import format_bytes, format_count, format_seconds

from ..language import tr
from ..planning.blocker import Blocker
from .charts import stacked_bar
from .markup import Safe, action, inert, note, table
from .problems import problem
from .verdicts import verdict_in_words
from .words import rows


def verdict(plan: Plan) -> str:
    """The verdict: peak against budget, time and cost."""
    card, forecast = plan.card, plan.forecast
    css, title = plan.verdict.level, verdict_in_words(plan)
    if forecast is None:
        text = f"No memory forecast for {card.name}, so whether it fits is not known."
        return f'<div class="ft-verdict {css}" role="status"><strong>{inert(title)}</strong><p>{inert(text)}</p></div>'
    budget = plan.usable_bytes
    lower, upper = format_bytes(forecast.peak_low_bytes), format_bytes(forecast.peak_high_bytes)
    text = (
        f"Peak {format_bytes(forecast.peak_bytes)} (between {lower} and {upper}), budget {format_bytes(budget)} on {card.name}."
    )
    if plan.verdict == Verdict.AT_LIMIT and forecast.at_limit:
        text += f" At the limit: {forecast.at_limit.summary}."
    if plan.shortfall:
        fits = plan.shortfall.largest_model_that_fits
        text += f" The largest part: {plan.shortfall.part}."
        text += f" The largest model in the catalogue that fits: {fits}." if fits else ""
    time = f"<p>{inert(_duration(plan))}</p>" if plan.total_steps else ""
    time += "" if plan.cost is None else f"<p>It costs {plan.cost:,.2f}.</p>"
    return f'<div class="ft-verdict {css}" role="status"><strong>{inert(title)}</strong><p>{inert(text)}</p>{time}</div>'


def _duration(plan: Plan) -> str:
    step_s = plan.forecast.step_s if plan.forecast else None
    if step_s is None or not plan.total_steps:
        return f"{plan.total_steps:,} steps; the time per step on this GPU is not known."
    speed = plan.forecast.tokens_per_s if plan.forecast else None
    summary = f"{plan.total_steps:,} steps in about {format_seconds(step_s * plan.total_steps)}"
    summary += f" at {format_count(round(speed))} tokens/s" if speed else ""
    return f"{summary}."


def ledger(plan: Plan) -> str:
    """Memory by part as a stacked bar against the card's total, and as a table."""
    forecast, card = plan.forecast, plan.card
    if forecast is None:
        return note(f"{format_bytes(card.free_bytes)} of {format_bytes(card.total_bytes)} are free on {card.name}.")
    others = max(0, card.total_bytes - card.free_bytes)
    parts = [("other programs", others, "part-held")]
    parts += [(part, forecast.parts.get(part, 0), f"part-{part}") for part in PARTS]
    parts.append(("CUDA and allocator", max(0, forecast.peak_bytes - forecast.allocated_bytes), "part-overhead"))
    spread = max(0, forecast.peak_high_bytes - forecast.peak_bytes)
    parts.append(("may be needed", spread, "part-spread"))
    free = card.total_bytes - sum(size for _, size, _ in parts)
    shown = [(name, size, css) for name, size, css in parts if size > 0]
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size, _ in shown)
    left = f"{format_bytes(free)} free" if free >= 0 else f"{format_bytes(-free)} too big"
    label = f"Memory of {card.name}: {sizes}; {left}"
    bar = stacked_bar(shown, card.total_bytes, label, format_bytes)
    lines = [
        [Safe(f'<i class="swatch {css}"></i> {inert(name)}'), format_bytes(size), f"{size / card.total_bytes:.1%}"]
        for name, size, css in shown
    ]
    lines.append(["free" if free >= 0 else "too big by", format_bytes(abs(free)), f"{abs(free) / card.total_bytes:.1%}"])
    peaks = ", ".join(f"{phase} {format_bytes(size)}" for phase, size in forecast.peaks.items())
    notes = "".join(note(text) for text in forecast.notes)
    return (
        bar + table(["training", ">memory", ">share of the GPU"], lines, "Memory by part", hidden_caption=True)
        + note(f"Allocated peak by phase: {peaks}. Forecast by: {forecast.method}.") + notes
    )  # fmt: skip


def reasons(plan: Plan) -> str:
    """Each setting with the reason for it."""
    lines = [[name, _value(getattr(plan.settings, name, None)), reason] for name, reason in plan.reasons.items()]
    return table(["setting", "value", "reason"], lines, "Settings and reasons", hidden_caption=True)


def blocker_note(blocker: Blocker) -> str:
    """Why a run would not start here, and the page with the fix where no button has it."""
    if blocker.elsewhere:
        return note(tr("Planned for another machine: {why}.", why=tr("; ").join(blocker.problems)))
    shown = problem(blocker.title, blocker.problems, "" if blocker.override else blocker.fix)
    if blocker.override:
        press = action(override=blocker.override)
        shown += f'<p id="fit-remedy"><button type="button" class="ft-small" {press}>{inert(blocker.label)}</button></p>'
    is_data = blocker.title == DataError.title and not blocker.override
    return shown + (f'<p><a class="ft-button" href="/">{tr("Choose other data")}</a></p>' if is_data else "")


def data_note(plan: Plan) -> str:
    """Rows and tokens of the data; empty when they were not read."""
    if plan.data is None:
        return ""
    counts = {"rows": rows(plan.data.rows), "tokens": format_count(plan.data.total_tokens)}
    if not plan.data.longest:
        return note(tr("{rows}, {tokens} tokens.", **counts))
    return note(tr("{rows}, {tokens} tokens, the longest has {longest} tokens.", longest=f"{plan.data.longest:,}", **counts))


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
