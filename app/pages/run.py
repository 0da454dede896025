"""Run: live loss over live memory, stop, resume. Works on any run of the folder, whoever started it."""

from __future__ import annotations

from typing import Any

import gradio as gr

from finetune.errors import FinetuneError
from finetune.recipe import load_recipe
from finetune.run import control
from finetune.run.state import RunState

from ..browser_files import chart_element, has_charts
from ..context import Context
from ..views import run as run_view
from ..views.binding import BUTTON, QUIET, change_trigger, fingerprint, show
from ..views.markup import note, problem

_TICK_S = 1.0


def build(context: Context, page: gr.Blocks) -> None:
    """Components and their updates."""
    show('<h1 class="ft-title">Run</h1>')
    with gr.Row(elem_classes="ft-controls"):
        name = gr.Dropdown([], label="Run", elem_id="run-name", scale=3, allow_custom_value=True)
        stop = gr.Button("Stop", variant="stop", elem_id="run-stop", interactive=False)
        resume = gr.Button("Resume", elem_id="run-resume", interactive=False)
    status = show(elem_id="run-status")
    head = show(elem_id="run-head")
    curves = show(elem_id="run-curves")
    show("<h2>Memory</h2>")
    memory = show(elem_id="run-memory")
    show("<h2>Sample answers</h2>")
    samples = show(elem_id="run-samples")
    with gr.Accordion("Messages and log", open=False):
        messages = show(elem_id="run-messages")
        log = show(elem_id="run-log")
    changed, reported = change_trigger(), change_trigger()
    shown = [head, curves, memory, stop, resume]
    view = _View(context)
    page.load(view.choose, None, name, **QUIET).then(view.tick, name, [changed, reported], **QUIET)
    gr.Timer(_TICK_S).tick(view.tick, name, [changed, reported], **QUIET)
    name.input(view.tick, name, [changed, reported], **QUIET)
    changed.change(view.show, name, shown, **QUIET)
    reported.change(view.report, name, [samples, messages, log], **QUIET)
    stop.click(view.stop, name, status, **BUTTON)
    resume.click(view.resume, name, status, **BUTTON)


class _View:
    """Handlers without state: every answer is read from files."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def choose(self, request: gr.Request) -> Any:
        """The run that the address names, else one at work, else the newest."""
        names = [run.path.name for run in self.context.workspace.list_runs()]
        asked = self.context.workspace.run(request.query_params.get("run"))
        chosen = asked or self.context.workspace.newest()
        return gr.Dropdown(choices=names, value=chosen.path.name if chosen else None)

    def tick(self, name: str | None) -> list[str]:
        """Fingerprints of what a step changes, and of answers, messages and log, which seldom change."""
        run = self.context.workspace.run(name)
        if run is None:
            self.context.queue.ensure_starter()
            return [fingerprint(len(self.context.workspace.list_runs())), ""]
        live = self.context.lives.of(run)
        whole = live.refresh()
        return [fingerprint(name, live.version, whole, live.state()), fingerprint(name, self.report(name))]

    def show(self, name: str | None) -> list[Any]:
        """The run as its files say now."""
        run = self.context.workspace.run(name)
        if run is None:
            link = '<a href="/fit">Plan and start a run.</a>'
            empty = f'<div class="ft-empty" data-title="Run"><p>No runs yet.</p><p>{link}</p></div>'
            return [empty, "", "", gr.Button(interactive=False), gr.Button(interactive=False)]
        live = self.context.lives.of(run)
        whole = live.refresh()
        state = live.state()
        head = run_view.headline(live, state)
        if not whole:
            head += note(f"Reading this run's history: {live.progress:.0%}")
        digest, plan = live.digest, live.plan()
        curves = chart_element([run.path.name]) if has_charts() else run_view.plain_curves(live)
        return [
            head, curves, run_view.memory(digest, plan),
            gr.Button(interactive=state.state in ("running", "starting")), gr.Button(**_resume_button(state)),
        ]  # fmt: skip

    def report(self, name: str | None) -> list[str]:
        """Sample answers, messages and the end of the log."""
        run = self.context.workspace.run(name)
        if run is None:
            return ["", "", ""]
        live = self.context.lives.of(run)
        return [run_view.samples(live.digest), run_view.messages(live.digest), run_view.log_tail(live)]

    def stop(self, name: str | None) -> str:
        """Ask the run to stop; its state has the outcome."""
        run = self.context.workspace.run(name)
        if run is None:
            return ""
        asked = control.stop(run)
        return note("Stopping after this step, with a checkpoint." if asked else "This run is not running.")

    def resume(self, name: str | None) -> str:
        """Queue the run to continue from its newest checkpoint."""
        run = self.context.workspace.run(name)
        if run is None:
            return ""
        try:
            self.context.queue.add(load_recipe(run.recipe), resume=run.path.name)
        except FinetuneError as error:
            return problem(error.title, error.problems, error.fix)
        return note("Resuming from the newest checkpoint.")


def _resume_button(state: RunState) -> dict[str, Any]:
    """Shown where the run can be resumed."""
    resumable = state.ended and state.state != "finished"
    return {"interactive": resumable, "visible": resumable}
