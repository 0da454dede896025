"""New run as HTML: sentence, verdict, plans, settings and panels."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from finetune.card.find import catalogue_sizes
from finetune.card.visible import usable_devices
from finetune.errors import DataError
from finetune.planner.history import read_history
from finetune.planner.plan import Alternative, Plan, ResourceCheck, Suggestion, Verdict
from finetune.recipe import shipped_recipes
from finetune.settings import AUTO
from finetune.units import GIB, format_count, gib

from ..language import mark, tr, tr_n
from ..planning.blocker import Blocker
from ..planning.catalogue import DATA_ENDINGS, Model, card_label
from ..planning.draft import Edited, command_line
from .choices import chosen as reasons_of
from .markup import Safe, as_on_page, problem, render
from .memory_parts import parts_of
from .recipe_form import form
from .words import QUEUE_STATES, capital, in_words, minutes, plan_in_words, rows, setting_name, short_name, slower_in_words

#: Lowest and highest value, and step of each setting with a field.
FIELDS = {
    "num_train_epochs": ("0.01", "1000", "any"), "learning_rate": ("1e-8", "1", "any"), "max_length": ("8", "1048576", "1"),
    "lora_r": ("1", "1024", "1"), "effective_batch_size": ("1", "65536", "1"),
}  # fmt: skip
#: Roles of data columns, by field of `dataset.columns`.
ROLES = {
    "instruction": mark("Prompt"), "output": mark("Answer"), "input": mark("Context"), "system": mark("System prompt"),
    "reasoning": mark("Reasoning"), "ignore": mark("Ignore"),
}  # fmt: skip
_CARDS = 3
#: Largest share of the usable memory for a plan that leaves room.
_ROOMY = 0.75


def sentence(edited: Edited) -> str:
    """Return "Train [model] on [data] with [GPU]"."""
    data = edited.data
    name = tr("{n} files", n=len(data)) if isinstance(data, list) else Path(data).name
    return render("sentence", model=Path(edited.model).name, data=name, gpu=gpu_name(edited.recipe.gpu))


def gpu_name(gpu: str) -> str:
    """Return the displayed name of a recipe's GPU."""
    if gpu == "cpu":
        return "CPU"
    devices = [device for device in usable_devices() if gpu in (AUTO, device.index)]
    if devices:
        return f"{short_name(devices[0].name)} · {gib(devices[0].total_bytes)}"
    sizes = catalogue_sizes()
    return f"{card_label(gpu)} · {sizes[gpu]} GB" if gpu in sizes else gpu


def settings(edited: Edited, plan: Plan | None) -> str:
    """Return the fields with value, recommendation and cost."""
    planned, fields = plan.settings if plan else None, []
    for name, (lowest, highest, step) in FIELDS.items():
        value = edited.values.get(name)
        is_yours = value not in (None, AUTO)
        shown = value if is_yours else getattr(planned, name, "")
        fields.append({
            "name": name, "label": tr("Longest row, tokens") if name == "max_length" else setting_name(name),
            "lowest": lowest, "highest": highest, "step": step, "is_yours": is_yours,
            "value": f"{shown:g}" if isinstance(shown, float) else shown, "price": _price(name, plan) if plan else "",
        })  # fmt: skip
    return render("settings", fields=fields)


def _price(name: str, plan: Plan) -> str:
    forecast, steps = plan.forecast, plan.total_steps
    match name:
        case "num_train_epochs":
            step_s, epochs = forecast.step_s if forecast else None, plan.settings.num_train_epochs
            if not step_s or not steps or plan.settings.max_steps:
                return tr("takes time, no memory")
            return tr("{time} each, no memory", time=minutes(step_s * steps / epochs))
        case "learning_rate":
            return tr("takes no memory")
        case "max_length":
            return as_on_page(plan.reasons.get(name, "")) if plan.data else tr("full rows until your data is read")
        case "lora_r":
            sizes = [forecast.parts.get(part, 0) for part in ("adapters", "gradients", "optimizer")] if forecast else [0]
            return tr("{size} for adapter, gradients and optimizer", size=gib(sum(sizes)))
        case _:
            return tr("{n} updates, no memory", n=f"{steps:,}") if steps else tr("no memory")


def answer(plan: Plan, blocked: Blocker | None = None, *, has_bar: bool = True) -> str:
    """Return the verdict, its figures, and the memory bar."""
    level, is_ready = plan.verdict.level, not _failed(plan) and (blocked is None or blocked.elsewhere)
    return render(
        "answer", note=blocker_note(blocked) if blocked else "", level="warn" if level == "ok" and not is_ready else level,
        title=capital(tr(plan.verdict)), text="" if plan.verdict in (Verdict.FITS, Verdict.NO_FIT) else _because(plan),
        plan=plan, gib=gib, time=_time(plan), bar=_bar(plan) if plan.forecast and has_bar else None, trust=_trust(plan),
    )  # fmt: skip


def blocker_note(blocker: Blocker) -> Safe:
    """Return a blocker with its fix."""
    shown = problem(blocker.title, blocker.problems, "" if blocker.override else blocker.fix)
    return render("blocker", blocker=blocker, problem=shown, is_data=blocker.title == DataError.title)


def _because(plan: Plan) -> str:
    # the title shows the verdict already
    template, values = plan.verdict_sentence()
    return capital(tr(template, **values).removeprefix(tr(plan.verdict)).lstrip(":,：， ")) + "."


def trouble(note: Safe, title: str) -> str:
    """Return an error in place of the verdict."""
    return render("answer", note=note, level="unknown", title=title, text="", plan=None, bar=None)


def _time(plan: Plan) -> tuple[str, str] | None:
    # the figure of time, speed or updates, and the text below it
    forecast, steps, epochs = plan.forecast, plan.total_steps, plan.settings.num_train_epochs
    counted = tr_n("{n} update", "{n} updates", steps) if steps else ""
    if not plan.settings.max_steps and steps:
        several = mark("{epochs} epoch, {updates}") if epochs == 1 else mark("{epochs} epochs, {updates}")
        counted = tr(several, epochs=f"{epochs:g}", updates=counted)
    if forecast and forecast.step_s and steps:
        cost = f", {plan.cost:,.2f}" if plan.cost is not None else ""
        return tr("about {time}", time=minutes(forecast.step_s * steps)), counted + cost
    if forecast and forecast.tokens_per_s:
        speed = tr("{n} tokens/s", n=f"{forecast.tokens_per_s:,.0f}")
        return speed, tr("with full rows, until your data is read")
    why = tr("time known after the first steps" if plan.card.is_cpu else "speed of this GPU unknown")
    return (counted, why) if steps else None


def _bar(plan: Plan) -> dict[str, Any]:
    # widths in percent of the GPU, or of the needed bytes if they exceed the GPU
    parts, over = parts_of(plan)
    total = plan.card.total_bytes
    # a round step with at most seven ticks
    whole, step = total + over, next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500) if total / GIB / step <= 7)
    shown = [
        {"key": part.key, "name": part.name, "size": gib(part.size), "why": part.why, "width": 100 * part.size / whole}
        for part in parts if part.size
    ]  # fmt: skip
    end = 100 * total / whole
    values = [step * number for number in range(int(total / GIB / step * 0.85) + 1)]
    lefts = {value: 100 * value * GIB / whole for value in values}
    ticks = [
        {"left": left, "text": f"{value:g}" if value else "0 GiB"}
        for value, left in lefts.items()
        # no tick under the label of the end
        if left < end - 9 or not value
    ]
    too_big = tr("{size} too big", size=gib(over))
    label = tr(", ").join([f"{part['name']} {part['size']}" for part in shown] + ([too_big] if over else []))
    of = tr("{size} memory" if plan.card.is_cpu else "{size} GPU", size=gib(total))
    return {"parts": shown, "ticks": ticks, "end": end, "end_text": of, "label": label, "over": too_big if over else ""}


def _trust(plan: Plan) -> str:
    how = tr("Forecast from a dry run of this training step, on tensors without data.")
    history = read_history(plan.card.name)
    # on a CPU only the whole process can be measured
    errors = history.process_errors if plan.card.is_cpu else history.allocated_errors
    if not errors:
        return how
    off = f"{100 * statistics.median(map(abs, errors)):.1f}"
    return f"{how} {tr('The forecasts of your last {n} runs here were off by {off} %.', n=len(errors), off=off)}"


def plans(plan: Plan, *, is_complete: bool) -> str:
    """Return ways to run the recipe: plans that fit, fastest first."""
    is_big = plan.verdict == Verdict.NO_FIT
    fitting = [row for row in plan.alternatives if row.verdict.fits or (row.chosen and not is_big)]
    title = tr("Make it fit" if is_big else "Ways to run it: same rows, same batch")
    if is_big:
        fits = [item for item in plan.suggestions if item.peak_bytes <= plan.usable_bytes]
        items = sorted(fits, key=attrgetter("saves_bytes"))[:_CARDS]
        cards = [_suggestion(item) for item in items] or [_card(row, plan, mark("Fits")) for row in fitting[:_CARDS]]
        largest = plan.shortfall.largest_model_that_fits if plan.shortfall else None
        otherwise = tr("No smaller plan for this recipe fits.")
        otherwise = tr("The largest model in the catalogue that fits: {model}.", model=largest) if largest else otherwise
    else:
        cards = [_card(row, plan, name) for name, row in _three(fitting, plan.usable_bytes)] if len(fitting) > 1 else []
        otherwise = tr("No other plan with these settings fits." if is_complete else "being planned …")
    return render("plans", title=title, cards=cards, otherwise=otherwise, gib=gib, total_bytes=plan.card.total_bytes)


def _three(rows: Sequence[Alternative], usable: int) -> list[tuple[str, Alternative]]:
    def speed(row: Alternative) -> float:
        return row.tokens_per_s or 0.0

    # fastest, fastest with room, smallest; the chosen plan first if none of these is chosen
    roomy = [row for row in rows if row.peak_high_bytes <= _ROOMY * usable]
    named = {
        mark("Fastest"): max(rows, key=speed) if any(map(speed, rows)) else next((row for row in rows if row.chosen), rows[0]),
        mark("Leaves room"): max(roomy, key=speed, default=None),
        mark("Smallest"): min(rows, key=lambda row: row.peak_high_bytes),
    }  # fmt: skip
    others: list[tuple[str, Alternative]] = []
    for name, row in named.items():
        if row is not None and row not in [other for _, other in others]:
            others.append((name, row))
    mine = [(mark("Yours"), row) for row in rows if row.chosen and row not in [other for _, other in others]]
    return [*mine, *others][: _CARDS + 1]


def _card(row: Alternative, plan: Plan, name: str) -> dict[str, Any]:
    chosen = next((other for other in plan.alternatives if other.chosen), row)
    seconds = (row.step_s or 0) * (plan.total_steps or 0)
    time = minutes(seconds) if seconds else f"{row.tokens_per_s:,.0f}" if row.tokens_per_s else ""
    return {
        "name": tr(name), "chosen": row.chosen, "how": plan_in_words(plan.settings) if row.chosen else in_words(row.differs),
        "bytes": row.peak_high_bytes, "time": time, "time_name": tr("time" if seconds else "tokens/s"), "override": row.differs,
        "price": "" if row.chosen else slower_in_words(row.tokens_per_s, chosen.tokens_per_s),
    }  # fmt: skip


def _suggestion(item: Suggestion) -> dict[str, Any]:
    return {
        "name": in_words(item.override), "chosen": False, "how": as_on_page(item.cost), "bytes": item.peak_bytes, "time": "",
        "override": item.override, "price": "",
    }  # fmt: skip


def _failed(plan: Plan) -> ResourceCheck | None:
    return next((check for check in plan.checks if check.enough is False), None)


def ready(edited: Edited, plan: Plan | None, blocked: Blocker | None) -> tuple[str, bool]:
    """Return the line beside Start, and whether the run may start."""
    missing = tr("Choose a model.") if not edited.model else tr("Choose your data.") if not edited.data else ""
    if missing or plan is None:
        return render("ready", state=missing or tr("Not yet."), text=""), False
    if blocked:
        text = tr("Planned for another machine." if blocked.elsewhere else blocked.title)
        return render("ready", state=tr("Not yet."), text=text), False
    if short := _failed(plan):
        values = {"needs": gib(short.needs_bytes), "free": gib(short.free_bytes or 0)}
        needs_disk = tr("The run needs {needs} of disk; {free} are free.", **values)
        needs_host = tr("The run needs {needs} of host memory; {free} are free.", **values)
        return render("ready", state=tr("Not ready."), text=needs_disk if short.what == "disk" else needs_host), False
    if plan.verdict == Verdict.NO_FIT:
        return render("ready", state=tr("Choose a plan that fits."), text="", can_force=True), False
    disk = next((check for check in plan.checks if check.what == "disk" and check.free_bytes), None)
    needs = tr("{size} of {free} free disk", size=gib(disk.needs_bytes), free=gib(disk.free_bytes or 0)) if disk else ""
    return render("ready", state=tr("Ready."), text=needs), True


def progress(status: Mapping[str, Any]) -> str:
    """Return the progress of a start; the page opens a started run."""
    if status["state"] == "failed":
        return problem(status["message"], status.get("problems") or [], status.get("fix") or "")
    state = tr(QUEUE_STATES.get(status["state"], status["state"]))
    return render("started", run=status.get("run"), state=state, message=tr(status["message"]))


def model_panel(models: Sequence[Model], edited: Edited, badges: Mapping[str, Mapping[str, Any]], query: str, note: str) -> str:
    """Return the models by verdict, larger models first."""

    def group_of(model: Model) -> Any:
        return Verdict(badges[model.name]["verdict"]) if model.name in badges else None

    def parameters(model: Model) -> int:
        return model.parameters or badges.get(model.name, {}).get("parameters") or 0

    groups = []
    for verdict in (*Verdict, None):
        members = sorted((model for model in models if group_of(model) == verdict), key=parameters, reverse=True)
        if members:
            title = tr("being checked") if verdict is None else capital(tr(verdict))
            shown = [
                {"name": model.name, "chosen": model.name == edited.model, "facts": _facts(model, badges.get(model.name) or {})}
                for model in members
            ]
            groups.append({"title": title, "level": verdict.level if verdict else "", "models": shown})
    tokens = "2,048" if edited.recipe.max_length == AUTO else f"{edited.recipe.max_length:,}"
    gpu = gpu_name(edited.recipe.gpu)
    return render("panel_model", groups=groups, query=query, gpu=gpu, tokens=tokens, trouble=Safe(note))


def _facts(model: Model, badge: Mapping[str, Any]) -> str:
    parameters = model.parameters or badge.get("parameters")
    facts = [
        tr("{n} parameters", n=format_count(parameters)) if parameters else "",
        gib(badge["peak_bytes"]) if badge.get("peak_bytes") else "",
        tr("{bits}-bit", bits=badge["bits"]) if badge.get("bits") else "",
        tr(model.source, recipe=model.recipe),
        model.licence or "",
        as_on_page(badge.get("because", "")),
    ]
    return " · ".join(filter(None, facts))


def gpu_panel(edited: Edited) -> str:
    """Return this machine's GPUs, then the catalogue by memory."""
    here = [
        (tr("{gpu}, {size} free", gpu=short_name(card.name), size=gib(card.free_bytes)), card.index)
        for card in usable_devices()
    ]
    if len(here) == 1:
        here = [(here[0][0], AUTO)]
    elif here:
        here = [(tr("fastest GPU with free memory"), AUTO), *here]
    groups = [{"title": tr("This machine"), "cards": [*here, ("CPU", "cpu")]}]
    sizes = catalogue_sizes()
    for size, names in itertools.groupby(sorted(sizes, key=lambda name: sizes[name]), key=lambda name: sizes[name]):
        groups.append({"title": f"{size} GB", "cards": [(card_label(name), name) for name in names]})
    return render("panel_gpu", groups=groups, chosen=edited.recipe.gpu)


def data_panel(edited: Edited, names: Sequence[str]) -> str:
    """Return the choice of data."""
    # without rows: reading takes time, and the browser fetches the rows afterwards
    path = edited.data if isinstance(edited.data, str) else ", ".join(edited.data)
    return render("panel_data", path=path, names=names, kinds=", ".join(DATA_ENDINGS))


def columns(answer: Mapping[str, Any]) -> str:
    """Return the first rows, with the role of each column."""
    roles = [(role, tr(text)) for role, text in ROLES.items()]
    shown = [{"name": name, "role": answer["roles"].get(name)} for name in answer["columns"]]
    rows = [[row.get(name, "") for name in answer["columns"]] for row in answer["rows"]]
    return render("columns", columns=shown, rows=rows, roles=roles)


def settings_panel(plan: Plan | None) -> str:
    """Return all settings with reasons, and the form."""
    counted = (
        tr("{rows}, {tokens} tokens.", rows=rows(plan.data.rows), tokens=format_count(plan.data.total_tokens))
        if plan and plan.data
        else ""
    )
    return render("panel_settings", reasons=Safe(reasons_of(plan)) if plan else "", counted=counted, form=Safe(form()))


def recipe_panel(edited: Edited) -> str:
    """Return recipe text, command, and shipped recipes."""
    command = command_line(edited.recipe) if edited.is_complete else ""
    return render("panel_recipe", text=edited.text, command=command, recipes=list(shipped_recipes()))
