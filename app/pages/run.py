"""Run: one run in tabs, or a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException, Response
from fastapi.responses import FileResponse

from finetune.errors import FinetuneError
from finetune.run import control
from finetune.run.directory import RunDirectory
from finetune.run.state import is_alive

from ..background import resume_run
from ..language import tr
from ..views import run as run_view
from ..views.charts import chart_data
from ..views.markup import note, page_title, problem_of, render
from ..views.runs import arms, sweep_page
from ..web.followed import Context, attempted, changed_parts, duplicate, named_run
from . import chat, result


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
        return run_view.page(live, tab, {**result.forms(self.context, run), "chat": chat_pane}, parts)

    def parts(self, run: RunDirectory, tab: str, order: str = "differ") -> dict[str, str]:
        """Return the HTML of head and tab by part."""
        parts = run_view.html_parts(self.context.lives.follow(run), tab)
        if tab in ("answers", "use"):
            parts |= result.parts(self.context, run, tab, order)
        elif tab == "chat":
            parts |= chat.parts(self.context, run)
        return parts

    def changed(self, name: str, tab: str = "", shown: str = "", order: str = "differ") -> dict[str, Any]:
        """Return whether the run goes on, and the parts not in `shown`."""
        if tab not in run_view.TABS or order not in result.ROW_ORDERS:
            raise HTTPException(400, f"Unknown tab {tab!r} or order {order!r}; reload the page.")
        if (sweep := self.context.workspace.sweep(name)) is not None:
            parts, goes_on = {"arms": arms(sweep)}, not sweep.is_finished  # a sweep has no tabs
        else:
            run = named_run(self.context, name)
            parts, goes_on = self.parts(run, tab, order), not self.context.lives.follow(run).state().ended
        return {"alive": goes_on, "parts": changed_parts(parts, shown)}

    def points(self, name: str, have: str = "") -> dict[str, Any]:
        """Return chart data newer than `have`, the key of the last answer."""
        return chart_data(self.context.lives.follow(named_run(self.context, name)), have)

    def act(self, name: str, message: Mapping[str, Any]) -> dict[str, str]:
        """Handle a button's or form's message; return HTML by part."""
        run = named_run(self.context, name)
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
                result.start(context, run, verb, values)
            case _:
                raise KeyError(message)
        return {"said": note_html}

    def report(self, name: str, file: str) -> Response:
        path = named_run(self.context, name).path / file
        if file not in ("report.html", "comparison.html") or not path.is_file() or path.is_symlink():
            raise HTTPException(404, "There is no report.")
        # a download: a run folder's HTML must not run on this page's origin
        return FileResponse(path, media_type="text/html", filename=f"{name}-{file}", content_disposition_type="attachment")

    def add_routes(self, api: Any) -> None:
        api.get("/ft/report/{name}/{file}")(self.report)
        api.get("/ft/run/{name}")(self.changed)
        api.get("/ft/series/{name}")(self.points)
        api.post("/ft/run/{name}")(self.act)
