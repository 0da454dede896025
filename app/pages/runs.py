"""Runs: table, comparison, queue and trash; adapters and other models."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from finetune.errors import CommandError, FinetuneError
from finetune.run.control import delete_run, deleted_runs, rename_run, restore_run
from finetune.run.directory import RunDirectory
from finetune.units import format_bytes

from ..language import tr
from ..live import LiveRun
from ..views.answers import newest_score
from ..views.markup import TO_NEW_RUN, chart_element, note, page_title, problem, problem_of, render
from ..views.run import pill
from ..views.runs import comparison, row_of, state_of_sweep, sweep_sentence
from ..views.words import clock
from ..web.followed import Context, FollowedPage

_MOST_COMPARED = 5
_LISTED = 200


class RunsPage(FollowedPage):
    """Page of runs."""

    # search, filters and selection live in runs.js
    name = "runs"

    def html(self, query: Mapping[str, str]) -> str:
        return render("runs", parts={})

    def parts(self) -> dict[str, str]:
        self.context.queue.ensure_starter()
        workspace = self.context.workspace
        end_s = time.monotonic() + 0.5  # a long history is read on in the next answers
        rows, damaged = facts_of_runs(self.context, lambda live: [row_of(live, min(0.05, end_s - time.monotonic()))])
        return {
            "list": damaged + render("runs_table", rows=rows, pill=pill),
            "sweeps": render("sweeps", sweeps=workspace.list_sweeps()[:_LISTED], state_of=state_of_sweep, say=sweep_sentence),
            "queue": render("queue", entries=self._entries()),
            "trash": render("trash", deleted=deleted_runs(workspace.runs)[:_LISTED]),
        }

    def _entries(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = []
        for entry in reversed(self.context.queue.entries()):
            status, name = entry.status(), entry.path.name
            if status["state"] != "started":
                # the name begins with nanoseconds
                entries.append({"name": name, "status": status, "time": clock(int(name.partition("-")[0]) / 1e9)})
        return entries

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
                self.context.draft.write(run.recipe.read_text(encoding="utf-8"))
                return {"said": note(tr("Opening New run with this run's recipe."), attributes=TO_NEW_RUN)}
            case {"deed": "delete"}, [_, *_]:
                return {"said": self._delete(runs)}
            case {"restore": [*folders]}, _:
                names = [restore_run(self.context.workspace.runs, str(folder)).path.name for folder in folders]
                return {"said": note(tr("Restored {runs}.", runs=", ".join(names)), "ok")}
            case {"cancel": str(name)}, _:
                is_removed = self.context.queue.cancel(name)
                return {"said": note(tr("Removed." if is_removed else "It is no longer waiting."))}
        raise KeyError(message)

    def compare(self, runs: list[RunDirectory]) -> str:
        if len(runs) < 2:
            return note(tr("Choose two runs or more to compare them."))
        lives = [self.context.lives.of(run) for run in runs[:_MOST_COMPARED]]
        rows = [row_of(live) for live in lives]
        element = chart_element([live.run.path.name for live in lives])
        fewer = note(tr("The first {n} are compared.", n=_MOST_COMPARED)) if len(runs) > _MOST_COMPARED else ""
        return f'<section class="ft-box"><h2>{tr("Compared")}</h2>{fewer}{comparison(lives, element, rows)}</section>'

    def _delete(self, runs: list[RunDirectory]) -> str:
        deleted, refused = [], ""
        for run in runs:
            try:
                deleted.append((run.path.name, delete_run(run)))
            except FinetuneError as error:
                refused += problem(tr("Not deleted"), error.problems, error.fix)
                continue
            self.context.lives.pop(run.path, None)
        return refused + render("undo", deleted=deleted, folders=[folder.name for _, folder in deleted])


class ModelsPage(FollowedPage):
    """Page of models."""

    name, part_names, every_ms = "models", ("list",), 5000

    def before(self) -> str:
        return page_title("Models")

    def parts(self) -> dict[str, str]:
        models, damaged = facts_of_runs(self.context, models_of)
        return {"list": damaged + render("models", models=models, shown=self.context.workspace.shown)}


Facts = dict[str, Any]


def facts_of_runs(context: Context, facts_of: Callable[[LiveRun], Iterable[Facts]]) -> tuple[list[Facts], str]:
    """Return facts of the newest runs, and the errors of damaged runs."""
    facts, damaged = list[Facts](), ""
    for run in context.workspace.list_runs()[:_LISTED]:
        try:
            facts += facts_of(context.lives.of(run))
        except (FinetuneError, OSError, ValueError) as error:  # the remaining runs are shown
            damaged += problem_of(error)
    return facts, damaged


def models_of(live: LiveRun) -> list[Facts]:
    """Return kind, path and size of a run's adapter, merged models and GGUF files."""
    run, models = live.run, list[Facts]()
    if run.adapter.is_dir():
        models.append({"kind": tr("adapter"), "path": run.adapter, "size": _size(run.adapter), "score": newest_score(run)})
    for config in sorted(run.path.glob("*/config.json")):
        if any(config.parent.glob("*.safetensors")):
            models.append({"kind": tr("merged model"), "path": config.parent, "size": _size(config.parent)})
    for path in sorted([*run.path.glob("*.gguf"), *run.path.glob("*/*.gguf")]):
        models.append({"kind": "GGUF", "path": path, "size": format_bytes(path.stat().st_size)})
    base = Path(live.plan().settings.model_name_or_path).name
    return [{**model, "run": run.path.name, "base": base} for model in models]


def _size(folder: Path) -> str:
    return format_bytes(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
