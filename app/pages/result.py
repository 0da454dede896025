"""Result: evaluate base against tuned on held-out rows, and export a merged model."""

from __future__ import annotations

import re
from typing import Any

import gradio as gr

from app.context import Context
from app.planning.catalogue import local_datasets
from app.starts.tasks import VERBS
from app.views.binding import BUTTON, QUIET, show
from app.views.markup import inert, note, problem, table
from app.views.scores import scores
from finetune.errors import FinetuneError

_TICK_S = 1.0
_SCORES = {
    "Exact match": "exact", "Contains the expected answer": "contains", "Regular expression": "regex",
    "JSON, field by field": "json", "Last number": "numeric", "Loss only, no answers": "loss",
}  # fmt: skip
_HELD_OUT = "held-out rows"
_ORDERS = {"Where they differ": "differ", "Tuned model's worst": "worst", "Tuned model's best": "best"}
_NAME = re.compile(r"[^\W_][\w.-]{0,98}")


def build(context: Context, page: gr.Blocks) -> None:
    """Components and their handlers."""
    view = _View(context)
    show('<h1 class="ft-title" data-title="Result">Result</h1>')
    with gr.Row(elem_classes="ft-controls"):
        name = gr.Dropdown([], label="Run", elem_id="result-run", scale=3)
    seen = gr.State("")
    said = show(elem_id="result-said")
    show("<h2>Base against tuned</h2>")
    with gr.Row(elem_classes="ft-controls"):
        score = gr.Dropdown(list(_SCORES), value="Exact match", label="Score", elem_id="result-score", scale=2)
        pattern = gr.Textbox(
            label="Pattern", info="what it finds in both answers is compared", max_length=200, visible=False,
            elem_id="result-pattern", scale=2,
        )  # fmt: skip
        tolerance = gr.Number(
            label="Tolerance",
            info="relative: 0.01 is 1 %",
            value=0,
            minimum=0,
            visible=False,
            elem_id="result-tolerance",
            scale=1,
        )
        rows = gr.Dropdown([_HELD_OUT], value=_HELD_OUT, label="Rows", elem_id="result-rows", scale=2)
        most = gr.Number(
            label="At most", info="rows; 0 is all", value=0, minimum=0, precision=0, elem_id="result-most", scale=1
        )
        last = gr.Checkbox(label="Last step, not the best", elem_id="result-last", scale=1)
        evaluate = gr.Button("Evaluate", elem_id="result-eval", size="sm")
    with gr.Row(elem_classes="ft-controls"):
        order = gr.Dropdown(list(_ORDERS), value="Where they differ", label="Rows shown first", elem_id="result-order", scale=1)
    scores = show(elem_id="result-eval-shown")
    show("<h2>Merge the adapter into the base model</h2>")
    with gr.Row(elem_classes="ft-controls"):
        folder = gr.Textbox(label="Folder in the run", value="merged", max_length=100, elem_id="result-folder", scale=2)
        export = gr.Button("Export", elem_id="result-merge", size="sm")
    merged = show(elem_id="result-merge-shown")
    score.change(view.fields, score, [pattern, tolerance], **QUIET)
    evaluate.click(view.evaluate, [name, score, pattern, tolerance, rows, most, last], said, **BUTTON)
    export.click(view.merge, [name, folder], said, **BUTTON)
    inputs, outputs = [name, order, seen], [seen, scores, merged]
    page.load(view.choose, None, [name, rows], **QUIET).then(view.tick, inputs, outputs, **QUIET)
    gr.Timer(_TICK_S).tick(view.tick, inputs, outputs, **QUIET)
    name.input(view.tick, inputs, outputs, **QUIET)
    order.input(view.tick, inputs, outputs, **QUIET)


def evaluation(
    score: str, pattern: str, tolerance: float | None, rows: str | None, most: float | None, last: bool
) -> list[str]:
    """The options of `finetune eval` for what was chosen."""
    kind = _SCORES[score]
    options = ["--score", kind] if kind != "exact" else []
    if kind == "regex" and pattern.strip():
        options.append(f"--pattern={pattern.strip()}")
    if kind == "numeric" and tolerance:
        options += ["--tolerance", repr(float(tolerance))]
    if rows and rows != _HELD_OUT:
        options.append(f"--data={rows}")
    if most and most >= 1:
        options += ["--rows", str(int(most))]
    return [*options, "--last"] if last else options


class _View:
    """Handlers; commands run detached and write their output to files."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def choose(self, request: gr.Request) -> list[Any]:
        """Runs with an adapter or checkpoint, of which the address may name one; and files with rows."""
        runs = [
            run
            for run in self.context.workspace.list_runs()
            if run.adapter.is_dir() or any(run.checkpoints.glob("checkpoint-*"))
        ]
        asked = self.context.workspace.run(request.query_params.get("run"))
        chosen = asked or (runs[0] if runs else None)
        return [
            gr.Dropdown(choices=[run.path.name for run in runs], value=chosen.path.name if chosen else None),
            gr.Dropdown(choices=[_HELD_OUT, *local_datasets(self.context.workspace)], value=_HELD_OUT),
        ]

    def fields(self, score: str) -> list[Any]:
        """Show the field that belongs to a score."""
        return [gr.Textbox(visible=_SCORES[score] == "regex"), gr.Number(visible=_SCORES[score] == "numeric")]

    def evaluate(
        self,
        name: str | None,
        score: str,
        pattern: str,
        tolerance: float | None,
        rows: str | None,
        most: float | None,
        last: bool,
    ) -> str:
        """Start an evaluation of the run."""
        if rows not in (None, _HELD_OUT, *local_datasets(self.context.workspace)):
            return note("Choose rows from the list.")
        return self._start(name, "eval", evaluation(score, pattern, tolerance, rows, most, last))

    def merge(self, name: str | None, folder: str) -> str:
        """Start merging the run's adapter, into a folder of the run."""
        run = self.context.workspace.run(name)
        if not _NAME.fullmatch(folder.strip()):
            return problem("Not started", [f"{folder[:100]!r} is not a folder's name"], "Letters, digits, . - and _")
        return self._start(name, "merge", [f"--output={run.path / folder.strip()}"] if run else [])

    def _start(self, name: str | None, verb: str, options: list[str]) -> str:
        run = self.context.workspace.run(name)
        if run is None:
            return note("Choose a run.")
        try:
            self.context.tasks.start(run, verb, options)
        except FinetuneError as error:
            return problem("Not started", error.problems, error.fix)
        return ""

    def tick(self, name: str | None, order: str, seen: str) -> list[Any]:
        """Each command's progress or result when it changed."""
        run = self.context.workspace.run(name)
        if run is None:
            empty = '<div class="ft-empty"><p>No run has an adapter yet.</p><p><a href="/fit">Start a run.</a></p></div>'
            shown = [empty, ""]
        else:
            shown = [_task(verb, self.context.tasks.of(run, verb), _ORDERS[order]) for verb in VERBS]
        now = f"{name}{shown}"
        return gr.skip() if now == seen else [now, *shown]


def _task(verb: str, task: Any, order: str) -> str:
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
        return command + (scores(result, order) if "reused" in result else note("Made by an earlier version: evaluate again."))
    rows = [[key, value] for key, value in result.items()] if isinstance(result, dict) else []
    return command + (table(["name", "value"], rows, f"Result of {verb}", hidden_caption=True) if rows else note("Done."))
