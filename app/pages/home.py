"""Home: this machine, the run at work, the last runs, and the ways to start: an own file, a hub dataset, the demo."""

from __future__ import annotations

import json
from typing import Any

import gradio as gr

from finetune.errors import FinetuneError
from finetune.recipe import load_recipe
from finetune.settings import Recipe

from ..context import Context
from ..language import mark, tr
from ..machine import Machine
from ..planning.catalogue import DATA_ENDINGS
from ..planning.draft import FIRST, Edited
from ..planning.own_data import choose_data, take_upload
from ..views import home as home_views
from ..views.binding import BUTTON, QUIET, change_trigger, fingerprint, show
from ..views.markup import note
from ..views.problems import problem, settings_problem
from ..views.run_row import row_of
from .starting import progress_of

_TICK_S, _SHOWN = 2.0, 5


def build(context: Context, page: gr.Blocks) -> None:
    """Components and their handlers."""
    view = _View(context)
    head, running = show(lambda: home_views.machine([]), elem_id="home-head"), show(elem_id="home-running")
    act, mine = gr.Textbox(visible="hidden", elem_id="home-act"), gr.State("")
    progress, status = show(elem_id="home-progress"), show(elem_id="home-status")
    with gr.Row(elem_id="home-two"):
        with gr.Column(elem_classes="ft-box"):
            show(lambda: home_views.start(DATA_ENDINGS))
            upload = gr.UploadButton(mark("Choose a file"), file_types=list(DATA_ENDINGS), elem_id="home-upload")
        with gr.Column(elem_classes="ft-box"):
            recent = show(lambda: home_views.recent([], []), elem_id="home-recent")
    changed = change_trigger()
    page.load(view.tick, mine, changed, **QUIET)
    gr.Timer(_TICK_S).tick(view.tick, mine, changed, **QUIET)
    changed.change(view.show, mine, [head, running, recent, progress], **QUIET)
    act.change(view.act, act, [status, progress, mine], **QUIET)
    upload.upload(view.upload, upload, status, **BUTTON)


class _View:
    def __init__(self, context: Context) -> None:
        self.context, self._machine = context, Machine(context.workspace, context.lives)

    def tick(self, mine: str) -> str:
        self.context.queue.ensure_starter()
        return fingerprint(self.show(mine))

    def show(self, mine: str) -> list[Any]:
        """Machine, run at work, last runs, and how far the start is that was asked for here."""
        job, gpus = self._machine.status()
        rows = [row_of(self.context.lives.of(run), self.context.scores) for run in self.context.workspace.list_runs()[:_SHOWN]]
        waiting = [status for entry in self.context.queue.entries() if (status := entry.status())["state"] == "waiting"]
        at_work = next((row for row in rows if job and row.name == job.name), None)
        progress = progress_of(self.context.queue, mine) if mine else ""
        return [home_views.machine(gpus), home_views.running(job, at_work), home_views.recent(rows, waiting), progress]

    def act(self, message: str) -> list[Any]:
        """What a button asks for: the demo, or a dataset of the hub."""
        try:
            action = json.loads(message)
            if action.get("demo"):
                entry = self.context.queue.add(load_recipe(FIRST))
                return ["", progress_of(self.context.queue, entry.path.name), entry.path.name]
            hub = str(action.get("hub", "")).strip()
        except (ValueError, AttributeError):  # no message of this page
            return [gr.skip()] * 3
        return [_to_data(choose_data(self.context.draft, hub)) if hub else "", gr.skip(), gr.skip()]

    def upload(self, path: str | None) -> str:
        try:
            return _to_data(choose_data(self.context.draft, take_upload(self.context.workspace, path)))
        except FinetuneError as error:
            return problem(tr("This file can't be used"), error.problems, error.fix)


def _to_data(edited: Edited) -> str:
    recipe: Recipe | None = edited.recipe
    if recipe is None or edited.problems:
        return settings_problem(edited.problems, edited.fix)
    return note(tr("Opening the data.")).replace("<p ", '<p data-go="/data" role="status" ')
