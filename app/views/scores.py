"""Scores, differences and rows of an evaluation, as HTML."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from finetune.evaluate.paired import format_difference, rank_rows
from finetune.evaluate.results import (
    measures,
    read_evaluations,
    read_forgetting,
    read_no_call,
    read_tasks,
    unreadable_evaluations,
)  # fmt: skip
from finetune.run.directory import RunDirectory

from ..language import current, mark, tr
from .markup import Safe, render

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


def evaluations(
    run: RunDirectory, order: str = "differ", rows_shown: int = _ROWS_SHOWN, *, progress: Safe | None = None, empty: str,
    is_open: bool = False,
) -> str:  # fmt: skip
    """Return a run's scores, differences and rows, the newest evaluation first.

    - `progress`: of a running evaluation
    - `empty`: text without evaluations
    - `is_open`: show older evaluations too
    """
    results = read_evaluations(run)
    shown = [results[name] for name in sorted(results, key=lambda name: -_written_s(run, name))]
    return render(
        "evaluations", progress=progress, empty=empty, is_open=is_open, damaged=unreadable_evaluations(run),
        no_call=read_no_call(run), forgetting=read_forgetting(run), tasks=read_tasks(run), title_of=_title_of,
        format_difference=format_difference,
        results=[
            (result, measures(result), rank_rows(result["base"]["scores"], result["tuned"]["scores"], order)[:rows_shown])
            for result in shown
        ],
    )  # fmt: skip


def _title_of(title: str) -> str:
    return tr(_TITLES[title]) if title in _TITLES else title


def _written_s(run: RunDirectory, name: str) -> float:
    return (run.path / "evaluations" / f"scores-{name}.json").stat().st_mtime


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
    newest = results[max(results, key=lambda name: _written_s(run, name))]
    base, tuned = (_share(newest, model) for model in ("base", "tuned"))
    return f"{tr(_SHORT[newest['score']])} {base} → {tuned} %" if newest["score"] in _SHORT and base and tuned else ""


def _share(result: dict[str, Any], model: str) -> str:
    score = result[model].get("score")
    share = result[model].get("exact_match") if score is None or result["score"] == "exact" else score
    return "" if share is None else f"{100 * share:.3g}"
