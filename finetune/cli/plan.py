"""`finetune plan`: memory by part, the verdict, the settings with reasons, and the alternatives."""

from __future__ import annotations

import json
import re
import shlex

from rich.markup import escape
from rich.padding import Padding

from finetune.card.visible import hide_gpus
from finetune.cli.output import print_json, report
from finetune.cli.render import out, show_progress, table
from finetune.cli.source import recipe_of, require_dataset
from finetune.data.pictures.limits import size_problem
from finetune.errors import CommandError, DataError
from finetune.memory.forecast import PARTS, Forecast
from finetune.planner.plan import ManyCards, Plan, Suggestion, Verdict
from finetune.recipe.load import NO_DATASET
from finetune.settings.vision import Sizes
from finetune.units import GIB, format_bytes, format_count, format_seconds, parse_bytes

_BAR = 28
_IMAGES = re.compile(r"(\d{1,6})[xX](\d{1,6})(?:[xX](\d{1,3}))?")
#: Pictures of a row that are planned without data.
_MOST_PICTURES = 64
_COLOURS = {"ok": "green", "warn": "yellow"}


def show_plan(
    source: str | None, overrides: list[str], *, model: str | None, data: str | None, gpu: str | None, free: str | None,
    largest: str | None = None, images: str | None = None, measure: bool = False, as_json: bool, alone: bool = False,
) -> int:  # fmt: skip
    """Print the plan of a recipe, or with the `largest` value of a setting the plan that fits. Returns the exit code."""
    recipe = recipe_of(source, [*overrides, *([f"gpu={json.dumps(gpu)}"] if gpu is not None else [])], model=model, data=data)
    if alone:
        hide_gpus()
    from finetune.card import find_card
    from finetune.planner.largest import plan_largest
    from finetune.planner.planning import encode_rows, plan_recipe, read_rows, rows_with_pictures, without_rows

    without = recipe.dataset.path == NO_DATASET
    if images is not None and not without:
        raise CommandError("--images is for a plan without data; the rows of this recipe say what pictures they have", "")

    def noted(plan: Plan) -> Plan:
        note = f"no dataset is given: planned for rows of {plan.settings.max_length:,} tokens; add --data FILE"
        return plan.with_note(note) if without else plan

    with show_progress(quiet=as_json) as progress:
        unread = without_rows if images is None else rows_with_pictures(_picture_sizes(images))
        rows = unread if without else lambda recipe: read_rows(recipe, lambda recipe: encode_rows(recipe, progress))
        card = find_card(recipe.gpu, free_bytes=_free_bytes(free), processes=recipe.launch.processes_here)
        shown: list[Plan] = []
        if measure:
            from finetune.evaluate.quantisation import measure_recipe

            require_dataset(recipe)
            cost = measure_recipe(recipe, progress, force=True)

        def show(plan: Plan) -> None:  # what reasons compare with, and the alternatives, take seconds to forecast
            progress("")
            _print_result(noted(plan))
            shown.append(plan)

        if largest:
            answer = plan_largest(recipe, card, rows, largest, progress=progress)
            plan, overrides = answer.plan, [*overrides, *answer.overrides]
        else:
            plan = plan_recipe(recipe, card, rows, progress=progress, compare=True, show=None if as_json else show)
    plan = noted(plan)
    if as_json:
        values = {**answer.as_json(), "plan": plan.as_json()} if largest else plan.as_json()
        print_json({**values, "quantisation": cost.as_json()} if measure else values)
        return plan.exit_code
    if not shown:
        _print_result(plan)
    if largest:
        chosen = "".join(f", with {row.plan}" for row in plan.alternatives if row.chosen)
        out.print(f"\n[bold]{escape(answer.sentence)}[/]{escape(chosen)}")
    else:
        _print_reasons_and_alternatives(plan)
    if measure:
        out.print(f"\n{escape(cost.sentence)}")
    options = [f"--{name} {shlex.quote(value)}" for name, value in (("model", model), ("data", data)) if value]
    overrides = [*overrides, f"gpu={gpu}"] if gpu and plan.card.source == "measured" else overrides
    arguments = " ".join([*filter(None, [source]), *options, *map(shlex.quote, overrides)])
    out.print(f"\n{last_line(plan, arguments, without=without)}", soft_wrap=True)
    return plan.exit_code


def _free_bytes(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_bytes(f"{text}GiB" if text.isdecimal() and len(text) <= 4 else text)
    except ValueError as error:
        raise CommandError(f"--free: {error}") from None


def _picture_sizes(text: str) -> Sizes:
    match = _IMAGES.fullmatch(text.strip())
    width, height, count = (int(part or 1) for part in match.groups()) if match else (0, 0, 0)
    if not match or not 1 <= count <= _MOST_PICTURES:
        raise CommandError(
            f"--images {text[:40]} is not a picture's width and height in pixels",
            "Type for example  --images 1024x768  or, for three in each row,  --images 1024x768x3.",
        )
    if problem := size_problem(width, height):
        raise CommandError(f"--images {text}: a picture that {problem}", "Runs refuse such pictures, too.")
    return ((width, height),) * count


def last_line(plan: Plan, arguments: str, *, without: bool) -> str:
    """Return the verdict and the next command. `arguments`: recipe and overrides as typed."""
    card, forecast = plan.card, plan.forecast
    verdict = f"[bold]{_coloured(plan.verdict)}[/] on {escape(card.name)}"
    if forecast:
        budget = format_bytes(plan.usable_bytes)
        verdict += f": needs {format_bytes(forecast.peak_low_bytes)} to {format_bytes(forecast.peak_high_bytes)} of {budget}"
    if plan.data_problem:
        return f"{verdict}. First correct the data: see above"
    if card.problem:
        return f"{verdict}, but torch can't use this card. {escape(card.problem_fix)}"
    if plan.verdict == Verdict.NO_FIT:
        enough = _enough(plan)
        what = f" Next: finetune plan {arguments} {enough[0].override}" if enough else ""
        return f"{verdict}.{escape(what)}"
    if plan.verdict not in (Verdict.FITS, Verdict.TIGHT, Verdict.AT_LIMIT) and forecast:
        return verdict
    if without:
        return f"{verdict}. Next: finetune run {escape(arguments)} --data FILE"
    where = " on that machine" if card.source == "catalogue" else ""
    return f"{verdict}. Next{where}: finetune run {escape(arguments)}"


def _print_result(plan: Plan) -> None:
    card, forecast = plan.card, plan.forecast
    free = f"{format_bytes(card.free_bytes)} free"
    out.print(f"[bold]{escape(str(plan.settings.model_name_or_path))}[/] on {escape(card.name)}, {free}")
    if card.problem:
        out.print(f"[yellow]no run can use this card now: {escape(card.problem)}[/]\nFix: {escape(card.problem_fix)}")
    if not forecast:
        out.print("no memory forecast for this machine")
        return
    _print_ledger(forecast, card.free_bytes)
    budget = f"{format_bytes(card.free_bytes)} are free"
    if plan.budget_bytes is not None and card.free_bytes - plan.budget_bytes > GIB / 100:  # auto is rounded down to that
        budget = f"memory_budget is {format_bytes(plan.budget_bytes)} of the {free}"
    needs = f"{format_bytes(forecast.peak_low_bytes)} to {format_bytes(forecast.peak_high_bytes)}"
    out.print(f"\n[bold]{_coloured(plan.verdict)}[/]: needs {needs}; {budget}")
    if plan.verdict == Verdict.AT_LIMIT and forecast.at_limit:
        out.print(forecast.at_limit.summary)
    if lacking := plan.shortfall:
        missing, part = format_bytes(lacking.missing_bytes), f"{lacking.part}, {format_bytes(lacking.part_bytes)}"
        out.print(f"{missing} short at the upper end; the largest part is {part}")
        if lacking.largest_model_that_fits:
            out.print(f"largest catalogue model that fits this card: {escape(lacking.largest_model_that_fits)}")
    if forecast.step_s:
        whole = format_seconds(forecast.step_s * (plan.total_steps or 0))
        steps = f", {plan.total_steps:,} steps, {whole}" if plan.total_steps else "; the number of steps is not known yet"
        out.print(f"about {forecast.tokens_per_s:,.0f} tokens/s (estimated){steps}")
    if plan.total_steps and plan.run_time:
        out.print(f"the run takes {plan.run_time.summary}")
    if plan.cost is not None:
        out.print(f"it costs {plan.cost:,.2f} at {plan.settings.price_per_hour:g} an hour")
    if copies := plan.layer_copies:
        pinned = f"{format_bytes(copies.pinned_bytes)} of pinned host memory"
        where = pinned if copies.place == "cpu" else f"a file of {format_bytes(copies.weight_bytes)}, through {pinned}"
        out.print(f"{copies.layers} of {copies.of_layers} layers in {where}; {copies.summary}")
    for note in forecast.notes:
        out.print(f"note: {escape(note)}")


def _print_reasons_and_alternatives(plan: Plan) -> None:
    out.print()
    for name, reason in plan.reasons.items():
        out.print(f"[bold]{name}[/] = {escape(str(getattr(plan.settings, name, '')))}")
        out.print(Padding(f"[dim]{escape(reason)}[/]", (0, 0, 0, 4)))
    if plan.alternatives:
        shown = table(
            ">at most", ">tokens/s", "verdict", "plan, and how it differs", title="\n[bold]Alternatives considered[/]"
        )
        for row in plan.alternatives:
            speed = format_count(round(row.tokens_per_s)) if row.tokens_per_s is not None else "-"
            how = "[bold]chosen[/]" if row.chosen else f"[dim]{escape(row.differs)}[/]"
            shown.add_row(_bytes(row.peak_high_bytes), speed, _coloured(row.verdict), f"{escape(row.plan)}\n{how}")
        out.print(shown)
    if plan.verdict == Verdict.NO_FIT and plan.suggestions:
        does = "fit" if _enough(plan) else "smaller"
        shown = table("override", ">saves", ">at most", "cost", title=f"\n[bold]What would make it {does}[/]")
        for change in plan.suggestions:
            shown.add_row(escape(change.override), _bytes(change.saves_bytes), _bytes(change.peak_bytes), escape(change.cost))
        out.print(shown)
    if plan.many_cards:
        _print_many_cards(plan.many_cards)
    if plan.data_problem:
        report(DataError(list(plan.data_problem.problems), plan.data_problem.fix))


def _print_ledger(forecast: Forecast, free_bytes: int) -> None:
    overhead = forecast.peak_bytes - forecast.allocated_bytes
    rows = [(part, forecast.parts.get(part, 0)) for part in PARTS] + [("allocator and context", overhead)]
    shown = table("at the training peak", ">bytes", "")
    for name, size in rows:
        if size > 0:
            shown.add_row(name, format_bytes(size), _bar(size, free_bytes))
    shown.add_row("[bold]whole card[/]", f"[bold]{format_bytes(forecast.peak_bytes)}[/]", _bar(forecast.peak_bytes, free_bytes))
    out.print(shown)
    peaks = ", ".join(f"{phase} {format_bytes(size)}" for phase, size in forecast.peaks.items())
    out.print(f"[dim]allocated peaks: {peaks}\nmethod: {forecast.method}[/]")


def _bar(size: int, whole: int) -> str:
    return "█" * (min(_BAR, round(_BAR * size / whole)) if whole else 0) or "▏"


def _enough(plan: Plan) -> list[Suggestion]:
    return [row for row in plan.suggestions if row.peak_bytes <= (plan.budget_bytes or 0)]


def _print_many_cards(needs: ManyCards) -> None:
    cards, budget = needs.cards, needs.budget_bytes
    out.print(f"\n[bold]{cards} cards with {format_bytes(budget)} each are not one card with {format_bytes(cards * budget)}[/]")
    out.print("Each card keeps its own activations; all but fsdp in 4 bit load the whole model. With this plan's settings:")
    shown = table("on each card", ">load", ">train", ">at most", ">host", "verdict")
    for row in needs.rows:
        sizes = (_bytes(size) for size in (row.load_bytes, row.train_bytes, row.peak_high_bytes, row.host_bytes))
        shown.add_row(row.strategy, *sizes, _coloured(row.verdict))
    out.print(shown)
    for reason in dict.fromkeys(row.cost for row in needs.rows if row.cost):
        out.print(f"[dim]{escape(reason)}[/]")
    first = next((row.override for row in needs.rows if row.verdict == Verdict.FITS), None)
    out.print(f"fits with: {escape(first)}" if first else "none of these fits")
    out.print("[dim]ddp is a dry run, the others are computed by rule; not measured on several cards[/]")


def _coloured(verdict: Verdict) -> str:
    return f"[{_COLOURS.get(verdict.level, 'red')}]{verdict}[/]"


def _bytes(size: int | None) -> str:
    return "-" if size is None else format_bytes(size)
