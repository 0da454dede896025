"""Scores, differences and rows of an evaluation, as HTML."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from finetune.evaluate.paired import format_difference, rank_rows
from finetune.evaluate.results import Forgetting, NoCall, TaskScore, measures, read_evaluations
from finetune.run.directory import RunDirectory

from ..language import current, mark, tr
from .markup import as_on_page, note, table
from .words import minutes

_ROWS_SHOWN = 12
#: Names of scores in a list.
_SHORT = {
    "exact": "EM", "contains": mark("contains"), "regex": mark("regex"), "json": "JSON", "numeric": mark("number"),
    "calls": mark("calls"), "token accuracy": mark("token accuracy"),
}  # fmt: skip
#: Displayed names of figures and scores; a JSON field's score has the field's name.
_TITLES = {
    "exact": mark("exact match"), "contains": mark("contains"), "regex": mark("regular expression"), "json": "JSON",
    "numeric": mark("number"), "calls": mark("tool calls"), "loss": mark("loss"),
    **{title: title for title in (
        mark("exact match"), mark("valid JSON"), mark("loss per trained token"), mark("perplexity"), mark("token accuracy"),
        mark("pairs in order"), mark("margin of a pair, nats"),
    )},
}  # fmt: skip


def scores(result: dict[str, Any], order: str, rows_shown: int = _ROWS_SHOWN) -> str:
    """Return scores, differences and rows of `finetune eval --json`."""
    base, tuned, figures = result["base"], result["tuned"], measures(result)
    rows = [[title_of(figure.title), *figure.values] for figure in figures]
    names = names_of(result)
    summary = table([rows_of(result), *(f">{name}" for name in names)], rows, tr("Base against tuned"), hidden_caption=True)
    differences = "".join(
        note(f"{title_of(figure.title)}: {as_on_page(figure.gap)}") for figure in figures if figure.difference
    )
    first = rank_rows(base["scores"], tuned["scores"], order)[:rows_shown]
    answers = [
        [result["prompts"][row].strip(), result["references"][row], base["answers"][row], tuned["answers"][row],
         f"{base['scores'][row]:.3g}", f"{tuned['scores'][row]:.3g}"]
        for row in first
    ]  # fmt: skip
    columns = [tr("prompt"), tr("expected"), *names, *(f">{tr('{model} score', model=name)}" for name in names)]
    took = tr("Evaluated in {time}.", time=minutes(result["seconds"]))
    if result["reused"]:
        took += f" {tr('{n} results come from an earlier evaluation.', n=format(result['reused'], ','))}"
    return summary + differences + note(took) + (table(columns, answers, tr("Answers")) if answers else "")


def title_of(title: str) -> str:
    """Return a figure's displayed name."""
    return tr(_TITLES[title]) if title in _TITLES else title


def rows_of(result: dict[str, Any]) -> str:
    """Return the number and source of an evaluation's rows."""
    n = f"{result['rows']:,}"
    if result.get("forgetting"):
        return tr("{n} held-out rows of the run it continues", n=n)
    return tr("{n} rows of {data}", n=n, data=result["data"]) if result["data"] else tr("{n} held-out rows", n=n)


def names_of(result: dict[str, Any]) -> tuple[str, str]:
    """Return the names of both models: base and tuned, or before and now."""
    is_continued = result.get("forgetting") or result.get("against_adapter")
    return (tr("before"), tr("now")) if is_continued else (tr("base"), tr("tuned"))


def forgetting_notes(groups: list[Forgetting]) -> str:
    """Return losses before and now on rows of earlier tasks."""
    return "".join(note(as_on_page(group.summary())) for group in groups)


def task_table(tasks: list[TaskScore]) -> str:
    """Return scores of benchmark tasks."""
    lines = [
        [f"{task.task}, {task.metric}", task.rows, _number(task.base), _number(task.tuned),
         as_on_page(format_difference(task.difference)) if task.difference else ""]
        for task in tasks
    ]  # fmt: skip
    columns = [tr("benchmark task"), f">{tr('rows')}", f">{tr('base')}", f">{tr('tuned')}", tr("difference")]
    return table(columns, lines, tr("Benchmark tasks"), hidden_caption=True) if lines else ""


def no_call_note(no_call: NoCall | None) -> str:
    """Return a note on unneeded tool calls; empty if not measured."""
    if no_call is None:
        return ""
    summary = as_on_page(no_call.summary())
    return note(tr("Worse: {summary}", summary=summary) if no_call.is_worse else summary)


def _number(value: float | None) -> str:
    return tr("not measured") if value is None else f"{value:.4f}"


def newest_score(run: RunDirectory) -> str:
    """Return `EM 0 → 97 %`, base and tuned model of the newest evaluation; empty without an evaluation."""
    folder = run.path / "evaluations"
    try:
        return _newest_score(run, folder.stat().st_mtime_ns, current())
    except FileNotFoundError:
        return ""


@lru_cache(1024)
def _newest_score(run: RunDirectory, _changed_ns: int, _language: str) -> str:
    # cached: lists show it again and again, and it is read anew when the folder has changed
    results = read_evaluations(run)
    if not results:
        return ""
    folder = run.path / "evaluations"
    newest = results[max(results, key=lambda name: (folder / f"scores-{name}.json").stat().st_mtime)]
    base, tuned = (_share(newest, model) for model in ("base", "tuned"))
    return f"{tr(_SHORT[newest['score']])} {base} → {tuned} %" if newest["score"] in _SHORT and base and tuned else ""


def _share(result: dict[str, Any], model: str) -> str:
    score = result[model].get("score")
    share = result[model].get("exact_match") if score is None or result["score"] == "exact" else score
    return "" if share is None else f"{100 * share:.3g}"
