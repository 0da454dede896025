"""`finetune plan`: the ledger with bars, the plan with its reasons, the alternatives, the verdict."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.padding import Padding

from finetune.cli.app import print_json
from finetune.cli.render import doing, out, table
from finetune.forecast.forecast import PARTS, Forecast
from finetune.plan.plan import Plan
from finetune.recipe import load_recipe
from finetune.units import format_bytes, format_count, format_seconds, parse_bytes

_BAR = 28
_COLOURS = {"fits": "green", "tight": "yellow", "does not fit": "red"}


def show_plan(source: str, overrides: list[str], *, gpu: str | None, free: str | None, as_json: bool) -> int:
    """Plan without starting. Returns 0 when it fits (tightly, too), 3 when it doesn't."""
    recipe = load_recipe(source, [*overrides, *([f"gpu={gpu}"] if gpu else [])])
    from finetune.errors import RecipeError

    try:
        free_bytes = parse_bytes(free) if free else None
    except ValueError as error:
        raise RecipeError(f"--free: {error}") from None
    from finetune.run.prepare import plan_only

    with doing(quiet=as_json) as say:
        plan = plan_only(recipe, free_bytes=free_bytes, progress=say, compare=True)
    if as_json:
        print_json(plan.as_json())
    else:
        _print_plan(plan)
    return 3 if plan.verdict == "does not fit" else 0


def _print_plan(plan: Plan) -> None:
    settings, card = plan.settings, plan.card
    out.print(
        f"[bold]{escape(str(settings.model_name_or_path))}[/] on {escape(card.name)}, {format_bytes(card.free_bytes)} free"
    )
    if plan.forecast:
        _print_ledger(plan.forecast, card.free_bytes)
        low, high = format_bytes(plan.forecast.peak_low_bytes), format_bytes(plan.forecast.peak_high_bytes)
        verdict = f"[bold {_COLOURS.get(plan.verdict, '')}]{plan.verdict}[/]"
        out.print(f"\n{verdict}: between {low} and {high} of {format_bytes(card.free_bytes)}")
        if plan.shortfall:
            _print_shortfall(plan.shortfall)
        if plan.forecast.step_s:
            hours = format_seconds(plan.forecast.step_s * plan.total_steps) if plan.total_steps else "unknown"
            speed = format_count(plan.forecast.tokens_per_s)
            out.print(f"about {speed} tokens/s, {plan.total_steps or '?'} steps, {hours} (estimated)")
        for note in plan.forecast.notes:
            out.print(f"note: {escape(note)}")
    else:
        out.print("no memory forecast for this machine")
    out.print()
    for name, reason in plan.reasons.items():
        out.print(f"[bold]{name}[/] = {escape(str(getattr(settings, name, '')))}")
        out.print(Padding(f"[dim]{escape(reason)}[/]", (0, 0, 0, 4)))
    _print_alternatives(plan.alternatives)
    if plan.verdict == "does not fit":
        enough = any(row["peak_bytes"] <= (plan.budget_bytes or 0) for row in plan.suggestions)
        _print_rows(f"What would make it {'fit' if enough else 'smaller'}", plan.suggestions)
    if plan.many_cards:
        _print_many_cards(plan.many_cards)


def _print_ledger(forecast: Forecast, free_bytes: int) -> None:
    overhead = forecast.peak_bytes - forecast.allocated_bytes
    rows = [(part, forecast.parts.get(part, 0)) for part in PARTS] + [("allocator and context", overhead)]
    shown = table("at the training peak", ">bytes", "")
    for name, size in rows:
        if size > 0:
            shown.add_row(name, format_bytes(size), _bar(size, free_bytes))
    shown.add_row("[bold]whole card[/]", f"[bold]{format_bytes(forecast.peak_bytes)}[/]", _bar(forecast.peak_bytes, free_bytes))
    out.print(shown)
    peaks = "  ".join(f"{phase} {format_bytes(size)}" for phase, size in forecast.peaks.items())
    out.print(f"[dim]allocated peaks: {peaks}   ({forecast.method})[/]")


def _bar(size: int, whole: int) -> str:
    filled = min(_BAR, round(_BAR * size / whole)) if whole else 0
    return "█" * filled if filled else "▏"


def _print_shortfall(lacking: dict[str, Any]) -> None:
    missing, part = format_bytes(lacking["missing_bytes"]), f"{lacking['part']}, {format_bytes(lacking['part_bytes'])}"
    out.print(f"{missing} short at the upper end; most is for the {part}")
    if lacking["largest_model_that_fits"]:
        out.print(f"the largest model of the catalogue that fits this card: {escape(lacking['largest_model_that_fits'])}")


def _print_alternatives(rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    title = "\n[bold]Alternatives considered[/]"
    shown = table(">at most", ">tokens/s", "verdict", "plan, and what differs", title=title)
    for row in rows:
        numbers = [_cell(name, row[name]) for name in ("peak_high_bytes", "tokens_per_s")]
        how = "[bold]chosen[/]" if row["overrides"] == "chosen" else f"[dim]{escape(row['differs'])}[/]"
        shown.add_row(*numbers, f"[{_COLOURS[row['verdict']]}]{row['verdict']}[/]", f"{escape(row['plan'])}\n{how}")
    out.print(shown)


def _print_rows(title: str, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    columns = list(rows[0])
    shown = table(*(column.removesuffix("_bytes").replace("_", " ") for column in columns), title=f"\n[bold]{title}[/]")
    for row in rows:
        shown.add_row(*(_cell(column, row.get(column)) for column in columns))
    out.print(shown)


def _print_many_cards(needs: dict[str, Any]) -> None:
    cards, room, rows = needs["cards"], needs["budget_bytes"], needs["rows"]
    out.print(f"\n[bold]{cards} cards with {format_bytes(room)} each are not one with {format_bytes(cards * room)}[/]")
    out.print("Each holds its own rows' activations, and the whole model while it loads. With this plan's settings:")
    shown = table("on each card", ">load", ">train", ">at most", ">host", "verdict")
    for row in rows:
        sizes = [_cell(name, row[name]) for name in ("load_bytes", "train_bytes", "peak_high_bytes", "host_bytes")]
        verdict = f"[{_COLOURS.get(row['verdict'], 'red')}]{row['verdict']}[/]"
        shown.add_row(row["strategy"], *sizes, verdict)
    out.print(shown)
    reasons = dict.fromkeys(row["cost"] for row in rows if row["cost"])
    for reason in reasons:
        out.print(f"[dim]{escape(reason)}[/]")
    first = next((row["override"] for row in rows if row["verdict"] == "fits"), None)
    out.print(f"fits with: {escape(first)}" if first else "none of these fits")
    out.print("[dim]ddp is forecast, the others are by rule: not measured on several cards[/]")


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if column.endswith("_bytes"):
        return format_bytes(value)
    if column.endswith("tokens_per_s"):
        return format_count(round(value))
    if isinstance(value, float):
        return f"{value:.3g}"
    return escape(str(value))
