"""The tabs Evaluate and Export of a run: base against tuned, report; merge, GGUF, serve, push to the hub."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import gradio as gr

from finetune.errors import FinetuneError
from finetune.evaluate.results import read_evaluations, read_forgetting, read_no_call, read_tasks, unreadable_evaluations
from finetune.export.gguf_types import GGUF_TYPES
from finetune.hub import require_repo
from finetune.run.base_adapter import base_adapter_of
from finetune.run.directory import RunDirectory
from finetune.units import format_bytes

from ..background.tasks import Task
from ..context import Context
from ..language import mark, tr
from ..planning.catalogue import local_datasets
from ..views.binding import BUTTON, QUIET, change_trigger, fingerprint, show
from ..views.markup import inert, note, table
from ..views.options import HELD_OUT_BEFORE, SCORES
from ..views.problems import problem
from ..views.scores import forgetting_notes, no_call_note, rows_of, scores, task_table, title_of

#: Seconds between two looks at what the commands have written.
TICK_S = 1.0
_HELD_OUT = mark("held-out rows")
_TYPES = {gguf.label: name for name, gguf in GGUF_TYPES.items()}
_KINDS = {mark("Adapter"): "adapter", mark("Merged model"): "merged"}
_ORDERS = {
    mark("Differing first"): "differ", mark("Tuned model's worst first"): "worst", mark("Tuned model's best first"): "best"
}  # fmt: skip
#: Commands on a run -> the buttons that start them.
_ACTIONS = {
    "eval": mark("Evaluate"), "merge": mark("Merge"), "export": mark("Export to GGUF"),
    "report": mark("Write the report"), "compare": mark("Compare"), "push": mark("Push"),
}  # fmt: skip
_DRY_RUN_FIRST = mark("See the files first: Dry run.")
_NAME = re.compile(r"[^\W_][\w.-]{0,98}")


def build(context: Context, name: gr.Textbox, timer: gr.Timer) -> dict[str, gr.Column]:
    """Both tabs for the run called `name`; they are up to date while the timer ticks."""
    view = _View(context)
    changed = change_trigger()
    with gr.Column(elem_classes="ft-pane ft-pane-evaluate") as evaluate:
        order, rows, others, scores, reported = _evaluate_tab(view, name)
    with gr.Column(elem_classes="ft-pane ft-pane-export") as export:
        kind, merged, pushed, exported, served = _export_tab(view, name)
    name.change(view.depending, name, [rows, others, kind], **QUIET)
    name.change(view.tick, [name, order], changed, **QUIET)
    timer.tick(view.tick, [name, order], changed, **QUIET)
    order.input(view.tick, [name, order], changed, **QUIET)
    changed.change(view.show, [name, order], [scores, reported, merged, pushed, exported, served], **QUIET)
    return {"evaluate": evaluate, "export": export}


def _evaluate_tab(view: _View, name: gr.Textbox) -> tuple[Any, ...]:
    with gr.Column(elem_classes="ft-box"):
        show(_heading("Evaluate", mark("Base and tuned model answer the same rows; the difference counts.")))
        with gr.Row(elem_classes="ft-controls"):
            score = gr.Dropdown(list(SCORES), label=mark("Score"), elem_id="result-score", scale=2)
            pattern = gr.Textbox(
                label=mark("Pattern"), info=mark("what it finds in both answers is compared"), max_length=200, visible=False,
                elem_id="result-pattern", scale=2,
            )  # fmt: skip
            tolerance = gr.Number(
                label=mark("Tolerance"), info=mark("relative: 0.01 is 1 %"), value=0, minimum=0, visible=False,
                elem_id="result-tolerance", scale=1,
            )  # fmt: skip
            rows = gr.Dropdown([_HELD_OUT], value=_HELD_OUT, label=mark("Rows"), elem_id="result-rows", scale=2)
            most = gr.Number(label=mark("At most, 0 is all"), value=0, minimum=0, precision=0, elem_id="result-most", scale=1)
            last = gr.Checkbox(label=mark("Last step, not the best"), elem_id="result-last", scale=1, container=False)
            evaluate = gr.Button(mark("Evaluate"), variant="primary", elem_id="result-eval", scale=0)
        status = show(elem_id="result-status")
    with gr.Column(elem_classes="ft-box"):
        with gr.Row(elem_classes="ft-controls ft-sorted"):
            show(_heading(mark("Scores")))
            order = gr.Dropdown(list(_ORDERS), value="Differing first", label=mark("Sort"), elem_id="result-order", scale=1)
        scores = show(elem_id="result-eval-shown")
    with gr.Column(elem_classes="ft-box"):
        show(_heading(mark("Report"), mark("One file that opens offline, with curves, scores and settings.")))
        with gr.Row(elem_classes="ft-controls"):
            others = gr.Dropdown([], label=mark("Compare with other runs"), multiselect=True, elem_id="result-others", scale=3)
            report = gr.Button(mark("Write the report"), elem_id="result-report", scale=0)
            compare = gr.Button(mark("Compare"), elem_id="result-compare", scale=0)
        reported = show(elem_id="result-report-shown")
    score.change(view.fields, score, [pattern, tolerance], **QUIET)
    evaluate.click(view.evaluate, [name, score, pattern, tolerance, rows, most, last], status, **BUTTON)
    report.click(view.report, name, status, **BUTTON)
    compare.click(view.compare, [name, others], status, **BUTTON)
    return order, rows, others, scores, reported


def _export_tab(view: _View, name: gr.Textbox) -> tuple[Any, ...]:
    status = show(elem_id="export-status")
    with gr.Column(elem_classes="ft-box"):
        show(_heading(mark("Merge"), mark("One model folder, with the adapter in its 16-bit weights.")))
        with gr.Row(elem_classes="ft-controls"):
            folder = gr.Textbox(
                label=mark("Folder in the run"), value="merged", max_length=100, elem_id="result-folder", scale=2
            )
            merge = gr.Button(mark("Merge"), variant="primary", elem_id="result-merge", scale=0)
        merged = show(elem_id="result-merge-shown")
    with gr.Column(elem_classes="ft-box"):
        show(_heading("GGUF", mark("For llama.cpp and Ollama; kept when llama.cpp gives the adapter's answers.")))
        with gr.Row(elem_classes="ft-controls"):
            precision = gr.Dropdown(
                list(_TYPES), value=GGUF_TYPES["f16"].label, label=mark("Type"), elem_id="result-gguf-type", scale=2
            )
            apart = gr.Checkbox(
                label=mark("Base and adapter in two files"), elem_id="result-gguf-apart", scale=1, container=False
            )
            gguf = gr.Button(mark("Export to GGUF"), elem_id="result-gguf", scale=0)
        exported = show(elem_id="result-gguf-shown")
    with gr.Column(elem_classes="ft-box"):
        show(_heading(mark("Serve"), mark("With vLLM, llama.cpp or transformers.")))
        served = show(elem_id="result-serve-shown")
    with gr.Column(elem_classes="ft-box"):
        show(_heading(mark("Push to the hub"), mark("The dry run lists the files first; only those are pushed.")))
        with gr.Row(elem_classes="ft-controls"):
            repo = gr.Textbox(
                label=mark("Repository"), placeholder="OWNER/NAME", max_length=200, elem_id="result-repo", scale=2
            )
            kind = gr.Dropdown(list(_KINDS), value="Adapter", label=mark("What"), elem_id="result-kind", scale=2)
            public = gr.Checkbox(label=mark("Public, else private"), elem_id="result-public", scale=1, container=False)
            look = gr.Button(mark("Dry run"), elem_id="result-dry-run", scale=0)
            push = gr.Button(mark("Push"), elem_id="result-push", scale=0)
        pushed = show(elem_id="result-push-shown")
    merge.click(view.merge, [name, folder], status, **BUTTON)
    gguf.click(view.export, [name, precision, apart], status, **BUTTON)
    look.click(view.dry_run, [name, repo, kind, public], status, **BUTTON)
    push.click(view.push, [name, repo, kind, public], status, **BUTTON)
    return kind, merged, pushed, exported, served


def _heading(title: str, purpose: str = "") -> Callable[[], str]:
    """A section's heading, and what it is for, in the language of each request."""
    return lambda: f"<h2>{tr(title)}</h2>{note(tr(purpose)) if purpose else ''}"


def evaluation(
    score: str, pattern: str, tolerance: float | None, rows: str | None, most: float | None, last: bool
) -> list[str]:
    """The options of `finetune eval` for what was chosen."""
    kind = SCORES[score]
    options = ["--score", kind] if kind else []
    if kind == "regex" and pattern.strip():
        options.append(f"--pattern={pattern.strip()}")
    if kind == "numeric" and tolerance:
        options += ["--tolerance", repr(float(tolerance))]
    if rows == HELD_OUT_BEFORE:
        options.append("--forgetting")
    elif rows and rows != _HELD_OUT:
        options.append(f"--data={rows}")
    if most and most >= 1:
        options += ["--rows", str(int(most))]
    return [*options, "--last"] if last else options


class _View:
    def __init__(self, context: Context) -> None:
        self.context = context

    def fields(self, score: str) -> list[Any]:
        """Show the field that belongs to a score."""
        return [gr.Textbox(visible=SCORES[score] == "regex"), gr.Number(visible=SCORES[score] == "numeric")]

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
        if rows not in (None, _HELD_OUT, HELD_OUT_BEFORE, *local_datasets(self.context.workspace)):
            return note(tr("Choose rows from the list."))
        return self._start(name, "eval", evaluation(score, pattern, tolerance, rows, most, last))

    def merge(self, name: str | None, folder: str) -> str:
        """Start merging the run's adapter, into a folder of the run."""
        run = self.context.workspace.run(name)
        if not _NAME.fullmatch(folder.strip()):
            refused = tr("{name} is not a folder's name", name=repr(folder[:100]))
            return problem(tr("Not started"), [refused], tr("Letters, digits, . - and _"))
        return self._start(name, "merge", [f"--output={run.path / folder.strip()}"] if run else [])

    def export(self, name: str | None, precision: str, apart: bool) -> str:
        """Start exporting to GGUF, which is kept only when llama.cpp gives the adapter's answers."""
        to = ["--to=gguf-adapter"] if apart else []
        return self._start(name, "export", [f"--type={_TYPES.get(precision, 'f16')}", *to])

    def depending(self, name: str | None) -> list[Any]:
        """What can be chosen for a run: its rows, other runs, and what it can push."""
        run, workspace = self.context.workspace.run(name), self.context.workspace
        before = [HELD_OUT_BEFORE] if run is not None and base_adapter_of(run) is not None else []
        names = [other.path.name for other in workspace.list_runs() if other.path.name != name]
        kinds: list[Any] = [*_named(_KINDS), *(_gguf_files(run) if run is not None else [])]
        rows: list[Any] = [*_named([_HELD_OUT, *before]), *local_datasets(workspace)]
        return [
            gr.Dropdown(choices=rows, value=_HELD_OUT),
            gr.Dropdown(choices=names, value=[]), gr.Dropdown(choices=kinds, value="Adapter"),
        ]  # fmt: skip

    def report(self, name: str | None) -> str:
        return self._start(name, "report", [])

    def compare(self, name: str | None, others: list[str] | None) -> str:
        """Write the comparison with other runs, together the report."""
        run, other_runs = self.context.workspace.run(name), [self.context.workspace.run(other) for other in others or []]
        paths = [str(other.path) for other in other_runs if other is not None]
        if not paths:
            return note(tr("Choose the runs to compare with."))
        return self._start(name, "compare", [*paths, f"--output={run.path / 'comparison.html'}"] if run else [])

    def dry_run(self, name: str | None, repo: str, kind: str, public: bool) -> str:
        return self._push(name, repo, kind, public, "--dry-run")

    def push(self, name: str | None, repo: str, kind: str, public: bool) -> str:
        """Push what the last dry run listed, and nothing else."""
        run = self.context.workspace.run(name)
        listed = self.context.tasks.of(run, "push").result() if run is not None else None
        wanted = {"repo": repo.strip(), "kind": _KINDS.get(kind, "gguf"), "public": bool(public), "sent": False}
        if not isinstance(listed, dict) or {key: listed.get(key) for key in wanted} != wanted:
            return note(tr(_DRY_RUN_FIRST))
        if kind not in _KINDS and Path(kind).name not in {file["name"] for file in listed["files"]}:
            return note(tr(_DRY_RUN_FIRST))
        return self._push(name, repo, kind, public, "--yes")

    def _push(self, name: str | None, repo: str, kind: str, public: bool, how: str) -> str:
        run = self.context.workspace.run(name)
        files = _gguf_files(run) if run is not None else []
        if run is None or kind not in (*_KINDS, *files):
            return note(tr("Choose a run, and what to push."))
        try:
            require_repo(repo.strip())
        except FinetuneError as error:
            return problem(tr("Not started"), error.problems, error.fix)
        chosen = [f"--{_KINDS[kind]}"] if kind in _KINDS else [f"--gguf={run.path / kind}"]
        return self._start(name, "push", [repo.strip(), *chosen, *(["--public"] if public else []), how])

    def _start(self, name: str | None, verb: str, options: list[str]) -> str:
        run = self.context.workspace.run(name)
        if run is None:
            return note(tr("Choose a run."))
        try:
            self.context.tasks.start(run, verb, options)
        except FinetuneError as error:
            return problem(tr("Not started"), error.problems, error.fix)
        return ""

    def tick(self, name: str | None, order: str) -> str:
        return fingerprint(name, self.show(name, order))

    def show(self, name: str | None, order: str) -> list[str]:
        """Each command's progress or result."""
        run = self.context.workspace.run(name)
        if run is None:
            return [""] * 6
        tasks = self.context.tasks
        return [
            _evaluations(run, tasks.of(run, "eval"), _ORDERS[order]),
            _reports(run, tasks.of(run, "report"), tasks.of(run, "compare")),
            _task("merge", tasks.of(run, "merge")), _pushed(tasks.of(run, "push")),
            _exported(tasks.of(run, "export")),
            note(tr("Type {command}.", command=f"finetune serve {shlex.quote(run.path.name)}")),
        ]  # fmt: skip


def _evaluations(run: RunDirectory, task: Task, order: str) -> str:
    status, results = task.status(), read_evaluations(run)
    progress = "" if status is None or (status["state"] == "done" and results) else _task("eval", task)
    damaged = unreadable_evaluations(run)
    benchmark = task_table(read_tasks(run)) + (note(damaged) if damaged else "")
    if not results:
        return progress + benchmark or note(tr("Not evaluated yet."))
    written = {name: (run.path / "evaluations" / f"scores-{name}.json").stat().st_mtime for name in results}
    first, *others = sorted(results, key=lambda name: -written[name])
    shown = [f"<h3>{inert(_title(results[first]))}</h3>", scores(results[first], order), forgetting_notes(read_forgetting(run))]
    shown += [
        f"<details><summary>{inert(_title(results[name]))}</summary>{scores(results[name], order)}</details>" for name in others
    ]
    return progress + no_call_note(read_no_call(run)) + "".join(shown) + benchmark


def _title(result: dict[str, Any]) -> str:
    return tr("{score}, {rows}", score=title_of(result["score"]), rows=rows_of(result))


def _reports(run: RunDirectory, report: Task, compare: Task) -> str:
    going = "".join(
        _task(verb, task) for verb, task in (("report", report), ("compare", compare))
        if (status := task.status()) is not None and status["state"] != "done"
    )  # fmt: skip
    files = {"report.html": tr("Download the report"), "comparison.html": tr("Download the comparison")}
    links = [
        f'<a href="/ft/report/{quote(run.path.name)}/{file}" download>{label}</a>'
        for file, label in files.items()
        if (run.path / file).is_file() and " " not in run.path.name  # which the guard of the page's routes does not know
    ]
    return going + (f"<p>{' · '.join(links)}</p>" if links else "" if going else note(tr("Not written yet.")))


def _pushed(task: Task) -> str:
    status, result = task.status(), task.result()
    if status is None or status["state"] != "done" or not isinstance(result, dict) or "files" not in result:
        return _task("push", task)
    rows = [[file["name"], format_bytes(file["bytes"])] for file in result["files"]]
    where = tr("{repo} (public)" if result["public"] else "{repo} (private)", repo=result["repo"])
    summary = tr("For {repo}; nothing was sent yet.", repo=where)
    if result["sent"]:
        summary = tr("Pushed to {repo}: {commit}", repo=where, commit=result["commit"])
    return note(summary) + table([tr("file"), f">{tr('size')}"], rows, tr("Files"), hidden_caption=True)


def _exported(task: Task) -> str:
    status, result = task.status(), task.result()
    if status is None or status["state"] != "done" or not isinstance(result, dict) or "check" not in result:
        return _task("export", task)
    check = result["check"]
    names = {"file": tr("file"), "adapter": tr("adapter"), "modelfile": "Modelfile"}
    files = [[name, result[key]] for key, name in names.items() if result[key]]
    summary = tr(
        "In llama.cpp: token ids are the training's, {n} of {rows} answers the adapter's.",
        n=f"{check['same_answers']:,}", rows=f"{check['rows']:,}",
    )  # fmt: skip
    return note(summary) + table([tr("name"), tr("value")], files, tr("Exported files"), hidden_caption=True)


def _named(names: Iterable[str]) -> list[tuple[str, str]]:
    return [(tr(name), name) for name in names]


def _gguf_files(run: RunDirectory) -> list[str]:
    paths = sorted([*run.path.glob("*.gguf"), *run.path.glob("*/*.gguf")])
    return [path.relative_to(run.path).as_posix() for path in paths]


def _task(verb: str, task: Task) -> str:
    status = task.status()
    if status is None:
        return note(tr("Not run yet."))
    command = f'<p class="ft-mono">{inert(status.get("command", ""))}</p>'
    if status["state"] == "running":
        last = task.log().strip().splitlines()[-1:] or [tr("starting")]
        return f'{command}<p class="ft-note" role="status"><span class="ft-busy"></span> {inert(last[0], 300)}</p>'
    result, failed = task.result(), tr("{action} failed", action=tr(_ACTIONS[verb]))
    if isinstance(result, dict) and "problems" in result:
        return command + problem(failed, result["problems"], result.get("fix", ""))
    if status["state"] == "failed":
        return command + problem(failed, task.log().strip().splitlines()[-5:] or [tr("no output")])
    rows = [[key, value] for key, value in result.items()] if isinstance(result, dict) and verb == "merge" else []
    if not rows:
        return command + note(tr("Done."))
    caption = tr("Result of {action}", action=tr(_ACTIONS[verb]))
    return command + table([tr("name"), tr("value")], rows, caption, hidden_caption=True)
