"""Run: one run in tabs, with the commands of Answers and Use it, or a sweep."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException, Response
from fastapi.responses import FileResponse

from finetune.errors import CommandError, FinetuneError
from finetune.evaluate.results import read_evaluations
from finetune.export import GGUF_TYPES
from finetune.run import control
from finetune.run.directory import RunDirectory
from finetune.run.state import is_alive

from ..background import Task, resume_run, task_of
from ..draft import local_datasets
from ..language import mark, tr
from ..views import run as run_view
from ..views.answers import evaluations
from ..views.charts import chart_data
from ..views.markup import Safe, note, page_title, problem_of, render
from ..views.runs import arms, sweep_page
from ..web.followed import Context, attempted, changed_parts, duplicate
from . import chat

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


class RunPage:
    """Page and routes of a run."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def html(self, query: Mapping[str, str]) -> str:
        name, tab = query.get("run"), query.get("tab", "")
        tab = tab if tab in run_view.TABS else "overview"
        if (sweep := self.context.workspace.sweep(name)) is not None:
            return sweep_page(sweep, tab)
        run = self.context.workspace.run(name)
        if run is None:
            # these tabs need an adapter; the others prefer a running run; else the newest
            is_wanted = chat.has_adapter if tab in ("answers", "chat", "use") else is_alive
            runs = self.context.workspace.list_runs()
            if not runs:
                return render("run_none")
            run = next(filter(is_wanted, runs), runs[0])
        live = self.context.lives.follow(run)
        try:
            parts, chat_pane = self.parts(run, tab), chat.pane(live.plan())
        except (FinetuneError, OSError, ValueError) as error:  # a damaged plan
            return page_title(run.path.name) + problem_of(error)
        return run_view.page(live, tab, {**forms(self.context, run), "chat": chat_pane}, parts)

    def parts(self, run: RunDirectory, tab: str, order: str = "differ") -> dict[str, str]:
        """Return the HTML of head and tab by part."""
        parts = run_view.html_parts(self.context.lives.follow(run), tab)
        if tab in ("answers", "use"):
            parts |= result_parts(self.context, run, tab, order)
        elif tab == "chat":
            parts |= chat.parts(self.context, run)
        return parts

    def changed(self, name: str, tab: str = "", shown: str = "", order: str = "differ") -> dict[str, Any]:
        """Return whether the run goes on, and the parts not in `shown`."""
        if tab not in run_view.TABS or order not in ROW_ORDERS:
            raise HTTPException(400, f"Unknown tab {tab!r} or order {order!r}; reload the page.")
        if (sweep := self.context.workspace.sweep(name)) is not None:
            parts, goes_on = {"arms": arms(sweep)}, not sweep.is_finished  # a sweep has no tabs
        else:
            run = self._named_run(name)
            parts, goes_on = self.parts(run, tab, order), not self.context.lives.follow(run).state().ended
        return {"alive": goes_on, "parts": changed_parts(parts, shown)}

    def points(self, name: str, have: str = "") -> dict[str, Any]:
        """Return chart data newer than `have`, the key of the last answer."""
        return chart_data(self.context.lives.follow(self._named_run(name)), have)

    def act(self, name: str, message: Mapping[str, Any]) -> dict[str, str]:
        """Handle a button's or form's message; return HTML by part."""
        run = self._named_run(name)
        return attempted(lambda sent: self._act(run, sent), message)

    def _act(self, run: RunDirectory, message: Mapping[str, Any]) -> dict[str, str]:
        context, values, note_html = self.context, message.get("values") or {}, ""
        match message:
            case {"run": "pause" | "kill" as deed}:
                note_html = "" if control.stop(run, now=deed == "kill") else note(tr("This run is not running."))
            case {"run": "finish"}:
                ends = tr("The run ends after this step. Its best step is the result.")
                note_html = note(ends if control.finish(run) else tr("This run is not running."))
            case {"run": "resume"}:
                resume_run(context.workspace, run)
                note_html = note(tr("Queued. The run continues from its newest checkpoint."))
            case {"run": "duplicate"}:
                note_html = duplicate(context, run)
            case {"task": "ask"}:
                chat.ask(context, run, values)
            case {"task": "picture"}:
                return chat.add_picture(context, values["path"], values["waiting"])
            case {"task": "stop"}:
                context.chats.stop(run)
            case {"task": "clear"}:
                context.chats.clear(run)
            case {"task": str(verb)}:
                start_command(context, run, verb, values)
            case _:
                raise KeyError(message)
        return {"said": note_html}

    def report(self, name: str, file: str) -> Response:
        path = self._named_run(name).path / file
        if file not in ("report.html", "comparison.html") or not path.is_file() or path.is_symlink():
            raise HTTPException(404, "There is no report.")
        # a download: a run folder's HTML must not run on this page's origin
        return FileResponse(path, media_type="text/html", filename=f"{name}-{file}", content_disposition_type="attachment")

    def _named_run(self, name: str) -> RunDirectory:
        if (run := self.context.workspace.run(name)) is None:
            raise HTTPException(404, "There is no such run.")
        return run

    def add_routes(self, api: Any) -> None:
        api.get("/ft/report/{name}/{file}")(self.report)
        api.get("/ft/run/{name}")(self.changed)
        api.get("/ft/series/{name}")(self.points)
        api.post("/ft/run/{name}")(self.act)


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


def result_parts(context: Context, run: RunDirectory, tab: str, order: str) -> dict[str, str]:
    """Return progress and results of a tab's commands by part."""
    if tab == "use":
        return {part: _task_html(verb, task_of(context.workspace, run, verb)) for part, verb in _COMMAND_OF_PART.items()}
    task, report, compare = (task_of(context.workspace, run, verb) for verb in ("eval", "report", "compare"))
    status = task.status()
    is_over = status is None or (status["state"] == "done" and read_evaluations(run))
    progress = None if is_over else _task_html("eval", task)
    evaluations_html = evaluations(run, order, progress=progress, empty=tr("Not evaluated yet."))
    return {"evaluations": evaluations_html, "reports": _reports_html(run, report, compare)}


def start_command(context: Context, run: RunDirectory, verb: str, values: Mapping[str, Any]) -> None:
    """Start a form's command, which checks its options. Raises CommandError or KeyError."""
    score = values.get("score", "")
    if score not in [*SCORES]:  # such as FILE.py:FUNCTION: a click must not run a file's code
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
