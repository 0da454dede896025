"""The head of the Fit page as HTML: the verdict, the memory bar with its parts, the facts, and what would make it smaller."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.planner.plan import Plan, Suggestion, Verdict
from finetune.settings.base_formats import base_format_of
from finetune.units import GIB, format_bytes, gib

from .markup import action, inert, note
from .words import in_words, minutes, override_values, plan_in_words

#: Phases of a run by their name in a forecast.
PHASES = {"train": "Training", "load": "Loading", "eval": "Evaluating", "save": "Saving"}
_SUGGESTIONS = 3
#: A part's setting that makes it smaller.
_SMALLER = {"weights": "load_in_4bit", "activations": "activation_checkpointing", "adapters": "optim"}


@dataclass(frozen=True)
class Part:
    """A part of the GPU's memory: its key and name, bytes, and a sentence that explains it."""

    key: str
    name: str
    size: int
    why: str


def verdict(plan: Plan, *, blocked: bool = False) -> str:
    """The sentence as the page's heading, and the forecast behind it. `blocked`: a run would not start, so it isn't green."""
    css, title, forecast = plan.verdict.level, plan.verdict.sentence(plan.headroom_bytes), plan.forecast
    if blocked and css == "ok":
        css = "warn"
    if forecast is None:
        text = f"There is no memory forecast for {plan.card.name}."
    else:
        budget = plan.budget_bytes or plan.card.free_bytes
        text = (
            f"Forecast {gib(forecast.peak_bytes)}, at most {gib(forecast.peak_high_bytes)}, of {gib(budget)} that may be used."
        )
        fastest = ": the fastest plan that fits" if plan.verdict == Verdict.FITS and len(plan.alternatives) > 1 else ""
        text += f" {_capital(plan_in_words(plan.settings))}{fastest}."
        if plan.verdict == Verdict.AT_LIMIT and forecast.at_limit:
            text += f" {_capital(forecast.at_limit.summary)}."
        if plan.shortfall and plan.shortfall.largest_model_that_fits:
            text += f" The largest model in the catalogue that fits: {plan.shortfall.largest_model_that_fits}."
    return _heading(css, title, text)


def cannot_say(problems: int) -> str:
    """The heading without a plan."""
    return _heading(
        "unknown",
        f"Can't say yet: {problems} setting{'' if problems == 1 else 's'} to correct" if problems else "Can't say yet",
    )


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
        return note(f"{gib(card.free_bytes)} of {gib(card.total_bytes)} are free on {card.name}.")
    title = "Host memory" if card.is_cpu else "GPU memory"
    phases = [phase for phase in PHASES if phase == "train" or phase in forecast.peaks]
    buttons = "".join(
        f'<button type="button" data-phase-button="{phase}" data-key="phase-{phase}" aria-pressed="false">'
        f"{PHASES[phase]}</button>"
        for phase in phases
    )
    head = (
        f'<div class="ft-barhead"><h2>{title}</h2><div class="ft-seg" role="group" aria-label="Phase">{buttons}</div>'
        f'<span class="ft-method">{inert(_method(plan))}</span></div>'
    )
    panels = "".join(_phase(plan, phase) for phase in phases)
    notes = "".join(note(text) for text in forecast.notes)
    notes += note(f"Forecast by: {forecast.method}.")
    details = f'<details class="ft-details"><summary>Details of the forecast</summary>{notes}</details>'
    return f"{head}{panels}{details}"


def _method(plan: Plan) -> str:
    assumed = plan.forecast is not None and not plan.forecast.method.startswith("dry run")
    return "Forecast by formula." if assumed else "Forecast: the training step itself, run without data."


def parts_of(plan: Plan, phase: str) -> tuple[list[Part], int]:
    """The parts of a phase, whose sum is the GPU, and the bytes that are too much."""
    forecast, card = plan.forecast, plan.card
    assert forecast is not None
    budget = min(plan.budget_bytes or card.free_bytes, card.total_bytes)
    if phase == "train":
        whose = "What Python and its libraries take" if card.is_cpu else "The CUDA context"
        owner = "Libraries of the process" if card.is_cpu else "CUDA and allocator"
        beyond = max(0, forecast.peak_bytes - forecast.allocated_bytes)
        spread = max(0, forecast.peak_high_bytes - forecast.peak_bytes)
        parts = [
            *_training(plan),
            Part(
                "overhead",
                owner,
                beyond,
                f"{whose}, and memory that the allocator holds and can't use.",
            ),
            Part("spread", "May be needed", spread, "How far it can go above the forecast. The plan must fit with all of it."),
        ]
    else:
        context = card.context_bytes or 0
        parts = [
            Part("weights", "Allocated", forecast.peaks[phase], f"The most that is allocated while {PHASES[phase].lower()}."),
            Part("overhead", "CUDA context", context, "What the driver takes for the process."),
        ]
    used, others = sum(part.size for part in parts), card.total_bytes - budget
    why = "assumed of a desktop" if card.source == "catalogue" else "in use now, or left free by the memory budget"
    parts.append(Part("free", "Free", max(0, budget - used), "What is left if all of that is needed."))
    parts.append(Part("held", "Other programs", others, f"{_capital(gib(others))} {why}."))
    return [part for part in parts if part.size > 0 or part.key == "free"], max(0, used - budget)


def _training(plan: Plan) -> list[Part]:
    """The allocated parts at the training peak, in groups that a person can tell apart."""
    forecast, settings = plan.forecast, plan.settings
    assert forecast is not None
    sizes = forecast.parts
    state = {name: sizes.get(name, 0) for name in ("adapters", "gradients", "optimizer")}
    detail = ", ".join(f"{name} {format_bytes(size)}" for name, size in state.items())
    length = plan.data.longest if plan.data and plan.data.longest else settings.max_length
    rows = settings.per_device_train_batch_size
    activations = (
        f"Kept by {forecast.layers} layers for the backward pass of {rows:,} row{'' if rows == 1 else 's'} of up to "
        f"{min(length, settings.max_length):,} tokens."
    )
    loss = sizes.get("loss", 0) + sizes.get("workspace", 0)
    return [
        Part("weights", "Model weights", sizes.get("weights", 0), f"The frozen base model, {base_format_of(settings).title}."),
        Part("gathered", "Gathered weights", sizes.get("gathered", 0), "Weights of other GPUs, gathered for a layer."),
        Part("adapters", "Adapter training", sum(state.values()), f"Rank {settings.lora_r}: {detail}."),
        Part("activations", "Activations", sizes.get("activations", 0) + sizes.get("recomputed", 0), activations),
        Part("loss", "Loss and workspace", loss, "Logits, and scratch memory of kernels."),
    ]


def _phase(plan: Plan, phase: str) -> str:
    parts, over = parts_of(plan, phase)
    total = plan.card.total_bytes
    shown = "".join(_piece(part, width) for part, width in _widths(parts, total))
    beyond = ""
    if over:
        share = min(28.0, 100 * over / (total + over))
        beyond = f'<span class="ft-beyond" style="flex-basis:{share:.1f}%"><b>{gib(over)} too big</b></span>'
    sizes = ", ".join(f"{part.name} {gib(part.size)}" for part in parts)
    label = f"{PHASES[phase]}: {sizes}, of {gib(total)}" + (f"; {gib(over)} too big" if over else "")
    bar = f'<div class="ft-mem" role="img" aria-label="{inert(label)}"><div class="track">{shown}</div>{beyond}</div>'
    buttons = "".join(
        f'<button type="button" data-part-button="{part.key}" data-key="{phase}-{part.key}" aria-pressed="false">'
        f'<i class="swatch part-{part.key}"></i><span>{inert(part.name)}</span><b>{gib(part.size)}</b></button>'
        for part in parts
    )
    reasons = "".join(_why(part, plan if phase == "train" else None) for part in parts)
    hint = '<p class="ft-why" data-why="">Choose a part to see what it is.</p>'
    hidden = "" if phase == "train" else " hidden"
    return (
        f'<div class="ft-phase" data-phase="{phase}"{hidden}>{bar}{_axis(total, "memory" if plan.card.is_cpu else "GPU", over)}'
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


def _axis(total: int, of: str, over: int) -> str:
    """Round values along the bar, and the GPU's end."""
    step = next(step for step in (0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if total / GIB / step <= 7)
    values = [step * number for number in range(int(total / GIB / step * 0.93) + 1)]
    ticks = "".join(
        f'<span style="left:{100 * value * GIB / total:.2f}%">{value:g}{"" if value else " GiB"}</span>' for value in values
    )
    share = min(28.0, 100 * over / (total + over)) if over else 0.0
    width = f' style="width:calc(100% - max({share:.1f}%, 8.5rem))"' if over else ""
    return f'<div class="ft-axis" aria-hidden="true"{width}>{ticks}<span class="end">{gib(total)} {of}</span></div>'


def _why(part: Part, plan: Plan | None) -> str:
    """What a part is, and the change that makes it smaller by a plan that was made."""
    button = _smaller_button(plan, part.key) if plan else ""
    return (
        f'<p class="ft-why" data-why="{part.key}" hidden><span><b>{inert(part.name)}.</b> {inert(part.why)}</span>{button}</p>'
    )


def _smaller_button(plan: Plan, key: str) -> str:
    setting = _SMALLER.get(key)
    upper = plan.forecast.peak_high_bytes if plan.forecast else 0
    for row in plan.alternatives:
        if setting and setting in override_values(row.differs) and row.peak_high_bytes < upper:
            slower = _slower(plan, row.tokens_per_s)
            label = f"{in_words(row.differs)}: {gib(upper - row.peak_high_bytes)} less{slower}"
            return f'<button type="button" class="ft-small" {action(override=row.differs)}>{inert(label)}</button>'
    return ""


def _slower(plan: Plan, tokens_per_s: float | None) -> str:
    """How much slower or faster than the plan, where both are known."""
    own = plan.forecast.tokens_per_s if plan.forecast else None
    if not own or not tokens_per_s:
        return ""
    change = round(100 * (tokens_per_s / own - 1))
    return f", {abs(change)} % {'slower' if change < 0 else 'faster'}" if change else ", same speed"


def facts(plan: Plan) -> str:
    """Time with its cost, speed, steps and size of the adapter in a line."""
    forecast, settings = plan.forecast, plan.settings
    step_s, steps = (forecast.step_s if forecast else None), plan.total_steps
    epochs = f", {settings.num_train_epochs:g} epoch{'' if settings.num_train_epochs == 1 else 's'}"
    cells = []
    if step_s and steps:
        cost = plan.cost.summary if plan.cost else ""
        cells.append((f"Time{'' if settings.max_steps else epochs}", f"≈ {minutes(step_s * steps)}", cost))
    elif steps:
        cells.append(("Time", "not known", "this GPU's speed is not known" if not plan.card.is_cpu else "a run measures it"))
    if forecast and forecast.tokens_per_s:
        cells.append(("Speed", f"{forecast.tokens_per_s:,.0f}", "tokens/s"))
    if steps:
        cells.append(("Steps", f"{steps:,}", f"of {settings.effective_batch_size} rows"))
    if forecast and forecast.parts.get("adapters"):
        size, _, unit = format_bytes(forecast.parts["adapters"]).partition(" ")
        cells.append(("Adapter", size, unit))
    shown = "".join(
        f"<div><dt>{inert(name)}</dt><dd>{inert(value)} <small>{inert(more)}</small></dd></div>" for name, value, more in cells
    )
    return f'<dl class="ft-facts">{shown}</dl>' if cells else ""


def smaller(plan: Plan) -> str:
    """Changes that save memory as buttons, each with its result; empty when there are none."""
    if not plan.suggestions:
        return ""
    budget = plan.budget_bytes or plan.card.free_bytes
    fitting = sorted((item for item in plan.suggestions if item.peak_bytes <= budget), key=lambda item: item.saves_bytes)
    chosen = [*fitting, *(item for item in plan.suggestions if item not in fitting)][:_SUGGESTIONS]
    buttons = "".join(
        f'<li><button type="button" class="ft-choice" {action(override=item.override)}>{_suggestion(item, plan)}</button></li>'
        for item in chosen
    )
    return f'<section class="ft-section"><h2>Make it smaller</h2><ul class="ft-choices">{buttons}</ul></section>'


def _suggestion(item: Suggestion, plan: Plan) -> str:
    return f"<b>{inert(in_words(item.override))}</b><span>{inert(outcome(item, plan))}</span><small>{inert(item.cost)}</small>"


def outcome(item: Suggestion, plan: Plan) -> str:
    """Whether the plan then fits, by the forecast's upper end."""
    budget = plan.budget_bytes or plan.card.free_bytes
    upper = (plan.forecast.peak_high_bytes if plan.forecast else item.peak_bytes + item.saves_bytes) - item.saves_bytes
    result = "then it fits" if upper <= budget else "still too big"
    return f"{result}: {upper / GIB:,.1f} of {gib(budget)}"


def ready(plan: Plan, obstacle: str) -> str:
    """Whether a run can start, and what it needs of the disk."""
    if obstacle:
        return f'<p class="ft-ready"><b>Not yet.</b> {inert(obstacle)}</p>'
    if plan.verdict == Verdict.NO_FIT:
        return '<p class="ft-ready"><b>Too big.</b> A smaller plan starts at once.</p>'
    checks = [check for check in plan.checks if check.enough is not None]
    disk = next((check for check in plan.checks if check.what == "disk"), None)
    needs = f"{gib(disk.needs_bytes)} of {gib(disk.free_bytes)} free disk" if disk and disk.free_bytes else ""
    passed = f"{sum(bool(check.enough) for check in checks)} of {len(checks)} checks passed" if checks else ""
    return f'<p class="ft-ready"><b>Ready.</b> {inert(" · ".join(filter(None, [passed, needs])))}</p>'


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
