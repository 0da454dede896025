"""Page of all runs as HTML: table, queue, trash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.run.state import RunState

from ..language import mark, tr
from .lists import Item, item_list
from .markup import Safe, action, as_on_page, inert
from .run_head import STATES, pill
from .run_row import RunRow
from .templates import render
from .words import QUEUE_STATES, clock

#: Columns: field of a row, CSS name, title, and whether the values are numbers.
_COLUMNS = (
    ("model", "model", mark("Model"), False), ("curve", "loss", mark("Loss"), False),
    ("held_out", "held", mark("Held out"), True), ("score", "score", mark("Score"), True),
    ("peak", "peak", mark("Peak / forecast, GiB"), True), ("time", "time", mark("Time"), True),
    ("started", "started", mark("Started"), False),
)  # fmt: skip


def runs_table(rows: Sequence[RunRow]) -> str:
    """Return the table of runs."""
    columns = [(key, tr(title), f"c-{css}{' right' if number else ''}") for key, css, title, number in _COLUMNS]
    return render("runs_table", rows=rows, columns=columns, pill=lambda state: Safe(pill(state)), state_name=_state_name)


def _state_name(state: RunState) -> str:
    return tr(STATES.get(state.state, (state.state.capitalize(), ""))[0])


def queue(entries: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return waiting and failed starts, newest first."""
    return item_list(tr("Queue"), [_entry(*entry) for entry in reversed(entries) if entry[1]["state"] != "started"])


def _entry(name: str, status: Mapping[str, Any]) -> Item:
    texts = [as_on_page(str(status["message"])), *(status.get("problems") or [])[:2]]
    is_waiting = status["state"] == "waiting"
    return Item(
        " ".join(filter(None, texts)), tr(QUEUE_STATES.get(status["state"], status["state"])),
        "bad" if status["state"] == "failed" else "", str(status.get("run") or ""),
        clock(int(name.partition("-")[0]) / 1e9),  # the name begins with nanoseconds
        tr("Remove") if is_waiting else "", {"cancel": name}, f"cancel-{name}",
    )  # fmt: skip


def trash(deleted: Sequence[tuple[str, Path]]) -> str:
    """Return deleted runs with Restore buttons."""
    restore = tr("Restore")
    items = [Item(name, button=restore, message={"restore": [path.name]}, key=path.name) for name, path in deleted]
    return item_list(tr("Trash"), items, tr("They stay in the folder .trash beside the runs until you remove them there."))


def undo(deleted: Sequence[tuple[str, Path]]) -> str:
    """Return the names of just deleted runs, with an Undo button."""
    text = tr("Deleted {name}." if len(deleted) == 1 else "Deleted {n} runs.", n=len(deleted), name=inert(deleted[0][0]))
    buttons = f"<button type='button' class='ft-act' {action(restore=[path.name for _, path in deleted])}>{tr('Undo')}</button>"
    return f'<div class="ft-undo" role="status"><p>{text}</p>{buttons}</div>'
