"""Result: evaluate base against tuned on held-out rows, and export a merged model."""

from __future__ import annotations

import functools
from typing import Any

import gradio as gr

from app.context import Context
from app.starts.tasks import VERBS
from app.views.binding import BUTTON, QUIET, show
from app.views.markup import inert, note, problem, table
from finetune.errors import FinetuneError
from finetune.units import format_seconds

_TICK_S = 1.0
_ROWS_SHOWN = 12
_TITLES = {"eval": "Base against tuned on held-out rows", "merge": "Merge the adapter into the base model"}
_BUTTONS = {"eval": "Evaluate", "merge": "Export"}


def build(context: Context, page: gr.Blocks) -> None:
    """Components and their handlers."""
    view = _View(context)
    show('<h1 class="ft-title" data-title="Result">Result</h1>')
    with gr.Row(elem_classes="ft-controls"):
        name = gr.Dropdown([], label="Run", elem_id="result-run", scale=3)
    seen = gr.State("")
    panes: list[Any] = []
    said = show(elem_id="result-said")
    for verb in VERBS:
        show(f"<h2>{_TITLES[verb]}</h2>")
        with gr.Row(elem_classes="ft-controls"):
            options = gr.Textbox(
                label="Options",
                info=f"command-line options of finetune {verb}, optional",
                max_length=400,
                elem_id=f"result-{verb}-options",
                scale=3,
            )
            start = gr.Button(_BUTTONS[verb], elem_id=f"result-{verb}", size="sm")
        panes.append(show(elem_id=f"result-{verb}-shown"))
        start.click(functools.partial(view.start, verb), [name, options], said, **BUTTON)
    page.load(view.choose, None, name, **QUIET).then(view.tick, [name, seen], [seen, *panes], **QUIET)
    gr.Timer(_TICK_S).tick(view.tick, [name, seen], [seen, *panes], **QUIET)
    name.input(view.tick, [name, seen], [seen, *panes], **QUIET)


class _View:
    """Handlers; commands run detached and write their output to files."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def choose(self, request: gr.Request) -> Any:
        """Runs with an adapter or checkpoint; the address may name one."""
        runs = [
            run
            for run in self.context.workspace.list_runs()
            if run.adapter.is_dir() or any(run.checkpoints.glob("checkpoint-*"))
        ]
        asked = self.context.workspace.run(request.query_params.get("run"))
        chosen = asked or (runs[0] if runs else None)
        return gr.Dropdown(choices=[run.path.name for run in runs], value=chosen.path.name if chosen else None)

    def start(self, verb: str, name: str | None, options: str) -> str:
        """Start a command on the run."""
        run = self.context.workspace.run(name)
        if run is None:
            return note("Choose a run.")
        try:
            self.context.tasks.start(run, verb, options)
        except (FinetuneError, ValueError) as error:
            return problem("Not started", error.problems if isinstance(error, FinetuneError) else [str(error)])
        return ""

    def tick(self, name: str | None, seen: str) -> list[Any]:
        """Each command's progress or result when it changed."""
        run = self.context.workspace.run(name)
        verbs = VERBS
        if run is None:
            empty = '<div class="ft-empty"><p>No run has an adapter yet.</p><p><a href="/fit">Start a run.</a></p></div>'
            shown = [empty, *[""] * (len(verbs) - 1)]
        else:
            shown = [_task(verb, self.context.tasks.of(run, verb)) for verb in verbs]
        now = f"{name}{shown}"
        return gr.skip() if now == seen else [now, *shown]


def _task(verb: str, task: Any) -> str:
    status = task.status()
    if status is None:
        return note("Not run yet.")
    command = f'<p class="ft-mono">{inert(status.get("command", ""))}</p>'
    if status["state"] == "running":
        last = task.log().strip().splitlines()[-1:] or ["starting"]
        return f'{command}<p class="ft-note" role="status"><span class="ft-busy"></span> {inert(last[0], 300)}</p>'
    result = task.result()
    if isinstance(result, dict) and "problems" in result:
        return command + problem(f"finetune {verb} failed", result["problems"], result.get("fix", ""))
    if status["state"] == "failed":
        return command + problem(f"finetune {verb} failed", task.log().strip().splitlines()[-5:] or ["no output"])
    if verb == "eval" and isinstance(result, dict):
        return command + _scores(result)
    rows = [[key, value] for key, value in result.items()] if isinstance(result, dict) else []
    return command + (table(["name", "value"], rows, f"Result of {verb}", hidden_caption=True) if rows else note("Done."))


def _scores(result: dict[str, Any]) -> str:
    base, tuned = result["base"], result["tuned"]
    summary = table(
        [f"{result['rows']:,} held-out rows", ">base", ">tuned"],
        [
            ["exact match", _percent(base["exact_match"]), _percent(tuned["exact_match"])],
            ["loss per trained token", _number(base["loss"]), _number(tuned["loss"])],
        ],
        "Base against tuned", hidden_caption=True,
    )  # fmt: skip
    answers = list(zip(result["prompts"], result["references"], base["answers"], tuned["answers"], strict=False))[:_ROWS_SHOWN]
    rows = [[prompt.strip(), wanted, before, after] for prompt, wanted, before, after in answers]
    return (
        summary
        + note(f"Evaluated in {format_seconds(result['seconds'])}.")
        + table(["prompt", "expected", "base", "tuned"], rows, "Answers")
    )


def _percent(share: float | None) -> str:
    return "not measured" if share is None else f"{share:.1%}"


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"
