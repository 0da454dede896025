"""Run: one run in tabs, live while it trains. Works on any run of the folder, whoever started it."""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any

import gradio as gr

from finetune.errors import FinetuneError
from finetune.recipe import load_recipe, recipe_from, write_recipe
from finetune.run import control
from finetune.run.directory import RunDirectory

from ..context import Context
from ..language import tr
from ..views import sweep as sweep_view
from ..views.binding import QUIET, change_trigger, fingerprint, load_when_shown, show
from ..views.markup import note, to_new_run
from ..views.problems import problem
from ..views.run_head import TABS

#: Tabs with controls, which a timer keeps up to date while one of them is open.
_WITH_CONTROLS = ("evaluate", "export")
_SWEEP_TICK_S = 2.0


def build(context: Context, page: gr.Blocks) -> None:
    """Components and their handlers. Head and body are followed by the browser (run.js), by the route of the chart's points."""
    from . import chat, result

    view = _View(context)
    name = gr.Textbox(visible="hidden", elem_id="run-name")
    tab = gr.Textbox(visible="hidden", elem_id="run-tab")
    act = gr.Textbox(visible="hidden", elem_id="run-act")
    head, status, body = show(elem_id="run-head"), show(elem_id="run-status"), show(elem_id="run-body")
    tasks, talk = gr.Timer(result.TICK_S, active=False), gr.Timer(chat.TICK_S, active=False)
    opened = gr.Textbox(visible="hidden")  # the run's name, from when a tab with controls is opened
    panes = {**result.build(context, opened, tasks), "chat": chat.build(context, opened, talk)}
    controls = {pane: load_when_shown(column) for pane, column in panes.items()}
    sweep, arms, changed = gr.Textbox(visible="hidden"), show(elem_id="run-arms"), change_trigger()
    following = gr.Timer(_SWEEP_TICK_S, active=False)
    page.load(view.open, None, [name, tab, head, body, sweep, arms, following], **QUIET)
    following.tick(view.sweep_changes, sweep, changed, **QUIET)
    changed.change(view.arms, sweep, arms, **QUIET)
    counts = {pane: len(pane_controls) for pane, pane_controls in controls.items()}
    shown = [tasks, talk, opened, *itertools.chain(*controls.values())]
    tab.change(functools.partial(_opened, counts), [tab, name], shown, **QUIET)
    act.change(view.act, [name, act], status, **QUIET)


def _opened(counts: dict[str, int], tab: str, name: str) -> list[Any]:
    """Only the open tab's timer ticks. A tab's controls are shown when it is opened, and keep typed text."""
    timers = [gr.Timer(active=tab in _WITH_CONTROLS), gr.Timer(active=tab == "chat")]
    controls = [gr.update(visible=True) if pane == tab else gr.skip() for pane, count in counts.items() for _ in range(count)]
    return [*timers, name if tab in counts else gr.skip(), *controls]


class _View:
    """Handlers without state: every answer is read from files."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def open(self, request: gr.Request) -> list[Any]:
        """The run, or the sweep, and the tab that the address names; without a run the one at work, else the newest."""
        from ..views import run_page

        tab, name = request.query_params.get("tab", ""), request.query_params.get("run")
        tab = tab if tab in TABS else "overview"
        no_sweep = ["", "", gr.Timer(active=False)]
        if (sweep := self.context.workspace.sweep(name)) is not None:
            timer = gr.Timer(active=not sweep.is_finished)
            return ["", tab, sweep_view.head(sweep), sweep_view.curves(sweep), sweep.path.name, sweep_view.arms(sweep), timer]
        run = self.context.workspace.run(name) or self._default(tab)
        if run is None:
            self.context.queue.ensure_starter()
            return ["", tab, run_page.empty(), "", *no_sweep]
        live = self.context.lives.of(run)
        return [run.path.name, tab, run_page.head(live, tab), run_page.body(live, tab), *no_sweep]

    def sweep_changes(self, name: str) -> str:
        """A fingerprint of a sweep's arms."""
        return fingerprint(self.arms(name))

    def arms(self, name: str) -> str:
        """The current arms of the open sweep; empty after its deletion."""
        sweep = self.context.workspace.sweep(name)
        return "" if sweep is None else sweep_view.arms(sweep)

    def _default(self, tab: str) -> RunDirectory | None:
        if tab not in (*_WITH_CONTROLS, "chat"):
            return self.context.workspace.newest()
        from . import chat

        runs = self.context.workspace.list_runs()
        return next((run for run in runs if chat.has_adapter(run)), runs[0] if runs else None)

    def act(self, name: str | None, message: str) -> Any:
        """Handle a button of the page's head."""
        run = self.context.workspace.run(name)
        deeds = {
            "pause": self._stop, "kill": lambda run: self._stop(run, now=True), "finish": self._finish,
            "resume": self._resume, "duplicate": self._duplicate, "half": self._halve,
        }  # fmt: skip
        try:
            deed = deeds.get(str(json.loads(message).get("run")))
        except (ValueError, AttributeError):
            return gr.skip()
        if run is None or deed is None:
            return gr.skip()
        try:
            return deed(run)
        except FinetuneError as error:
            return problem(error.title, error.problems, error.fix)

    def _stop(self, run: RunDirectory, now: bool = False) -> str:
        return "" if control.stop(run, now=now) else note(tr("This run is not running."))

    def _finish(self, run: RunDirectory) -> str:
        if control.finish(run):
            return note(tr("It ends after this step; its best step is the result."))
        return note(tr("This run is not running."))

    def _resume(self, run: RunDirectory) -> str:
        self.context.queue.add(load_recipe(run.recipe), resume=run.path.name)
        return note(tr("In the queue: it goes on from the newest checkpoint."))

    def _duplicate(self, run: RunDirectory) -> str:
        self.context.draft.write(run.recipe.read_text(encoding="utf-8"))
        return to_new_run(tr("Opening New run with this run's recipe."))

    def _halve(self, run: RunDirectory) -> str:
        values = load_recipe(run.recipe).model_dump(exclude_unset=True, mode="json")
        rate = self.context.lives.of(run).plan().settings.learning_rate / 2
        self.context.draft.write(write_recipe(recipe_from({**values, "learning_rate": rate})))
        return to_new_run(tr("Opening New run with half the learning rate."))
