"""Tabs Answers and Use it of a run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from finetune.errors import CommandError
from finetune.evaluate.results import read_evaluations
from finetune.export.targets import GGUF_TYPES
from finetune.hub import require_repo_id
from finetune.run.directory import RunDirectory

from ..background import Task, task_of
from ..language import mark, tr
from ..planning.catalogue import local_datasets
from ..views.answers import evaluations
from ..views.markup import HELD_OUT_BEFORE, SCORES, Safe, render
from ..web.followed import Context

_KINDS = {"adapter": mark("Adapter"), "merged": mark("Merged model")}
ORDERS = {
    "differ": mark("Differing first"), "worst": mark("Worst tuned answers first"), "best": mark("Best tuned answers first")
}  # fmt: skip
#: Choice of the held-out rows of the adapter's run; an option, so no dataset has this name.
BEFORE = "--forgetting"
#: Commands by the part of the page with their result.
_PARTS = {"merged": "merge", "exported": "export", "pushed": "push"}
_NAME = re.compile(r"[^\W_][\w.-]{0,98}")


def evaluate_pane(context: Context, run: RunDirectory) -> str:
    """Return the forms of Answers."""
    from finetune.run.base_adapter import base_adapter_of  # here: imports stay at most ten deep

    before = [(BEFORE, tr(HELD_OUT_BEFORE))] if base_adapter_of(run) else []
    return render(
        "evaluate", scores=[(value, tr(label)) for label, value in SCORES.items()],
        rows=[("", tr("held-out rows")), *before, *((path, path) for path in local_datasets(context.workspace))],
        orders=[(name, tr(label)) for name, label in ORDERS.items()],
        others=[other.path.name for other in context.workspace.list_runs() if other.path.name != run.path.name],
    )  # fmt: skip


def use_pane(run: RunDirectory) -> str:
    """Return the forms of Use it."""
    kinds = [*((name, tr(label)) for name, label in _KINDS.items()), *((path, path) for path in _gguf_files(run))]
    types = [(name, gguf.label) for name, gguf in GGUF_TYPES.items()]
    return render("use", kinds=kinds, types=types, serve=f"finetune serve {shlex.quote(run.path.name)}")


def parts(context: Context, run: RunDirectory, tab: str, order: str) -> dict[str, str]:
    """Return the progress or result of a tab's commands."""
    if tab == "use":
        return {part: _task(verb, task_of(context.workspace, run, verb)) for part, verb in _PARTS.items()}
    task, report, compare = (task_of(context.workspace, run, verb) for verb in ("eval", "report", "compare"))
    status = task.status()
    is_shown = status is None or (status["state"] == "done" and read_evaluations(run))
    shown = evaluations(run, order, progress=None if is_shown else _task("eval", task), empty=tr("Not evaluated yet."))
    return {"evaluations": shown, "reports": _reports(run, report, compare)}


def start(context: Context, run: RunDirectory, verb: str, values: Mapping[str, Any]) -> None:
    """Start a form's command. Raises CommandError, ValueError or KeyError."""
    task_of(context.workspace, run, verb).begin(verb, str(run.path), *_OPTIONS[verb](context, run, values), "--json")


def _evaluation(context: Context, run: RunDirectory, values: Mapping[str, Any]) -> list[str]:
    if values["rows"] not in ("", BEFORE, *local_datasets(context.workspace)):
        raise CommandError(tr("Choose rows from the list."))
    score, pattern, rows = values["score"], values["pattern"].strip(), values["rows"]
    if score not in SCORES.values():
        raise ValueError(score)
    options = ["--score", score] if score else []
    if score == "regex" and pattern:
        options.append(f"--pattern={pattern}")
    if score == "numeric" and (tolerance := float(values["tolerance"] or 0)):
        options += ["--tolerance", repr(tolerance)]
    options += [BEFORE] if rows == BEFORE else [f"--data={rows}"] if rows else []
    if most := int(values["most"] or 0):
        options += ["--rows", str(most)]
    return [*options, "--last"] if "last" in values else options


def _merge(context: Context, run: RunDirectory, values: Mapping[str, Any]) -> list[str]:
    folder = values["folder"].strip()
    if not _NAME.fullmatch(folder):
        refused = tr("{name} is not a valid folder name", name=repr(folder[:100]))
        raise CommandError(refused, tr("Use letters, digits, `.`, `-` and `_`."))
    return [f"--output={run.path / folder}"]


def _export(context: Context, run: RunDirectory, values: Mapping[str, Any]) -> list[str]:
    if (name := values["type"]) not in GGUF_TYPES:
        raise ValueError(name)
    return [f"--type={name}", *(["--to=gguf-adapter"] if "apart" in values else [])]


def _comparison(context: Context, run: RunDirectory, values: Mapping[str, Any]) -> list[str]:
    chosen = values.get("others", [])
    others = [context.workspace.run(name) for name in ([chosen] if isinstance(chosen, str) else chosen)]
    paths = [str(other.path) for other in others if other is not None]
    if not paths:
        raise CommandError(tr("Choose the runs to compare with."))
    return [*paths, f"--output={run.path / 'comparison.html'}"]


def _push(context: Context, run: RunDirectory, values: Mapping[str, Any]) -> list[str]:
    repo, kind, how, is_public = values["repo"].strip(), values["kind"], values["how"], "public" in values
    if how not in ("--dry-run", "--yes"):
        raise ValueError(how)
    if kind not in (*_KINDS, *_gguf_files(run)):
        raise CommandError(tr("Choose what to push."))
    require_repo_id(repo)
    # only files that the last dry run listed are pushed
    if how == "--yes":
        listed, named = task_of(context.workspace, run, "push").result() or {}, kind if kind in _KINDS else "gguf"
        wanted = {"repo": repo, "kind": named, "public": is_public, "sent": False}
        is_listed = {key: listed.get(key) for key in wanted} == wanted
        if not is_listed or (named == "gguf" and Path(kind).name not in {file["name"] for file in listed["files"]}):
            raise CommandError(tr("Press Dry run first to see the files."))
    chosen = f"--{kind}" if kind in _KINDS else f"--gguf={run.path / kind}"
    return [repo, chosen, *(["--public"] if is_public else []), how]


_OPTIONS: dict[str, Callable[[Context, RunDirectory, Mapping[str, Any]], list[str]]] = {
    "eval": _evaluation, "merge": _merge, "export": _export, "report": lambda *_: [], "compare": _comparison, "push": _push
}  # fmt: skip


def _reports(run: RunDirectory, report: Task, compare: Task) -> str:
    going = "".join(
        _task(verb, task) for verb, task in (("report", report), ("compare", compare))
        if (status := task.status()) is not None and status["state"] != "done"
    )  # fmt: skip
    files = {"report.html": tr("Download the report"), "comparison.html": tr("Download the comparison")}
    there = {file: label for file, label in files.items() if (run.path / file).is_file()}
    return going + render("reports", run=run.path.name, files=there, is_going=bool(going))


def _gguf_files(run: RunDirectory) -> list[str]:
    paths = sorted([*run.path.glob("*.gguf"), *run.path.glob("*/*.gguf")])
    return [path.relative_to(run.path).as_posix() for path in paths]


def _task(verb: str, task: Task) -> Safe:
    status, lines = task.status(), task.output().strip().splitlines()
    is_done = status is not None and status["state"] == "done"
    return render("task", verb=verb, status=status, lines=lines, is_done=is_done, result=task.result() or {})
