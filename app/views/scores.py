"""An evaluation's scores, differences and rows, as HTML."""

from __future__ import annotations

from typing import Any

from finetune.evaluate.paired import Difference, format_difference, rank_rows
from finetune.evaluate.results import NoCall, TaskScore

from ..language import mark, tr
from .markup import as_on_page, note, table
from .words import minutes

_ROWS_SHOWN = 12
#: What the scores of an evaluation are called; those that are not here are called by the name of their measure.
_SCORES = {
    "exact": mark("exact match"), "contains": mark("contains"), "regex": mark("regular expression"), "json": "JSON",
    "numeric": mark("number"), "calls": mark("tool calls"), "loss": mark("loss"),
}  # fmt: skip


def scores(result: dict[str, Any], order: str, rows_shown: int = _ROWS_SHOWN) -> str:
    """What `finetune eval --json` printed: a table of scores, their differences, and rows in the chosen order."""
    base, tuned = result["base"], result["tuned"]
    lines = [(tr("exact match"), "exact_match", _percent), (score_name(result), "score", _number)]
    lines.append((tr("valid JSON"), "valid", _percent))
    if result["score"] == "exact":
        del lines[1]
    lines += [(tr("loss per trained token"), "loss", _number), (tr("perplexity"), "perplexity", _number)]
    lines += [(tr("token accuracy"), "token_accuracy", _percent)]
    lines += [(tr("pairs in order"), "pairs_in_order", _percent), (tr("margin of a pair, nats"), "pair_margin", _number)]
    rows = [[name, write(base[key]), write(tuned[key])] for name, key, write in lines if tuned.get(key) is not None]
    for name in tuned["fields"]:
        rows.append([tr("field {name}", name=name), _percent(base["fields"][name]), _percent(tuned["fields"][name])])
    names = names_of(result)
    summary = table([rows_of(result), *(f">{name}" for name in names)], rows, tr("Base against tuned"), hidden_caption=True)
    gaps = " - ".join(reversed(names))
    differences = "".join(
        note(f"{name}: {as_on_page(format_difference(Difference(**gap), scale, unit, gaps))}")
        for name, gap, scale, unit in _gaps(result)
        if gap
    )
    differences += forgetting_table(result.get("lost") or [])
    first = rank_rows(base["scores"], tuned["scores"], order)[:rows_shown]
    answers = [
        [result["prompts"][row].strip(), result["references"][row], base["answers"][row], tuned["answers"][row],
         f"{base['scores'][row]:.3g}", f"{tuned['scores'][row]:.3g}"]
        for row in first
    ]  # fmt: skip
    columns = [tr("prompt"), tr("expected"), *names, *(f">{tr('{model} score', model=name)}" for name in names)]
    took = tr("Evaluated in {time}.", time=minutes(result["seconds"]))
    if result["reused"]:
        took += f" {tr('{n} results are from an earlier evaluation.', n=format(result['reused'], ','))}"
    return summary + differences + note(took) + (table(columns, answers, tr("Answers")) if answers else "")


def score_name(result: dict[str, Any]) -> str:
    """What its score is called."""
    return tr(_SCORES.get(result["score"], result["score"]))


def rows_of(result: dict[str, Any]) -> str:
    """How many and which rows an evaluation was of."""
    n = f"{result['rows']:,}"
    if result.get("forgetting"):
        return tr("{n} held-out rows of the run it continued", n=n)
    return tr("{n} rows of {data}", n=n, data=result["data"]) if result["data"] else tr("{n} held-out rows", n=n)


def names_of(result: dict[str, Any]) -> tuple[str, str]:
    """The two models: base and tuned, or before and after continuing an adapter."""
    is_continued = result.get("forgetting") or result.get("against_adapter")
    return (tr("before"), tr("now")) if is_continued else (tr("base"), tr("tuned"))


def forgetting_table(groups: list[dict[str, Any]]) -> str:
    """Losses before and now on groups of rows of other tasks."""
    lines = [
        [as_on_page(group["rows_of"]), group["rows"], _number(group["before"]), _number(group["now"]), _gap(group)]
        for group in groups
    ]
    headings = [tr("forgetting"), f">{tr('rows')}", f">{tr('loss before')}", f">{tr('now')}", tr("difference")]
    return table(headings, lines, tr("Forgetting"), hidden_caption=True) if lines else ""


def task_table(tasks: list[TaskScore]) -> str:
    """Scores of benchmark tasks."""
    lines = [
        [f"{task.task}, {task.metric}", task.rows, _number(task.base), _number(task.tuned),
         as_on_page(format_difference(task.difference)) if task.difference else ""]
        for task in tasks
    ]  # fmt: skip
    columns = [tr("benchmark task"), f">{tr('rows')}", f">{tr('base')}", f">{tr('tuned')}", tr("difference")]
    return table(columns, lines, tr("Benchmark tasks"), hidden_caption=True) if lines else ""


def no_call_note(no_call: NoCall | None) -> str:
    """Whether the model leaves tools alone where none is due."""
    if no_call is None:
        return ""
    summary = as_on_page(no_call.summary())
    return note(tr("Worse: {summary}", summary=summary) if no_call.is_worse else summary)


def _gap(group: dict[str, Any]) -> str:
    gap = group["difference"]
    return as_on_page(format_difference(Difference(**gap) if gap else None, names="now - before"))


def _gaps(result: dict[str, Any]) -> list[tuple[str, Any, float, str]]:
    own = [] if result["score"] == "exact" else [(score_name(result), result["score_difference"], 1.0, "")]
    exact = (tr("exact match"), result["exact_match_difference"], 100.0, " points")
    pairs = (tr("pairs in order"), result.get("pairs_in_order_difference"), 100.0, " points")
    parts = [(name, gap, 100.0, " points") for name, gap in (result.get("field_differences") or {}).items()]
    return [*own, *parts, exact, pairs, (tr("loss"), result["loss_difference"], 1.0, "")]


def _percent(share: float | None) -> str:
    return tr("not measured") if share is None else f"{share:.1%}"


def _number(value: float | None) -> str:
    return tr("not measured") if value is None else f"{value:.4f}"
