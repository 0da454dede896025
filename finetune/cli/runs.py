"""`finetune runs`."""

from __future__ import annotations

from typing import Any

from rich.markup import escape

from finetune.cli.output import print_json
from finetune.cli.render import out, print_text, state_text, table
from finetune.errors import CommandError, RecipeError
from finetune.evaluate import results
from finetune.events import Evaluation, Event, ForecastCheck, OutOfMemory, Phase, Step, event_json, newest, read_events
from finetune.memory.forecast import PhaseForecast
from finetune.planner.history import cost_of, seconds_spent
from finetune.run.control import delete_run, rename_run
from finetune.run.directory import open_run, runs_from_here
from finetune.run.memory import outcome
from finetune.run.retry import adjusted_plan, adjusted_since_s, explanation
from finetune.run.state import RunState, read_state
from finetune.units import format_bytes

_USAGE_PROBLEMS = {"list": "takes no RUN", "show": "takes one RUN", "rm": "a RUN is missing", "rename": "takes RUN and NAME"}
_SCORES = ("exact_match", "score", "pairs_in_order", "loss", "token_accuracy")
_PEAK_FIELDS = (
    "peak_allocated_bytes", "peak_reserved_bytes", "peak_segments", "card_used_bytes", "process_peak_rss_bytes",
)  # fmt: skip


def change_runs(verb: str, names: list[str], *, memory: bool = False, as_json: bool) -> None:
    """List, show, delete or rename runs."""
    if memory and verb != "show":
        raise CommandError(f"finetune runs {verb}: takes no --memory", "Use: finetune runs show RUN --memory")
    if verb == "list" and not names:
        _list(as_json)
    elif verb == "show" and len(names) <= 1:
        show = _show_memory if memory else _show
        show(names[0] if names else "latest", as_json=as_json)
    elif verb == "rm" and names:
        runs = [open_run(name) for name in names]  # raises before any run is deleted
        for run in {run.path.resolve(): run for run in runs}.values():  # a run named twice is deleted once
            trash = str(delete_run(run))
            _print(as_json, f"{run.path} deleted; it can be restored from {trash}", run=str(run.path), trash=trash)
    elif verb == "rename" and len(names) == 2:
        renamed = str(rename_run(open_run(names[0]), names[1]).path)
        _print(as_json, f"renamed to {renamed}", run=renamed)
    else:
        problem = _USAGE_PROBLEMS.get(verb, "unknown")
        raise CommandError(f"finetune runs {verb}: {problem}", "Use: list, show RUN, rm RUN ..., rename RUN NAME.")


def _print(as_json: bool, text: str, **values: str) -> None:
    if as_json:
        print_json(values)
    else:
        out.print(escape(text), soft_wrap=True)


def _list(as_json: bool) -> None:
    rows = [(run, read_state(run)) for run in runs_from_here()]
    if as_json:
        print_json([{"path": str(run.path), **_state_json(state)} for run, state in rows])
        return
    if not rows:
        out.print("No runs yet. Start one: finetune run tiny-cpu")
        return
    shown = table("run", "state", ">step", ">loss")
    for run, state in rows:
        loss = "-" if state.loss is None else f"{state.loss:.4f}"
        shown.add_row(str(run.path), state_text(state.state), f"{state.step or 0}/{state.total_steps or '?'}", loss)
    out.print(shown)


def _state_json(state: RunState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in ("state", "message", "step", "total_steps", "loss")}


def _show(source: str, *, as_json: bool) -> None:
    run = open_run(source)
    state = read_state(run)
    recipe = run.recipe.read_text(encoding="utf-8") if run.recipe.is_file() else ""
    events = read_events(run.events)
    spent_s = seconds_spent(events)
    try:
        cost = cost_of(spent_s, adjusted_plan(run).settings.price_per_hour)
    except CommandError:  # the plan is damaged
        cost = None
    losses = (event.eval_loss for event in events if isinstance(event, Evaluation))
    best_loss = min((loss for loss in losses if loss is not None), default=None)
    evaluations = results.read_evaluations(run)
    if as_json:
        scores = {}
        for name, values in evaluations.items():
            base, tuned = ({key: values[model][key] for key in _SCORES} for model in ("base", "tuned"))
            scores[name] = {"rows": values["rows"], "base": base, "tuned": tuned}
        print_json({
            "run": str(run.path), **_state_json(state), "eval_loss": best_loss, "scores": scores, "recipe": recipe,
            "seconds": spent_s, "cost": cost,
        })  # fmt: skip
        return
    out.print(f"[bold]{escape(str(run.path))}[/]  {state_text(state.state)}  {escape(state.message)}", soft_wrap=True)
    out.print(f"step {state.step or 0:,} of {state.total_steps or '?'}, {outcome(events)[0]}")
    if cost is not None:
        out.print(f"cost {cost:,.2f}")
    shown = table("evaluation", "score", ">base", ">tuned")
    for name, values in evaluations.items():
        for figure in results.measures(values):
            shown.add_row(f"{name}, {values['rows']} rows", escape(figure.title), *figure.values)
    if evaluations:
        out.print(shown)
    else:
        out.print(f"not evaluated; to score it: finetune eval {escape(str(run.path))}")
    print_text(f"\n{recipe}")


def _show_memory(source: str, *, as_json: bool) -> None:
    run = open_run(source)
    try:
        plan = adjusted_plan(run)
    except RecipeError:  # the plan is damaged: show the measured memory without a forecast
        plan = None
    events = read_events(run.events)
    peaks = _peaks(events, adjusted_since_s(run))
    checks = {event.at: event for event in events if isinstance(event, ForecastCheck)}  # a later event replaces an earlier one
    forecast = plan.forecast if plan else None
    forecasts = {phase: forecast.of_phase(phase) if forecast else PhaseForecast() for phase in peaks}
    failure = newest(OutOfMemory, events)
    if as_json:
        checks_json = {moment: event_json(check) for moment, check in checks.items()}
        print_json({
            "run": str(run.path), "peaks": peaks, "forecast_peaks": {phase: vars(peak) for phase, peak in forecasts.items()},
            "forecast": checks_json.get("first steps"), "forecast_end": checks_json.get("end"),
            "out_of_memory": {**event_json(failure), "explanation": explanation(failure)} if failure else None,
        })  # fmt: skip
        return
    out.print(f"[bold]{escape(str(run.path))}[/]  {outcome(events)[0]}", soft_wrap=True)
    shown = table("phase", ">allocated", ">forecast", ">reserved", ">forecast", ">GPU", ">process")
    for phase, values in peaks.items():
        expected = forecasts[phase]
        sizes = (
            values["peak_allocated_bytes"], expected.allocated_bytes, values["peak_reserved_bytes"], expected.reserved_bytes,
            values["card_used_bytes"], values["process_peak_rss_bytes"],
        )  # fmt: skip
        shown.add_row(phase, *("-" if size is None else format_bytes(size) for size in sizes))
    out.print(shown)
    if failure:
        out.print(f"out of memory: {escape(explanation(failure))}")


def _peaks(events: list[Event], since_s: float) -> dict[str, dict[str, int | None]]:
    peaks: dict[str, dict[str, int | None]] = {}
    for event in events:
        phase = "train" if isinstance(event, Step) else event.phase if isinstance(event, (Phase, OutOfMemory)) else None
        # peaks before a retry belong to the forecast of an earlier plan
        if phase is None or (event.time_s or 0) < since_s:
            continue
        phase_peaks = peaks.setdefault(phase, dict.fromkeys(_PEAK_FIELDS))
        for name in _PEAK_FIELDS:
            if (value := getattr(event, name)) is not None:
                phase_peaks[name] = max(value, phase_peaks[name] or 0)
    return peaks
