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
from ..views.markup import Safe, render
from ..web.followed import Context

#: Values of `finetune eval --score` by the page's label.
SCORES = {
    mark("Chosen by the answers"): "", mark("Exact match"): "exact", mark("Contains the expected answer"): "contains",
    mark("Regular expression"): "regex", mark("JSON, field by field"): "json", mark("Last number"): "numeric",
    mark("Calls of tools"): "calls", mark("Token accuracy"): "tokens", mark("Loss only, no answers"): "loss",
}  # fmt: skip
_PUSH_KINDS = {"adapter": mark("Adapter"), "merged": mark("Merged model")}
ROW_ORDERS = {
    "differ": mark("Differing first"), "worst": mark("Worst tuned answers first"), "best": mark("Best tuned answers first")
}  # fmt: skip
_COMMAND_OF_PART = {"merged": "merge", "exported": "export", "pushed": "push"}
_FOLDER_NAME = re.compile(r"[^\W_][\w.-]{0,98}")  # without separators and leading dots


def evaluate_pane(context: Context, run: RunDirectory) -> str:
    """Return the forms of Answers."""
    return render(
        "evaluate", scores=[(value, tr(label)) for label, value in SCORES.items()],
        rows=[("", tr("held-out rows")), *((path, path) for path in local_datasets(context.workspace))],
        orders=[(name, tr(label)) for name, label in ROW_ORDERS.items()],
        others=[other.path.name for other in context.workspace.list_runs() if other.path.name != run.path.name],
    )  # fmt: skip


def use_pane(run: RunDirectory) -> str:
    """Return the forms of Use it."""
    kinds = [*((name, tr(label)) for name, label in _PUSH_KINDS.items()), *((path, path) for path in _gguf_files(run))]
    types = [(name, gguf.label) for name, gguf in GGUF_TYPES.items()]
    return render("use", kinds=kinds, types=types, serve=f"finetune serve {shlex.quote(run.path.name)}")


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
    """Start a form's command. Raises CommandError, ValueError or KeyError."""
    task_of(context.workspace, run, verb).begin(verb, str(run.path), *_OPTIONS_OF_COMMAND[verb](context, run, values), "--json")


def _eval_options(context: Context, run: RunDirectory, values: Mapping[str, Any]) -> list[str]:
    score, pattern, rows = values["score"], values["pattern"].strip(), values["rows"]
    if rows not in ("", *local_datasets(context.workspace)):
        raise CommandError(tr("Choose rows from the list."))
    if score not in SCORES.values():
        raise ValueError(score)
    options = ["--score", score] if score else []
    if score == "regex" and pattern:
        options.append(f"--pattern={pattern}")
    if score == "numeric" and (tolerance := float(values["tolerance"] or 0)):
        options += ["--tolerance", repr(tolerance)]
    if rows:
        options.append(f"--data={rows}")
    if most := int(values["most"] or 0):
        options += ["--rows", str(most)]
    return options


def _merge_options(context: Context, run: RunDirectory, values: Mapping[str, Any]) -> list[str]:
    folder = values["folder"].strip()
    if not _FOLDER_NAME.fullmatch(folder):
        refused = tr("{name} is not a valid folder name", name=repr(folder[:100]))
        raise CommandError(refused, tr("Use letters, digits, `.`, `-` and `_`."))
    return [f"--output={run.path / folder}"]


def _export_options(context: Context, run: RunDirectory, values: Mapping[str, Any]) -> list[str]:
    if (name := values["type"]) not in GGUF_TYPES:
        raise ValueError(name)
    return [f"--type={name}", *(["--to=gguf-adapter"] if "apart" in values else [])]


def _compare_options(context: Context, run: RunDirectory, values: Mapping[str, Any]) -> list[str]:
    chosen = values.get("others", [])
    others = [context.workspace.run(name) for name in ([chosen] if isinstance(chosen, str) else chosen)]
    paths = [str(other.path) for other in others if other is not None]
    if not paths:
        raise CommandError(tr("Choose the runs to compare with."))
    return [*paths, f"--output={run.path / 'comparison.html'}"]


def _push_options(context: Context, run: RunDirectory, values: Mapping[str, Any]) -> list[str]:
    repo, kind, how = values["repo"].strip(), values["kind"], values["how"]
    if how not in ("--dry-run", "--yes"):
        raise ValueError(how)
    if kind not in (*_PUSH_KINDS, *_gguf_files(run)):
        raise CommandError(tr("Choose what to push."))
    require_repo_id(repo)
    # only files that the last dry run listed are pushed
    if how == "--yes":
        dry_run = task_of(context.workspace, run, "push").result() or {}
        expected = {"repo": repo, "kind": kind if kind in _PUSH_KINDS else "gguf", "public": "public" in values, "sent": False}
        is_listed = {key: dry_run.get(key) for key in expected} == expected
        if not is_listed or (kind not in _PUSH_KINDS and Path(kind).name not in {file["name"] for file in dry_run["files"]}):
            raise CommandError(tr("Press Dry run first to see the files."))
    chosen = f"--{kind}" if kind in _PUSH_KINDS else f"--gguf={run.path / kind}"
    return [repo, chosen, "--public", how] if "public" in values else [repo, chosen, how]


_OPTIONS_OF_COMMAND: dict[str, Callable[[Context, RunDirectory, Mapping[str, Any]], list[str]]] = {
    "eval": _eval_options, "merge": _merge_options, "export": _export_options, "report": lambda *_: [],
    "compare": _compare_options, "push": _push_options,
}  # fmt: skip


def _reports_html(run: RunDirectory, report: Task, compare: Task) -> str:
    progress = "".join(
        _task_html(verb, task) for verb, task in (("report", report), ("compare", compare))
        if (status := task.status()) is not None and status["state"] != "done"
    )  # fmt: skip
    files = {"report.html": tr("Download the report"), "comparison.html": tr("Download the comparison")}
    written = {file: label for file, label in files.items() if (run.path / file).is_file()}
    return progress + render("reports", run=run.path.name, files=written, is_being_written=bool(progress))


def _gguf_files(run: RunDirectory) -> list[str]:
    paths = sorted([*run.path.glob("*.gguf"), *run.path.glob("*/*.gguf")])
    return [path.relative_to(run.path).as_posix() for path in paths]


def _task_html(verb: str, task: Task) -> Safe:
    status, lines = task.status(), task.output().strip().splitlines()
    is_done = status is not None and status["state"] == "done"
    return render("task", verb=verb, status=status, lines=lines, is_done=is_done, result=task.result() or {})
