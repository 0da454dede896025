"""Tabs Answers and Use it of a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from finetune.errors import CommandError
from finetune.evaluate.results import read_evaluations
from finetune.export.targets import GGUF_TYPES
from finetune.run.directory import RunDirectory

from ..background import Task, task_of
from ..draft import local_datasets
from ..language import mark, tr
from ..views.answers import evaluations
from ..views.markup import Safe, render
from ..web.followed import Context

#: Labels of the page by value of `finetune eval --score`.
SCORES = mark({
    "": "Chosen by the answers", "exact": "Exact match", "contains": "Contains the expected answer",
    "regex": "Regular expression", "json": "JSON, field by field", "numeric": "Last number",
    "calls": "Calls of tools", "tokens": "Token accuracy", "loss": "Loss only, no answers",
})  # fmt: skip
ROW_ORDERS = mark({
    "differ": "Differing first", "worst": "Worst tuned answers first", "best": "Best tuned answers first"
})  # fmt: skip
_COMMAND_OF_PART = {"merged": "merge", "exported": "export"}
#: Options by command and form field; a checkbox has no value.
_OPTIONS = {
    "eval": {name: f"--{name}={{}}" for name in ("score", "pattern", "tolerance", "rows", "data")},
    "export": {"type": "--type={}", "to": "--to=gguf-adapter"}, "merge": {}, "report": {},
}  # fmt: skip
_SCORE_OF_FIELD = {"pattern": "regex", "tolerance": "numeric"}  # shown, and sent, with this score only


def forms(context: Context, run: RunDirectory) -> dict[str, str]:
    """Return the forms by tab."""
    answers = render(
        "evaluate", scores=[(value, tr(label)) for value, label in SCORES.items()],
        rows=[("", tr("held-out rows")), *((path, path) for path in local_datasets(context.workspace))],
        orders=[(name, tr(label)) for name, label in ROW_ORDERS.items()],
        others=[other.path.name for other in context.workspace.list_runs() if other.path.name != run.path.name],
    )  # fmt: skip
    types = [(name, gguf.label) for name, gguf in GGUF_TYPES.items()]
    return {"answers": answers, "use": render("use", types=types, run=shlex.quote(run.path.name))}


def parts(context: Context, run: RunDirectory, tab: str, order: str) -> dict[str, str]:
    """Return progress and results of a tab's commands by part."""
    if tab == "use":
        return {part: _task_html(verb, task_of(context.workspace, run, verb)) for part, verb in _COMMAND_OF_PART.items()}
    task, report, compare = (task_of(context.workspace, run, verb) for verb in ("eval", "report", "compare"))
    status = task.status()
    is_over = status is None or (status["state"] == "done" and read_evaluations(run))
    progress = None if is_over else _task_html("eval", task)
    evaluations_html = evaluations(run, order, progress=progress, empty=tr("Not evaluated yet."))
    return {"evaluations": evaluations_html, "reports": _reports_html(run, report, compare)}


def start(context: Context, run: RunDirectory, verb: str, values: Mapping[str, Any]) -> None:
    """Start a form's command, which checks its options. Raises CommandError or KeyError."""
    score = values.get("score", "")
    if score not in SCORES:  # as FILE.py:FUNCTION: a click must not run a file's code
        raise CommandError(f"{score!r} is not a score of this page")
    if verb == "compare":
        chosen = values.get("others", [])
        others = [context.workspace.run(name) for name in ([chosen] if isinstance(chosen, str) else chosen)]
        options = [str(other.path) for other in others if other is not None]
        if not options:
            raise CommandError(tr("Choose the runs to compare with."))
        options.append(f"--output={run.path / 'comparison.html'}")
    else:
        wanted = {name: value for name, value in values.items() if value and _SCORE_OF_FIELD.get(name, score) == score}
        options = [option.format(wanted[name]) for name, option in _OPTIONS[verb].items() if name in wanted]
    task_of(context.workspace, run, verb).begin(verb, str(run.path), *options, "--json")


def _reports_html(run: RunDirectory, report: Task, compare: Task) -> str:
    progress = "".join(
        _task_html(verb, task) for verb, task in (("report", report), ("compare", compare))
        if (status := task.status()) is not None and status["state"] != "done"
    )  # fmt: skip
    files = {"report.html": tr("Download the report"), "comparison.html": tr("Download the comparison")}
    written = {file: label for file, label in files.items() if (run.path / file).is_file()}
    return progress + render("reports", run=run.path.name, files=written, is_being_written=bool(progress))


def _task_html(verb: str, task: Task) -> Safe:
    status, lines = task.status(), task.output().strip().splitlines()
    is_done = status is not None and status["state"] == "done"
    return render("task", verb=verb, status=status, lines=lines, is_done=is_done, result=task.result() or {})
