"""Runs: table, comparison and queue."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from finetune.errors import CommandError, FinetuneError
from finetune.run.control import delete_run, rename_run
from finetune.run.directory import RunDirectory

from ..background import starts
from ..language import mark, tr
from ..views.markup import chart_element, note, problem, problem_of, render
from ..views.run import pill
from ..views.runs import arm_name, comparison, row_of, state_of_sweep
from ..views.words import clock
from ..web.followed import FollowedPage, duplicate

_MOST_COMPARED = 5
_MOST_ROWS = 200


class RunsPage(FollowedPage):
    """Page of runs; runs.js has search, filters and selection."""

    name = "runs"

    def html(self, query: Mapping[str, str]) -> str:
        return render("runs", parts={})

    def parts(self) -> dict[str, str]:
        workspace = self.context.workspace
        deadline_s = time.monotonic() + 0.5  # later requests read the rest of a long history
        rows, damaged = [], ""
        for run in workspace.list_runs()[:_MOST_ROWS]:
            try:
                rows.append(row_of(self.context.lives.follow(run), min(0.05, deadline_s - time.monotonic())))
            except (FinetuneError, OSError, ValueError) as error:  # the remaining runs are shown
                damaged += problem_of(error)
        started = [(start.path.name, start.view()) for start in reversed(starts(workspace))]
        entries = [
            # the name begins with nanoseconds
            {"name": name, "status": view, "time": clock(int(name.partition("-")[0]) / 1e9)} for name, view in started
            if view["state"] != "started"
        ]  # fmt: skip
        return {
            "list": damaged + render("runs_table", rows=rows, pill=pill),
            "sweeps": render("sweeps", sweeps=workspace.list_sweeps()[:_MOST_ROWS], state=state_of_sweep, arm_name=arm_name),
            "queue": render("queue", entries=entries),
        }

    def act(self, message: Mapping[str, Any]) -> dict[str, str]:
        names = message.get("runs", ())
        runs = [run for name in names if (run := self.context.workspace.run(name))]
        if len(runs) < len(names):
            raise CommandError("there is no such run", "It was renamed or deleted. Choose a run from the list.")
        match message, runs:
            case {"deed": "compare"}, _:
                return {"compared": self.compare(runs)}
            case {"deed": "rename", "name": str(name)}, [run]:
                renamed = rename_run(run, name)
                self.context.lives.pop(run.path, None)
                return {"said": note(tr("{run} is now called {name}.", run=run.path.name, name=renamed.path.name))}
            case {"deed": "duplicate"}, [run]:
                return {"said": duplicate(self.context, run)}
            case {"deed": "delete"}, [_, *_]:
                return {"said": self._delete(runs)}
            case {"cancel": str(name)}, _:
                is_removed = any(start.cancel() for start in starts(self.context.workspace) if start.path.name == name)
                return {"said": note(tr("Removed." if is_removed else "It is no longer waiting."))}
        raise KeyError(message)

    def compare(self, runs: list[RunDirectory]) -> str:
        if len(runs) < 2:
            return note(tr("Choose two runs or more to compare them."))
        lives = [self.context.lives.follow(run) for run in runs[:_MOST_COMPARED]]
        rows = [row_of(live) for live in lives]
        element = chart_element([live.run.path.name for live in lives])
        fewer = note(tr("The first {n} are compared.", n=_MOST_COMPARED)) if len(runs) > _MOST_COMPARED else ""
        return f'<section class="ft-box"><h2>{tr("Compared")}</h2>{fewer}{comparison(lives, element, rows)}</section>'

    def _delete(self, runs: list[RunDirectory]) -> str:
        answer = ""
        for run in runs:
            try:
                folder = delete_run(run)
            except FinetuneError as error:
                answer += problem(tr("Not deleted"), error.problems, error.fix)
                continue
            self.context.lives.pop(run.path, None)
            template = mark("Deleted {run}. To restore it, move {folder} to {path}.")
            answer += note(tr(template, run=run.path.name, folder=folder, path=run.path))
        return answer
