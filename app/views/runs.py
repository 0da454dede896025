"""The page of all runs as HTML: the controls above the table, the table, the queue and the trash."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .markup import action, inert, note
from .run_head import STATES, pill
from .run_row import RunRow, link_to

#: Columns that can be hidden: their name in the page's own HTML and in the head of the table.
COLUMNS = {
    "model": "Model", "loss": "Loss", "held": "Held out", "score": "Score", "peak": "Peak / forecast, GiB", "time": "Time",
    "started": "Started",
}  # fmt: skip
#: Columns of numbers.
_RIGHT = ("held", "score", "peak", "time")


def controls() -> str:
    """Search, filters and columns; the bar of what is chosen; and the menu of a row. runs.js works them; they never change."""
    boxes = "".join(
        f'<label><input type="checkbox" data-column="{name}"{"" if name == "model" else " checked"}> {label}</label>'
        for name, label in COLUMNS.items()
    )
    return (
        '<div class="ft-runs-head"><h1 class="ft-title" data-title="Runs">Runs</h1>'
        '<input type="search" id="runs-search" placeholder="Search" aria-label="Search runs">'
        '<select id="runs-state" aria-label="State"><option value="">Any state</option></select>'
        '<select id="runs-model" aria-label="Model"><option value="">Any model</option></select>'
        f'<details class="ft-pop"><summary>Columns</summary><div>{boxes}</div></details>'
        '<span class="ft-jump"><a href="#runs-queue">Queue <b id="runs-queued"></b></a>'
        '<a href="#runs-trash">Trash <b id="runs-deleted"></b></a></span></div>'
        '<div id="runs-menu" popover><button type="button" data-deed="rename">Rename</button>'
        '<button type="button" data-deed="duplicate">Duplicate</button>'
        '<button type="button" data-deed="delete" class="danger">Delete</button></div>'
    )


def chosen_bar() -> str:
    """What can be done with the chosen runs; hidden while none is."""
    return (
        '<div id="runs-chosen" hidden role="status"><b></b>'
        '<button type="button" class="ft-act" data-deed="compare">Compare</button>'
        '<button type="button" class="ft-act danger" data-deed="delete">Delete</button>'
        '<button type="button" class="ft-act ft-plain" data-deed="none">Choose none</button></div>'
    )


def runs_table(rows: Sequence[RunRow]) -> str:
    """The runs, newest first."""
    if not rows:
        return '<div class="ft-empty"><p>No runs yet.</p><p><a class="ft-button" href="/model">New run</a></p></div>'
    head = "".join(
        f'<th scope="col" class="c-{name}{" right" if name in _RIGHT else ""}">{label}</th>' for name, label in COLUMNS.items()
    )
    body = "".join(map(_row, rows))
    return (
        '<div class="ft-box ft-scroll ft-runs" role="region" aria-label="Runs" tabindex="0"><table>'
        f'<thead><tr><th scope="col"><span class="sr-only">Chosen</span></th><th scope="col">Name</th>'
        f'<th scope="col">State</th>{head}'
        f'<th scope="col"><span class="sr-only">More</span></th></tr></thead><tbody>{body}</tbody></table></div>'
    )


def _row(row: RunRow) -> str:
    name, state = inert(row.name), STATES.get(row.state.state, (row.state.state.capitalize(), ""))[0]
    curve = f"{row.curve}<small>{inert(row.loss)}</small>" if row.curve else ""
    values = {
        "model": inert(row.model), "loss": curve, "held": row.held_out, "score": inert(row.score), "peak": inert(row.peak),
        "time": row.time, "started": inert(row.started),
    }  # fmt: skip
    cells = "".join(f'<td class="c-{key}{" right" if key in _RIGHT else ""}">{value}</td>' for key, value in values.items())
    return (
        f'<tr data-run="{name}" data-state-name="{inert(state)}" data-model-name="{inert(row.model)}">'
        f'<td><input type="checkbox" data-key="check {name}" aria-label="Choose {name}"></td>'
        f'<td class="c-name">{link_to(row.name)}</td><td>{pill(row.state)}<small>{inert(row.steps)}</small></td>{cells}'
        f'<td><button type="button" class="ft-more" data-key="more {name}" aria-label="More for {name}">⋯</button></td></tr>'
    )


def queue(entries: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Waiting, started and failed starts, the newest first."""
    rows = "".join(_entry(name, status) for name, status in reversed(entries))
    waiting = sum(status["state"] == "waiting" for _, status in entries)
    shown = f"<ul>{rows}</ul>" if rows else note("The queue is empty.")
    return f'<section class="ft-box ft-lines" data-count="{waiting or ""}"><h2>Queue</h2>{shown}</section>'


def _entry(name: str, status: Mapping[str, Any]) -> str:
    state = {"waiting": "In the queue", "preparing": "Starting", "started": "Started", "failed": "Failed"}
    texts = [str(status["message"]), *(status.get("problems") or [])[:2]]
    run = link_to(str(status["run"])) if status.get("run") else ""
    button = ""
    if status["state"] == "waiting":
        message = json.dumps({"cancel": name})
        button = (
            f'<button type="button" class="ft-act" data-act="{inert(message)}" data-key="cancel-{inert(name)}">Remove</button>'
        )
    css = "bad" if status["state"] == "failed" else ""
    return (
        f'<li><span><b class="{css}">{inert(state.get(status["state"], status["state"]))}</b> {run} '
        f"{inert(' '.join(filter(None, texts)))}</span><small>{_asked(name)}</small>{button}</li>"
    )


def trash(deleted: Sequence[tuple[str, Path]]) -> str:
    """Deleted runs, each with a button that restores it."""
    rows = "".join(
        f"<li><span>{inert(name)}</span><button type='button' class='ft-act' {action(restore=path.name)}>Restore</button></li>"
        for name, path in deleted
    )
    hint = note(
        "They stay in the folder .trash beside the runs until you remove them there." if rows else "Nothing is deleted."
    )
    shown = f"<ul>{rows}</ul>" if rows else ""
    return f'<section class="ft-box ft-lines" data-count="{len(deleted) or ""}"><h2>Trash</h2>{hint}{shown}</section>'


def undo(deleted: Sequence[tuple[str, Path]]) -> str:
    """What was deleted just now, with the way back."""
    names = deleted[0][0] if len(deleted) == 1 else f"{len(deleted)} runs"
    buttons = f"<button type='button' class='ft-act' {action(restore=[path.name for _, path in deleted])}>Undo</button>"
    return f'<div class="ft-undo" role="status"><p>Deleted {inert(names)}.</p>{buttons}</div>'


def _asked(name: str) -> str:
    """When an entry was queued: its name begins with the time in nanoseconds."""
    return time.strftime("%d %b %H:%M", time.localtime(int(name.partition("-")[0]) / 1e9))
