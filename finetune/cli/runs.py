"""`finetune runs`: list runs with their states, show, rename or delete them."""

from __future__ import annotations

from typing import Any

from rich.markup import escape

from finetune.cli.memory import show_memory
from finetune.cli.output import print_json
from finetune.cli.render import out, print_text, state_text, table
from finetune.errors import CommandError
from finetune.evaluate.results import read_evaluations
from finetune.events import Evaluation, EventReader
from finetune.planner.plan import read_plan
from finetune.planner.run_time import cost_of, seconds_spent
from finetune.run.directory import RunDirectory, open_run, runs_from_here
from finetune.run.state import read_state

_ARGUMENTS = {
    "list": "takes no RUN",
    "show": "takes one RUN",
    "rm": "a RUN is missing",
    "rename": "takes RUN and NAME",
}
_SCORES = {
    "exact_match": "exact match", "score": "score", "pairs_in_order": "pairs in order", "loss": "loss per trained token",
    "token_accuracy": "token accuracy",
}  # fmt: skip


def change_runs(verb: str, names: list[str], *, memory: bool = False, as_json: bool) -> None:
    """List, show, delete or rename runs."""
    if memory and verb != "show":
        raise CommandError(f"finetune runs {verb}: takes no --memory", "Use: finetune runs show RUN --memory")
    if verb == "list" and not names:
        _show_runs(as_json)
    elif verb == "show" and len(names) <= 1:
        show = show_memory if memory else show_run
        show(*(names or ["latest"]), as_json=as_json)
    elif verb == "rm" and names:
        _remove(names, as_json)
    elif verb == "rename" and len(names) == 2:
        from finetune.run.rename_delete import rename_run

        renamed = rename_run(open_run(names[0]), names[1])
        _print(as_json, f"renamed to {renamed.path}", {"run": str(renamed.path)})
    else:
        problem = _ARGUMENTS.get(verb, "unknown")
        raise CommandError(f"finetune runs {verb}: {problem}", "Use: list, show RUN, rm RUN ..., rename RUN NAME.")


def _remove(names: list[str], as_json: bool) -> None:
    from finetune.run.rename_delete import delete_run

    runs = [open_run(name) for name in names]  # all of them exist, or none is deleted
    for run in {run.path.resolve(): run for run in runs}.values():
        trashed = delete_run(run)
        _print(as_json, f"{run.path} deleted; it can be restored from {trashed}", {"run": str(run.path), "trash": str(trashed)})


def _print(as_json: bool, text: str, values: dict[str, Any]) -> None:
    if as_json:
        print_json(values)
    else:
        out.print(escape(text), soft_wrap=True)


def _show_runs(as_json: bool) -> None:
    rows = [_row(run) for run in runs_from_here()]
    if as_json:
        print_json(rows)
        return
    if not rows:
        out.print("No runs yet. Start one: finetune run tiny-cpu")
        return
    shown = table("run", "state", ">step", ">loss")
    for row in rows:
        step = f"{row['step'] or 0}/{row['total_steps'] or '?'}"
        shown.add_row(row["path"], state_text(row["state"]), step, "-" if row["loss"] is None else f"{row['loss']:.4f}")
    out.print(shown)


def _row(run: RunDirectory) -> dict[str, Any]:
    state = read_state(run)
    return {
        "path": str(run.path), "state": state.state, "message": state.message, "step": state.step,
        "total_steps": state.total_steps, "loss": state.loss,
    }  # fmt: skip


def show_run(source: str, *, as_json: bool) -> None:
    """Print one run: how far it is, its losses, the scores of its evaluations, and its recipe."""
    run = open_run(source)
    state, recipe = read_state(run), run.recipe.read_text(encoding="utf-8") if run.recipe.is_file() else ""
    events = list(EventReader(run.events).new())
    losses = [event.eval_loss for event in events if isinstance(event, Evaluation)]
    spent_s = seconds_spent(events)
    cost = cost_of(spent_s, _price_of(run))
    held_out = min((loss for loss in losses if loss is not None), default=None)
    scores = _scores(run)
    if as_json:
        print_json({
            "run": str(run.path), "state": state.state, "message": state.message, "step": state.step,
            "total_steps": state.total_steps, "loss": state.loss, "eval_loss": held_out, "scores": scores, "recipe": recipe,
            "seconds": spent_s, "cost": cost,
        })  # fmt: skip
        return
    out.print(f"[bold]{escape(str(run.path))}[/]  {state_text(state.state)}  {escape(state.message)}", soft_wrap=True)
    loss = "" if state.loss is None else f", loss {state.loss:.4f}"
    best = "" if held_out is None else f", lowest held-out loss {held_out:.4f}"
    out.print(f"step {state.step or 0:,} of {state.total_steps or '?'}{loss}{best}")
    if cost is not None:
        out.print(f"cost {cost:,.2f}")
    if scores:
        _print_scores(scores)
    else:
        out.print(f"not evaluated; to score it: finetune eval {escape(str(run.path))}")
    print_text(f"\n{recipe}")


def _price_of(run: RunDirectory) -> float | None:
    """The price in the run's plan; None where that is damaged."""
    try:
        return read_plan(run.plan).settings.price_per_hour
    except CommandError:
        return None


def _scores(run: RunDirectory) -> dict[str, dict[str, Any]]:
    """The scores of each evaluation, base and tuned, without their rows."""
    return {
        name: {"rows": values["rows"], **{model: {key: values[model][key] for key in _SCORES} for model in ("base", "tuned")}}
        for name, values in read_evaluations(run).items()
    }


def _print_scores(scores: dict[str, dict[str, Any]]) -> None:
    shown = table("evaluation", "score", ">base", ">tuned")
    for name, values in scores.items():
        for key, title in _SCORES.items():
            if values["tuned"][key] is not None and values["base"][key] is not None:
                shown.add_row(
                    f"{name}, {values['rows']} rows", title, f"{values['base'][key]:.4f}", f"{values['tuned'][key]:.4f}"
                )
    out.print(shown)
