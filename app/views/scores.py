"""An evaluation's scores, differences and rows, as HTML."""

from __future__ import annotations

from typing import Any

from finetune.evaluate.paired import Difference, format_difference, rank_rows
from finetune.evaluate.results import NoCall, TaskScore
from finetune.evaluate.scorers import VALID_LABELS
from finetune.units import format_seconds

from .markup import note, table

_ROWS_SHOWN = 12


def scores(result: dict[str, Any], order: str, rows_shown: int = _ROWS_SHOWN) -> str:
    """What `finetune eval --json` printed: a table of scores, their differences, and rows in the chosen order."""
    base, tuned = result["base"], result["tuned"]
    lines = [("exact match", "exact_match", _percent), (result["score"], "score", _number)]
    lines.append((VALID_LABELS.get(result["score"], "valid JSON"), "valid", _percent))
    if result["score"] == "exact":
        del lines[1]
    lines += [("loss per trained token", "loss", _number), ("perplexity", "perplexity", _number)]
    lines += [("token accuracy", "token_accuracy", _percent)]
    lines += [("pairs in order", "pairs_in_order", _percent), ("margin of a pair, nats", "pair_margin", _number)]
    rows = [[name, write(base[key]), write(tuned[key])] for name, key, write in lines if tuned.get(key) is not None]
    rows += [[f"field {name}", _percent(base["fields"][name]), _percent(tuned["fields"][name])] for name in tuned["fields"]]
    names = names_of(result)
    columns = [f"{result['rows']:,} {rows_of(result)}", *(f">{name}" for name in names)]
    summary = table(columns, rows, "Base against tuned", hidden_caption=True)
    gaps = " - ".join(reversed(names))
    differences = "".join(
        note(f"{name}: {format_difference(Difference(**gap), scale, unit, gaps)}")
        for name, gap, scale, unit in _gaps(result)
        if gap
    )
    differences += forgetting_table(result.get("lost") or [])
    reused = f" {result['reused']:,} results are from an earlier evaluation." if result["reused"] else ""
    first = rank_rows(base["scores"], tuned["scores"], order)[:rows_shown]
    answers = [
        [result["prompts"][row].strip(), result["references"][row], base["answers"][row], tuned["answers"][row],
         f"{base['scores'][row]:.3g}", f"{tuned['scores'][row]:.3g}"]
        for row in first
    ]  # fmt: skip
    columns = ["prompt", "expected", *names, f">{names[0]} score", f">{names[1]} score"]
    took = note(f"Evaluated in {format_seconds(result['seconds'])}.{reused}")
    return summary + differences + took + (table(columns, answers, "Answers") if answers else "")


def rows_of(result: dict[str, Any]) -> str:
    """Which rows an evaluation was of."""
    if result.get("forgetting"):
        return "held-out rows of the run it continued"
    return f"rows of {result['data']}" if result["data"] else "held-out rows"


def names_of(result: dict[str, Any]) -> tuple[str, str]:
    """The two models: base and tuned, or before and after continuing an adapter."""
    return ("before", "now") if result.get("forgetting") or result.get("against_adapter") else ("base", "tuned")


def forgetting_table(groups: list[dict[str, Any]]) -> str:
    """Losses before and now on rows of other tasks."""
    lines = [[row["rows_of"], row["rows"], _number(row["before"]), _number(row["now"]), _gap(row)] for row in groups]
    columns = ["forgetting", ">rows", ">loss before", ">now", "difference"]
    return table(columns, lines, "Forgetting", hidden_caption=True) if lines else ""


def task_table(tasks: list[TaskScore]) -> str:
    """Scores of benchmark tasks."""
    lines = [
        [f"{task.task}, {task.metric}", task.rows, _number(task.base), _number(task.tuned),
         format_difference(task.difference) if task.difference else ""]
        for task in tasks
    ]  # fmt: skip
    columns = ["benchmark task", ">rows", ">base", ">tuned", "difference"]
    return table(columns, lines, "Benchmark tasks", hidden_caption=True) if lines else ""


def no_call_note(no_call: NoCall | None) -> str:
    """Whether the model leaves tools alone where none is due."""
    if no_call is None:
        return ""
    return note(f"{'Worse: ' if no_call.is_worse else ''}{no_call.summary()}")


def _gap(group: dict[str, Any]) -> str:
    gap = group["difference"]
    return format_difference(Difference(**gap) if gap else None, names="now - before")


def _gaps(result: dict[str, Any]) -> list[tuple[str, Any, float, str]]:
    """Each difference with its name, scale and unit."""
    own = [] if result["score"] == "exact" else [(result["score"], result["score_difference"], 1.0, "")]
    exact = ("exact match", result["exact_match_difference"], 100.0, " points")
    pairs = ("pairs in order", result.get("pairs_in_order_difference"), 100.0, " points")
    parts = [(name, gap, 100.0, " points") for name, gap in (result.get("field_differences") or {}).items()]
    return [*own, *parts, exact, pairs, ("loss", result["loss_difference"], 1.0, "")]


def _percent(share: float | None) -> str:
    return "not measured" if share is None else f"{share:.1%}"


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"
