"""Runs: a table to search, filter and choose from; compare, rename, duplicate, delete and restore; the queue."""

from __future__ import annotations

import json
from typing import Any

import gradio as gr

from finetune.errors import FinetuneError
from finetune.run.directory import RunDirectory
from finetune.run.rename_delete import delete_run, deleted_runs, rename_run, restore_run

from ..browser_files import chart_element, has_charts
from ..context import Context
from ..language import tr
from ..views import runs as runs_views
from ..views.binding import QUIET, change_trigger, fingerprint, show
from ..views.compare import comparison
from ..views.markup import note, to_new_run
from ..views.problems import problem, problem_of
from ..views.run_row import row_of
from ..views.sweep import listed

_TICK_S = 2.0
_MOST_COMPARED = 5
_LISTED = 200


def build(context: Context, page: gr.Blocks) -> None:
    """Components and their handlers. runs.js keeps search, filters and selection, and sends actions."""
    view = _View(context)
    show(runs_views.controls, elem_id="runs-controls")
    act = gr.Textbox(visible="hidden", elem_id="runs-act")
    status = show(elem_id="runs-status")
    listed, sweeps = show(elem_id="runs-list"), show(elem_id="runs-sweeps")
    show(runs_views.chosen_bar)
    compared = show(elem_id="runs-compared")
    queue, trash = show(elem_id="runs-queue"), show(elem_id="runs-trash")
    changed = change_trigger()
    page.load(view.tick, None, changed, **QUIET)
    gr.Timer(_TICK_S).tick(view.tick, None, changed, **QUIET)
    changed.change(view.tables, None, [listed, sweeps, queue, trash], **QUIET)
    act.change(view.act, act, [status, compared, changed], **QUIET)


class _View:
    def __init__(self, context: Context) -> None:
        self.context = context

    def tick(self) -> str:
        self.context.queue.ensure_starter()
        return fingerprint(self.tables())

    def tables(self) -> list[str]:
        """The runs, the sweeps, the queue and the trash."""
        workspace = self.context.workspace
        entries = [(entry.path.name, entry.status()) for entry in self.context.queue.entries()]
        rows, damaged = [], ""
        for run in workspace.list_runs()[:_LISTED]:
            try:
                rows.append(row_of(self.context.lives.of(run), self.context.scores))
            except (FinetuneError, OSError, ValueError) as error:  # the others are shown
                damaged += problem_of(error)
        sweeps = listed(workspace.list_sweeps()[:_LISTED])
        trash = runs_views.trash(deleted_runs(workspace.runs)[:_LISTED])
        return [damaged + runs_views.runs_table(rows), sweeps, runs_views.queue(entries), trash]

    def act(self, message: str) -> list[Any]:
        """Handle a button: return its status line, the comparison, and the fingerprint of the new table."""
        try:
            action = json.loads(message)
            status, compared = self._done(action)
        except (ValueError, AttributeError):  # no message of this page
            return [gr.skip()] * 3
        except FinetuneError as error:
            status, compared = problem_of(error), gr.skip()
        return [status, compared, self.tick()]

    def _done(self, action: dict[str, Any]) -> tuple[Any, Any]:
        names = [name for name in action.get("runs") or [] if isinstance(name, str)]
        runs = [run for name in names if (run := self.context.workspace.run(name))]
        match action.get("deed"), runs:
            case "compare", _:
                return "", self.compare(runs)
            case "rename", [run]:
                return self._rename(run, str(action.get("name", ""))), gr.skip()
            case "duplicate", [run]:
                self.context.draft.write(run.recipe.read_text(encoding="utf-8"))
                return to_new_run(tr("Opening New run with this run's recipe.")), gr.skip()
            case "delete", [_, *_]:
                return self._delete(runs), gr.skip()
        if "restore" in action:
            folders = action["restore"] if isinstance(action["restore"], list) else [action["restore"]]
            names = [restore_run(self.context.workspace.runs, str(folder)).path.name for folder in folders]
            return note(tr("Restored {runs}.", runs=", ".join(names)), "ok"), gr.skip()
        if isinstance(action.get("cancel"), str):
            is_removed = self.context.queue.cancel(action["cancel"])
            return note(tr("Removed." if is_removed else "It is no longer waiting.")), gr.skip()
        return gr.skip(), gr.skip()

    def compare(self, runs: list[RunDirectory]) -> str:
        """Curves of the chosen runs in one chart, their scores, and the settings that differ."""
        if len(runs) < 2:
            return note(tr("Choose two runs or more to compare them."))
        lives = [self.context.lives.of(run) for run in runs[:_MOST_COMPARED]]
        rows = [row_of(live, self.context.scores) for live in lives]
        element = chart_element([live.run.path.name for live in lives]) if has_charts() else ""
        fewer = note(tr("The first {n} are compared.", n=_MOST_COMPARED)) if len(runs) > _MOST_COMPARED else ""
        return f'<section class="ft-box"><h2>{tr("Compared")}</h2>{fewer}{comparison(lives, element, rows)}</section>'

    def _rename(self, run: RunDirectory, name: str) -> str:
        if name.strip() == run.path.name:
            return ""
        renamed = rename_run(run, name)
        self.context.lives.forget(run)
        return note(tr("{run} is now called {name}.", run=run.path.name, name=renamed.path.name))

    def _delete(self, runs: list[RunDirectory]) -> str:
        deleted, refused = [], ""
        for run in runs:
            try:
                deleted.append((run.path.name, delete_run(run)))
            except FinetuneError as error:
                refused += problem(tr("Not deleted"), error.problems, error.fix)
                continue
            self.context.lives.forget(run)
        return refused + (runs_views.undo(deleted) if deleted else "")
