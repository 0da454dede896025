"""Runs: a table with state and forecast against measured peak; compare, rename, delete; the queue."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import quote

import gradio as gr

from finetune.errors import FinetuneError
from finetune.run.directory import RunDirectory
from finetune.units import format_bytes

from ..browser_files import chart_element, has_charts
from ..context import Context
from ..views.binding import BUTTON, QUIET, change_trigger, fingerprint, show
from ..views.charts import sparkline
from ..views.compare import comparison, last_loss
from ..views.markup import Safe, inert, note, problem, table
from ..views.run import measured_peak
from ..views.run_head import pill

_TICK_S = 2.0
_MOST_COMPARED = 5
_LISTED = 200


def build(context: Context, page: gr.Blocks) -> None:
    """Components and their handlers."""
    view = _View(context)
    show('<h1 class="ft-title" data-title="Runs">Runs</h1>')
    listed = show(elem_id="runs-list")
    show("<h2>Compare</h2>")
    chosen = gr.Dropdown(
        [], label=f"Runs, up to {_MOST_COMPARED}", multiselect=True, max_choices=_MOST_COMPARED, elem_id="runs-compare"
    )
    compared = show(elem_id="runs-compared")
    show("<h2>Rename or delete</h2>")
    with gr.Row(elem_classes="ft-controls"):
        name = gr.Dropdown([], label="Run", elem_id="runs-name", scale=2)
        new = gr.Textbox(label="New name", max_length=100, elem_id="runs-new-name", scale=2)
        rename = gr.Button("Rename", elem_id="runs-rename", size="sm")
        discard = gr.Button("Delete", variant="stop", elem_id="runs-discard", size="sm")
    with gr.Row(visible=False, elem_classes="ft-controls") as sure:
        show(note("Delete this run? It is moved to .trash in the folder with the runs, where it can be restored."))
        yes = gr.Button("Yes, delete", variant="stop", elem_id="runs-discard-yes", size="sm")
        no = gr.Button("Keep", elem_id="runs-discard-no", size="sm")
    status = show(elem_id="runs-status")
    show("<h2>Queue</h2>")
    queue = show(elem_id="runs-queue")
    with gr.Row(elem_classes="ft-controls"):
        entry = gr.Dropdown([], label="In the queue", elem_id="runs-queue-entry")
        cancel = gr.Button("Remove", elem_id="runs-queue-cancel", size="sm")
    changed, renamed = change_trigger(), change_trigger()
    page.load(view.tick, None, [changed, renamed], **QUIET)
    gr.Timer(_TICK_S).tick(view.tick, None, [changed, renamed], **QUIET)
    changed.change(view.tables, None, [listed, queue], **QUIET)
    renamed.change(view.names, [chosen, name, entry], [chosen, name, entry], **QUIET)
    chosen.change(view.compare, chosen, compared, **QUIET)
    rename.click(view.rename, [name, new], [status, name], **BUTTON)
    discard.click(lambda chosen: gr.Row(visible=bool(chosen)), name, sure, **BUTTON)
    no.click(lambda: gr.Row(visible=False), None, sure, **BUTTON)
    yes.click(view.discard, name, [status, sure, name], **BUTTON)
    cancel.click(view.cancel, entry, status, **BUTTON)


class _View:
    """Handlers; they read the run directories and the queue's files."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def tick(self) -> list[str]:
        """Fingerprints of the tables, and of the names to choose from."""
        self.context.queue.ensure_starter()
        return [fingerprint(self.tables()), fingerprint(self._names())]

    def tables(self) -> list[str]:
        """The runs and the queue."""
        entries = [(entry.path.name, entry.status()) for entry in self.context.queue.entries()]
        return [_list([self._row(run) for run in self.context.workspace.list_runs()[:_LISTED]]), _queue(entries)]

    def names(self, chosen: list[str] | None, name: str | None, entry: str | None) -> list[Any]:
        """The runs and waiting starts to choose from; a choice stays while it exists."""
        names, waiting = self._names()
        return [
            gr.Dropdown(choices=names, value=[choice for choice in chosen or [] if choice in names]),
            gr.Dropdown(choices=names, value=name if name in names else None),
            gr.Dropdown(choices=waiting, value=entry if entry in [name for _, name in waiting] else None),
        ]

    def _names(self) -> tuple[list[str], list[tuple[str, str]]]:
        """Names of the runs; and of the waiting starts, each with the time it was asked for."""
        waiting = [entry.path.name for entry in self.context.queue.entries() if entry.status()["state"] == "waiting"]
        return [run.path.name for run in self.context.workspace.list_runs()[:_LISTED]], [
            (_asked(name), name) for name in waiting
        ]

    def compare(self, names: list[str] | None) -> str:
        """Curves of the chosen runs in one chart, and the settings that differ."""
        runs = [run for name in (names or [])[:_MOST_COMPARED] if (run := self.context.workspace.run(name))]
        if not runs:
            return note("Choose runs to compare their curves and settings.")
        lives = [self.context.lives.of(run) for run in runs]
        for live in lives:
            live.refresh()
        return comparison(lives, chart_element([run.path.name for run in runs]) if has_charts() else "")

    def rename(self, name: str | None, new: str) -> list[Any]:
        """Give the run another name."""
        run = self.context.workspace.run(name)
        if run is None:
            return [note("Choose a run."), gr.skip()]
        try:
            renamed = self.context.workspace.rename(run, new)
        except FinetuneError as error:
            return [problem("Not renamed", error.problems, error.fix), gr.skip()]
        self.context.lives.forget(run)
        names = [entry.path.name for entry in self.context.workspace.list_runs()]
        return [note(f"{name} is now called {renamed.path.name}."), gr.Dropdown(choices=names, value=renamed.path.name)]

    def discard(self, name: str | None) -> list[Any]:
        """Delete the run, which the user has confirmed."""
        run = self.context.workspace.run(name)
        if run is None:
            return [note("Choose a run."), gr.Row(visible=False), gr.skip()]
        try:
            target = self.context.workspace.discard(run)
        except FinetuneError as error:
            return [problem("Not deleted", error.problems, error.fix), gr.Row(visible=False), gr.skip()]
        self.context.lives.forget(run)
        names = [entry.path.name for entry in self.context.workspace.list_runs()]
        return [
            note(f"Deleted {name}; it can be restored from {target.parent.name}/{target.name}."),
            gr.Row(visible=False),
            gr.Dropdown(choices=names, value=None),
        ]

    def cancel(self, entry: str | None) -> str:
        """Remove a run from the queue."""
        return note("Removed." if entry and self.context.queue.cancel(entry) else "It is no longer waiting.")

    def _row(self, run: RunDirectory) -> list[Any]:
        live = self.context.lives.of(run)
        live.refresh()
        digest, plan, state = live.digest, live.plan(), live.state()
        loss = digest.series.get("loss")
        line = (
            sparkline(loss.means(), f"Loss of {run.path.name}: {last_loss(digest)}") if loss else sparkline([], "no step yet")
        )
        name = run.path.name
        link = Safe(f'<a href="/run?run={quote(name)}">{inert(name)}</a>')
        badge = Safe(pill(state))
        total = plan.total_steps
        forecast = plan.forecast.peak_bytes if plan.forecast else None
        measured = measured_peak(digest, plan)[1]
        off = f"{measured / forecast - 1:+.1%}" if forecast and measured else None
        return [
            link, badge, Safe(line), f"{digest.step:,}{f' of {total:,}' if total else ''}", last_loss(digest),
            format_bytes(forecast) if forecast else "no forecast", format_bytes(measured), off,
        ]  # fmt: skip


def _list(rows: list[list[Any]]) -> str:
    if not rows:
        return '<div class="ft-empty"><p>No runs yet.</p><p><a href="/fit">Plan and start a run.</a></p></div>'
    columns = ["run", "state", "loss", ">step", ">last loss", ">forecast peak", ">measured peak", ">difference"]
    return table(columns, rows, "Runs, newest first", hidden_caption=True)


def _queue(entries: list[tuple[str, dict[str, Any]]]) -> str:
    rows = [
        [
            _asked(name),
            status["state"],
            " ".join([status.get("run") or "", status["message"], *(status.get("problems") or [])[:2]]),
        ]
        for name, status in reversed(entries)
    ]
    return table(["queued at", "state", "message"], rows, "Queue", hidden_caption=True) if rows else note("The queue is empty.")


def _asked(name: str) -> str:
    """When an entry was queued: its name begins with the time in nanoseconds."""
    return time.strftime("%d %b %H:%M:%S", time.localtime(int(name.partition("-")[0]) / 1e9))
