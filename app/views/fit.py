"""The head of the Fit page as HTML: the verdict, the memory bar with its parts, the facts, and what would make it smaller."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from finetune.planner.plan import Plan, Suggestion, Verdict
from finetune.settings import AUTO
from finetune.units import GIB, format_bytes, gib

from ..language import mark, tr, tr_n
from .markup import action, as_on_page, inert, note
from .memory_parts import PHASES, Part, parts_of
from .words import capital, in_words, minutes, override_values, plan_in_words, slower_in_words

_SUGGESTIONS = 3
#: The planner's sentence of what a change costs -> the page's.
_PRICES = {
    "NF4 weights: dequantisation takes a few percent of time": mark("dequantising takes a few percent of time"),
    "NF4 weights instead of int8": mark("4-bit weights instead of 8-bit ones"),
    "same effective batch, smaller micro-batches: slower on short rows": mark(
        "the same rows per step, fewer at a time: slower on short rows"
    ),
    "forward pass runs twice: up to 45 % more time": mark("the forward pass runs twice: up to 45 % more time"),
    "8-bit optimizer states": mark("8-bit optimizer states"),
    "longer rows are dropped": mark("longer rows are left out"),
    "the layers' weights in host memory, copied to the card beside the computation": mark(
        "the layers' weights are copied to the GPU beside the computation"
    ),
    "a smaller adapter learns less from the data": mark("a smaller adapter learns less from the data"),
    "adapters are rounded to bf16 after each update, as in TRL with 4-bit weights": mark(
        "adapters are rounded to bf16 after each update"
    ),
    "no dropout": mark("no dropout"), "plain LoRA": mark("plain LoRA"),
}  # fmt: skip
_FULL_DEPTH = re.compile(r"dry run, full depth \((\d+) layers\)")
_REPEATED = re.compile(r"dry run, (\d+) of (\d+) layers, repeated")
_LONGER = re.compile(r"(?P<n>[\d,]+) of (?P<rows>[\d,]+) rows \((?P<share>[\d.]+%) of the tokens\) are longer")
#: A part's setting that makes it smaller.
_SMALLER = {"weights": "load_in_4bit", "activations": "activation_checkpointing", "adapters": "optim"}


def verdict(plan: Plan, *, blocked: bool = False) -> str:
    """The sentence as the page's heading, and the forecast behind it. `blocked`: a run would not start, so it isn't green."""
    (template, values), css, forecast = plan.verdict_sentence(), plan.verdict.level, plan.forecast
    title = capital(tr(template, **values))
    if blocked and css == "ok":
        css = "warn"
    if forecast is None:
        return _heading(css, title)
    budget, likely, most = plan.usable_bytes, forecast.peak_bytes, forecast.peak_high_bytes
    sentences = [
        tr("Peak {likely} ({most} at most) of {budget}.", likely=gib(likely), most=gib(most), budget=gib(budget)),
        tr("{text}.", text=capital(plan_in_words(plan.settings))),
    ]
    if plan.shortfall and (model := plan.shortfall.largest_model_that_fits):
        sentences.append(tr("The largest model in the catalogue that fits: {model}.", model=model))
    return _heading(css, title, " ".join(sentences))


def cannot_say(problems: int) -> str:
    """The heading without a plan."""
    counted = tr_n("Unknown: {n} setting to correct", "Unknown: {n} settings to correct", problems)
    return _heading("unknown", counted if problems else tr("Unknown: there is no plan"))


def _heading(css: str, title: str, text: str = "") -> str:
    icons = {"ok": "m9 15.5 4.2 4.2L21.5 11", "warn": "M15 8v9M15 21v.5", "bad": "m10 10 10 10M20 10 10 20"}
    path = icons.get(css, "M10 15h10")
    icon = f'<svg viewBox="0 0 30 30" aria-hidden="true"><circle cx="15" cy="15" r="14"/><path d="{path}"/></svg>'
    heading = f'<h1 class="ft-title" data-title="{inert(title)}">{icon}{inert(title)}</h1>'
    return f'<div class="ft-hero ft-verdict {css}" role="status">{heading}{f"<p>{inert(text)}</p>" if text else ""}</div>'


def memory(plan: Plan) -> str:
    """The GPU's memory in each phase: a bar whose scale is the GPU, and each part as a button that explains it."""
    forecast, card = plan.forecast, plan.card
    if forecast is None:
        free, total = gib(card.free_bytes), gib(card.total_bytes)
        return note(tr("{free} of {total} are free on {gpu}.", free=free, total=total, gpu=card.name))
    title = tr("Host memory" if card.is_cpu else "GPU memory")
    phases = [phase for phase in PHASES if phase == "train" or phase in forecast.peaks]
    buttons = "".join(
        f'<button type="button" data-phase-button="{phase}" data-key="phase-{phase}" aria-pressed="false">'
        f"{tr(PHASES[phase][0])}</button>"
        for phase in phases
    )
    head = (
        f'<div class="ft-barhead"><h2>{title}</h2><div class="ft-seg" role="group" aria-label="{tr("Phase")}">{buttons}</div>'
        f'<span class="ft-method">{tr("Forecast: the training step itself, run without data.")}</span></div>'
    )
    panels = "".join(_phase(plan, phase) for phase in phases)
    notes = "".join(note(as_on_page(text)) for text in forecast.notes)
    notes += note(tr("Forecast by: {method}.", method=_simulation(forecast.method)))
    details = f'<details class="ft-details"><summary>{tr("Details of the forecast")}</summary>{notes}</details>'
    return f"{head}{panels}{details}"


def _simulation(method: str) -> str:
    if full := _FULL_DEPTH.fullmatch(method):
        return tr("dry run of all {n} layers", n=full[1])
    if few := _REPEATED.fullmatch(method):
        return tr("dry run of {n} of {total} layers, repeated", n=few[1], total=few[2])
    return tr("dry run") if method == "dry run" else method


def _phase(plan: Plan, phase: str) -> str:
    parts, over = parts_of(plan, phase)
    total = plan.card.total_bytes
    shown = "".join(_piece(part, width) for part, width in _widths(parts, total))
    beyond, too_big = "", tr("{size} too big", size=gib(over))
    if over:
        share = min(28.0, 100 * over / (total + over))
        beyond = f'<span class="ft-beyond" style="flex-basis:{share:.1f}%"><b>{too_big}</b></span>'
    sizes = tr(", ").join(f"{part.name} {gib(part.size)}" for part in parts)
    label = tr("{phase}: {sizes}, of {total}", phase=tr(PHASES[phase][0]), sizes=sizes, total=gib(total))
    label = tr("; ").join([label, too_big] if over else [label])
    bar = f'<div class="ft-mem" role="img" aria-label="{inert(label)}"><div class="track">{shown}</div>{beyond}</div>'
    buttons = "".join(
        f'<button type="button" data-part-button="{part.key}" data-key="{phase}-{part.key}" aria-pressed="false">'
        f'<i class="swatch part-{part.key}"></i><span>{inert(part.name)}</span><b>{gib(part.size)}</b></button>'
        for part in parts
    )
    reasons = "".join(_why(part, plan if phase == "train" else None) for part in parts)
    hint = '<p class="ft-why" data-why="">' + tr("Choose a part to see what it is.") + "</p>"
    hidden = "" if phase == "train" else " hidden"
    return (
        f'<div class="ft-phase" data-phase="{phase}"{hidden}>{bar}{_axis(plan, over)}'
        f'<div class="ft-parts">{buttons}</div><div aria-live="polite">{hint}{reasons}</div></div>'
    )


def _widths(parts: list[Part], total: int) -> list[tuple[Part, float]]:
    """Each part with its share of the bar in percent; those that do not fit end where other programs begin."""
    shown, free = [], float(total - sum(part.size for part in parts if part.key == "held"))
    for part in parts:
        drawn = float(part.size) if part.key == "held" else min(float(part.size), free)
        free -= 0 if part.key == "held" else drawn
        if drawn > 0:
            shown.append((part, 100 * drawn / total))
    return shown


def _piece(part: Part, width: float) -> str:
    text = f"{inert(part.name)}<b>{gib(part.size)}</b>" if width > 11 else ""
    return f'<span class="part-{part.key}" data-part-button="{part.key}" style="width:{width:.3f}%">{text}</span>'


def _axis(plan: Plan, over: int) -> str:
    total = plan.card.total_bytes
    end = tr("{size} memory" if plan.card.is_cpu else "{size} GPU", size=gib(total))
    step = next(step for step in (0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if total / GIB / step <= 7)
    values = [step * number for number in range(int(total / GIB / step * 0.93) + 1)]
    ticks = "".join(
        f'<span style="left:{100 * value * GIB / total:.2f}%">{value:g}{"" if value else " GiB"}</span>' for value in values
    )
    share = min(28.0, 100 * over / (total + over)) if over else 0.0
    width = f' style="width:calc(100% - max({share:.1f}%, 8.5rem))"' if over else ""
    return f'<div class="ft-axis" aria-hidden="true"{width}>{ticks}<span class="end">{end}</span></div>'


def _why(part: Part, plan: Plan | None) -> str:
    """What a part is, and the change that makes it smaller by a plan that was made."""
    button = _smaller_button(plan, part.key) if plan else ""
    text = f"<b>{inert(tr('{text}.', text=part.name))}</b> {inert(part.why)}"
    return f'<p class="ft-why" data-why="{part.key}" hidden><span>{text}</span>{button}</p>'


def _smaller_button(plan: Plan, key: str) -> str:
    setting, forecast = _SMALLER.get(key), plan.forecast
    assert forecast is not None
    for row in plan.alternatives:
        if setting and setting in override_values(row.differs) and row.peak_high_bytes < forecast.peak_high_bytes:
            less = tr("{size} less", size=gib(forecast.peak_high_bytes - row.peak_high_bytes))
            costs = tr(", ").join(filter(None, [less, slower_in_words(row.tokens_per_s, forecast.tokens_per_s)]))
            label = tr("{change}: {result}", change=in_words(row.differs), result=costs)
            return f'<button type="button" class="ft-small" {action(override=row.differs)}>{inert(label)}</button>'
    return ""


def facts(plan: Plan) -> str:
    """Time with its cost, speed, steps and size of the adapter in a line."""
    forecast, settings = plan.forecast, plan.settings
    step_s, steps = (forecast.step_s if forecast else None), plan.total_steps
    epochs = settings.num_train_epochs
    cells = []
    if step_s and steps:
        counted = tr("Time, {n} epoch" if epochs == 1 else "Time, {n} epochs", n=f"{epochs:g}")
        name = tr("Time") if settings.max_steps else counted
        cells.append((name, f"≈ {minutes(step_s * steps)}", _cost(plan)))
    elif steps:
        why = tr("a run measures it" if plan.card.is_cpu else "this GPU's speed is not known")
        cells.append((tr("Time"), tr("not known"), why))
    if forecast and forecast.tokens_per_s:
        cells.append((tr("Speed"), f"{forecast.tokens_per_s:,.0f}", tr("tokens/s")))
    if steps:
        of = tr_n("of {n} row", "of {n} rows", settings.effective_batch_size)
        cells.append((tr("Steps"), f"{steps:,}", of))
    if forecast and forecast.parts.get("adapters"):
        size, _, unit = format_bytes(forecast.parts["adapters"]).partition(" ")
        cells.append((tr("Adapter"), size, unit))
    shown = "".join(
        f"<div><dt>{inert(name)}</dt><dd>{inert(value)} <small>{inert(more)}</small></dd></div>" for name, value, more in cells
    )
    return f'<dl class="ft-facts">{shown}</dl>' if cells else ""


def _cost(plan: Plan) -> str:
    if plan.cost is None:
        return ""
    return tr("{cost} at {price} an hour", cost=f"{plan.cost:,.2f}", price=f"{plan.settings.price_per_hour:g}")


def smaller(plan: Plan) -> str:
    """Changes that save memory as buttons, each with its result; empty when there are none."""
    if not plan.suggestions:
        return ""
    budget = plan.usable_bytes
    fitting = sorted((item for item in plan.suggestions if item.peak_bytes <= budget), key=lambda item: item.saves_bytes)
    chosen = [*fitting, *(item for item in plan.suggestions if item not in fitting)][:_SUGGESTIONS]
    buttons = "".join(
        f'<li><button type="button" class="ft-choice" {action(override=item.override)}>{_suggestion(item, plan)}</button></li>'
        for item in chosen
    )
    return f'<section class="ft-section"><h2>{tr("Make it smaller")}</h2><ul class="ft-choices">{buttons}</ul></section>'


def _suggestion(item: Suggestion, plan: Plan) -> str:
    change, result, price = in_words(item.override), outcome(item, plan), _price(item)
    return f"<b>{inert(change)}</b><span>{inert(result)}</span><small>{inert(price)}</small>"


def _price(item: Suggestion) -> str:
    if longer := _LONGER.fullmatch(item.cost):
        return tr("{n} of {rows} rows ({share} of the tokens) are longer", **longer.groupdict())
    return tr(_PRICES.get(item.cost, item.cost))


def outcome(item: Suggestion, plan: Plan) -> str:
    """Whether the plan then fits, by the forecast's upper end."""
    upper, budget = item.peak_bytes, plan.usable_bytes
    template = mark("then it fits: {size} of {budget}") if upper <= budget else mark("still too big: {size} of {budget}")
    return tr(template, size=f"{upper / GIB:,.1f}", budget=gib(budget))


def ready(plan: Plan, obstacle: str) -> str:
    """Whether a run can start, and what it needs of the disk."""
    if obstacle:
        return f'<p class="ft-ready"><b>{tr("Not yet.")}</b> {inert(obstacle)}</p>'
    if plan.verdict == Verdict.NO_FIT:
        return f'<p class="ft-ready"><b>{tr("Does not fit.")}</b> {tr("A smaller plan starts at once.")}</p>'
    checks = [check for check in plan.checks if check.enough is not None]
    disk = next((check for check in plan.checks if check.what == "disk"), None)
    needs = passed = ""
    if disk and disk.free_bytes:
        needs = tr("{size} of {free} free disk", size=gib(disk.needs_bytes), free=gib(disk.free_bytes))
    if checks:
        passed = tr("{n} of {total} checks passed", n=sum(bool(check.enough) for check in checks), total=len(checks))
    return f'<p class="ft-ready"><b>{tr("Ready.")}</b> {inert(" · ".join(filter(None, [passed, needs])))}</p>'


def auto(name: str, values: Mapping[str, Any]) -> str:
    """Whether the planner chooses a number, or the button that lets it."""
    if values.get(name) in (None, AUTO):
        return f'<span class="ft-badge">{tr("auto")}</span>'
    return f'<button type="button" class="ft-small" data-key="auto-{name}" {action(auto=name)}>{tr("back to auto")}</button>'
