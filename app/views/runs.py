"""The page of all runs as HTML: the controls above the table, the table, the queue, the trash, and what settings did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..language import mark, tr
from .markup import action, as_on_page, inert, lines, note
from .run_head import STATES, pill
from .run_row import RunRow, link_to
from .words import clock

#: Columns: their name in the page's own HTML and in the head of the table.
COLUMNS = {
    "model": mark("Model"), "loss": mark("Loss"), "held": mark("Held out"), "score": mark("Score"),
    "peak": mark("Peak / forecast, GiB"), "time": mark("Time"), "started": mark("Started"),
}  # fmt: skip
#: Columns of numbers.
_RIGHT = ("held", "score", "peak", "time")
#: States of an entry of the queue.
_STATES = {"waiting": mark("In the queue"), "preparing": mark("Starting"), "failed": mark("Failed")}


def controls() -> str:
    """Search and filters; the bar for chosen runs; and the menu of a row. runs.js works them; they never change."""
    return (
        f'<div class="ft-runs-head"><h1 class="ft-title" data-title="{tr("Runs")}">{tr("Runs")}</h1>'
        f'<input type="search" id="runs-search" placeholder="{tr("Search")}" aria-label="{tr("Search runs")}">'
        f'<select id="runs-state" aria-label="{tr("State")}"><option value="">{tr("Any state")}</option></select>'
        f'<select id="runs-model" aria-label="{tr("Model")}"><option value="">{tr("Any model")}</option></select>'
        f'<span class="ft-jump"><a href="#runs-queue">{tr("Queue")} <b id="runs-queued"></b></a>'
        f'<a href="#runs-trash">{tr("Trash")} <b id="runs-deleted"></b></a></span></div>'
        f'<div id="runs-menu" popover><button type="button" data-deed="rename">{tr("Rename")}</button>'
        f'<button type="button" data-deed="duplicate">{tr("Duplicate")}</button>'
        f'<button type="button" data-deed="delete" class="danger">{tr("Delete")}</button></div>'
    )


def chosen_bar() -> str:
    """Buttons for the chosen runs; hidden while none is chosen."""
    return (
        '<div id="runs-chosen" hidden role="status"><b></b>'
        f'<button type="button" class="ft-act" data-deed="compare">{tr("Compare")}</button>'
        f'<button type="button" class="ft-act danger" data-deed="delete">{tr("Delete")}</button>'
        f'<button type="button" class="ft-act ft-plain" data-deed="none">{tr("Choose none")}</button></div>'
    )


def runs_table(rows: Sequence[RunRow]) -> str:
    """The runs, newest first."""
    if not rows:
        new = f'<a class="ft-button" href="/">{tr("New run")}</a>'
        return f'<div class="ft-empty"><p>{tr("No runs yet.")}</p><p>{new}</p></div>'
    head = "".join(
        f'<th scope="col" class="c-{name}{" right" if name in _RIGHT else ""}">{tr(label)}</th>'
        for name, label in COLUMNS.items()
    )
    body = "".join(map(_row, rows))
    return (
        f'<div class="ft-box ft-scroll ft-runs" role="region" aria-label="{tr("Runs")}" tabindex="0"><table>'
        f'<thead><tr><th scope="col"><span class="sr-only">{tr("Chosen")}</span></th><th scope="col">{tr("Name")}</th>'
        f'<th scope="col">{tr("State")}</th>{head}'
        f'<th scope="col"><span class="sr-only">{tr("More")}</span></th></tr></thead><tbody>{body}</tbody></table></div>'
    )


def _row(row: RunRow) -> str:
    name, state = inert(row.name), tr(STATES.get(row.state.state, (row.state.state.capitalize(), ""))[0])
    curve = f"{row.curve}<small>{inert(row.loss)}</small>" if row.curve else ""
    values = {
        "model": inert(row.model), "loss": curve, "held": row.held_out, "score": inert(row.score), "peak": inert(row.peak),
        "time": row.time, "started": inert(row.started),
    }  # fmt: skip
    cells = "".join(
        f'<td class="c-{key}{" right" if key in _RIGHT else ""}" data-label="{tr(COLUMNS[key])}">{value}</td>'
        for key, value in values.items()
    )
    return (
        f'<tr data-run="{name}" data-state-name="{inert(state)}" data-model-name="{inert(row.model)}">'
        f'<td><input type="checkbox" data-key="check {name}" aria-label="{tr("Choose {name}", name=name)}"></td>'
        f'<td class="c-name">{link_to(row.name)}</td><td>{pill(row.state)}<small>{inert(row.steps)}</small></td>{cells}'
        f'<td><button type="button" class="ft-more" data-key="more {name}" aria-label="{tr("More for {name}", name=name)}">'
        "⋯</button></td></tr>"
    )


def queue(entries: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Waiting and failed starts, the newest first."""
    return lines(tr("Queue"), [_entry(name, status) for name, status in reversed(entries) if status["state"] != "started"])


def _entry(name: str, status: Mapping[str, Any]) -> str:
    state = tr(_STATES.get(status["state"], status["state"]))
    texts = [as_on_page(str(status["message"])), *(status.get("problems") or [])[:2]]
    run = link_to(str(status["run"])) if status.get("run") else ""
    button = ""
    if status["state"] == "waiting":
        key = f"cancel-{inert(name)}"
        button = f'<button type="button" class="ft-act" {action(cancel=name)} data-key="{key}">{tr("Remove")}</button>'
    css = "bad" if status["state"] == "failed" else ""
    asked = clock(int(name.partition("-")[0]) / 1e9)  # the name begins with nanoseconds
    return (
        f'<span><b class="{css}">{inert(state)}</b> {run} '
        f"{inert(' '.join(filter(None, texts)))}</span><small>{asked}</small>{button}"
    )


def trash(deleted: Sequence[tuple[str, Path]]) -> str:
    """Deleted runs, each with a button that restores it."""
    items = [
        f"<span>{inert(name)}</span><button type='button' class='ft-act' {action(restore=path.name)}>{tr('Restore')}</button>"
        for name, path in deleted
    ]
    return lines(tr("Trash"), items, note(tr("They stay in the folder .trash beside the runs until you remove them there.")))


def undo(deleted: Sequence[tuple[str, Path]]) -> str:
    """Names of the runs just deleted, with an Undo button."""
    text = tr("Deleted {name}." if len(deleted) == 1 else "Deleted {n} runs.", n=len(deleted), name=inert(deleted[0][0]))
    buttons = f"<button type='button' class='ft-act' {action(restore=[path.name for _, path in deleted])}>{tr('Undo')}</button>"
    return f'<div class="ft-undo" role="status"><p>{text}</p>{buttons}</div>'
