"""`finetune runs`: list, show, rename and delete runs."""

from __future__ import annotations

from typing import Any

from rich.markup import escape

from finetune.cli.memory import show_memory
from finetune.cli.output import print_json
from finetune.cli.render import out, print_text, state_text, table
from finetune.errors import CommandError
from finetune.evaluate.results import measures, read_evaluations
from finetune.events import Evaluation, EventReader
from finetune.planner.history import cost_of, seconds_spent
from finetune.run.accuracy import outcome
from finetune.run.directory import open_run, runs_from_here
from finetune.run.pace import Pace
from finetune.run.rename_delete import delete_run, rename_run
from finetune.run.retry import adjusted_plan
from finetune.run.state import RunState, read_state

_ARGUMENTS = {"list": "takes no RUN", "show": "takes one RUN", "rm": "a RUN is missing", "rename": "takes RUN and NAME"}
_SCORES = ("exact_match", "score", "pairs_in_order", "loss", "token_accuracy")


def change_runs(verb: str, names: list[str], *, memory: bool = False, as_json: bool) -> None:
    """List, show, delete or rename runs."""
    if memory and verb != "show":
        raise CommandError(f"finetune runs {verb}: takes no --memory", "Use: finetune runs show RUN --memory")
    if verb == "list" and not names:
        _list(as_json)
    elif verb == "show" and len(names) <= 1:
        show = show_memory if memory else _show  # no RUN: the latest
        show(*(names or ["latest"]), as_json=as_json)
    elif verb == "rm" and names:
        runs = [open_run(name) for name in names]  # all of them exist, or none is deleted
        # a run named twice is deleted once
        for run in {run.path.resolve(): run for run in runs}.values():
            trash = str(delete_run(run))
            _print(as_json, f"{run.path} deleted; it can be restored from {trash}", run=str(run.path), trash=trash)
    elif verb == "rename" and len(names) == 2:
        renamed = str(rename_run(open_run(names[0]), names[1]).path)
        _print(as_json, f"renamed to {renamed}", run=renamed)
    else:
        problem = _ARGUMENTS.get(verb, "unknown")
        raise CommandError(f"finetune runs {verb}: {problem}", "Use: list, show RUN, rm RUN ..., rename RUN NAME.")


def _print(as_json: bool, text: str, **values: str) -> None:
    if as_json:
        print_json(values)
    else:
        out.print(escape(text), soft_wrap=True)


def _list(as_json: bool) -> None:
    rows = [(run, read_state(run)) for run in runs_from_here()]
    if as_json:
        print_json([{"path": str(run.path), **_facts(state)} for run, state in rows])
        return
    if not rows:
        out.print("No runs yet. Start one: finetune run tiny-cpu")
        return
    shown = table("run", "state", ">step", ">loss")
    for run, state in rows:
        step, loss = f"{state.step or 0}/{state.total_steps or '?'}", "-" if state.loss is None else f"{state.loss:.4f}"
        shown.add_row(str(run.path), state_text(state.state), step, loss)
    out.print(shown)


def _facts(state: RunState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in ("state", "message", "step", "total_steps", "loss")}


def _show(source: str, *, as_json: bool) -> None:
    run = open_run(source)
    state, recipe = read_state(run), run.recipe.read_text(encoding="utf-8") if run.recipe.is_file() else ""
    events = list(EventReader(run.events).new())
    spent_s = seconds_spent(events)
    try:
        plan = adjusted_plan(run)
        cost, (clauses, values) = cost_of(spent_s, plan.settings.price_per_hour), Pace.of(events).step_time(plan)
        step_time = " ".join(clauses).format(**values)
    except CommandError:  # the plan is damaged
        cost, step_time = None, ""
    losses = (event.eval_loss for event in events if isinstance(event, Evaluation))
    held_out = min((loss for loss in losses if loss is not None), default=None)
    evaluations = read_evaluations(run)
    if as_json:
        scores = {
            name: {"rows": values["rows"], **{of: {key: values[of][key] for key in _SCORES} for of in ("base", "tuned")}}
            for name, values in evaluations.items()
        }
        print_json({
            "run": str(run.path), **_facts(state), "eval_loss": held_out, "scores": scores, "recipe": recipe,
            "seconds": spent_s, "cost": cost, "step_time": step_time or None,
        })  # fmt: skip
        return
    out.print(f"[bold]{escape(str(run.path))}[/]  {state_text(state.state)}  {escape(state.message)}", soft_wrap=True)
    out.print(f"step {state.step or 0:,} of {state.total_steps or '?'}, {outcome(events)[0]}")
    if step_time:
        out.print(escape(step_time))
    if cost is not None:
        out.print(f"cost {cost:,.2f}")
    shown = table("evaluation", "score", ">base", ">tuned")
    for name, values in evaluations.items():
        for figure in measures(values):
            shown.add_row(f"{name}, {values['rows']} rows", escape(figure.title), *figure.values)
    if evaluations:
        out.print(shown)
    else:
        out.print(f"not evaluated; to score it: finetune eval {escape(str(run.path))}")
    print_text(f"\n{recipe}")
