"""The data as HTML: counts, problems, one row with trained tokens marked, lengths."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from finetune.settings import AUTO, Recipe
from finetune.settings.schema import DEFAULT_SHARE

from ..language import tr, tr_n
from ..planning.refused_rows import Problem, problems_of
from .markup import Safe, inert, render, small_pictures
from .svg_charts import histogram

_MARKED_CHARACTERS = 6000


def look(answer: dict[str, Any], recipe: Recipe, columns: Safe) -> Safe:
    """Return row counts, problems with their remedies, columns, the first row and a histogram of tokens per row."""
    counts, kinds, share = answer["report"], problems_of(answer), recipe.dataset.test_split_size
    if share is None:
        share = DEFAULT_SHARE if counts.get("rows_held_out") else 0
    limit = None if recipe.max_length == AUTO else recipe.max_length
    return render(
        "look", counts=counts, eval_counts=answer["eval_report"], dataset=recipe.dataset, share=share, shown_share=f"{share:g}",
        template=recipe.chat_template or "", problems=kinds, total=sum(len(problem.rows) for problem in kinds),
        are_left_out=recipe.dataset.on_bad_rows == "skip", warnings=counts["warnings"], columns=columns, row=marked(answer),
        bars=histogram(answer["lengths"], limit), limit=limit, percentiles=counts.get("lengths"),
        over=sum(length > limit for length in answer["lengths"]) if limit else 0,
    )  # fmt: skip


def refused_row(number: int, at: int, problem: Problem, text: str) -> str:
    """Return row `at` of problem `number`, cut to 5,000 characters, with buttons for its neighbours."""
    row = problem.rows[at]
    return render(
        "data_row", title=tr("{file}, row {row}", file=row["file"], row=f"{row['row']:,}"), at=at, count=len(problem.rows),
        name="walk", steps=lambda index: {"walk": number, "at": index}, field=row["field"] or "", reason=row["reason"],
        pieces=[(Safe(inert(text, 5000)), False)] if text else [], trained="",
    )  # fmt: skip


def marked(answer: Mapping[str, Any]) -> Safe:
    """Return a row as the model sees the row, with trained tokens marked."""
    if not answer["sequences"]:
        return Safe(f"<h2>{tr('No valid row')}</h2>")
    pieces, left = [], _MARKED_CHARACTERS
    for text, is_trained in answer["marked"]:
        pieces.append((Safe(inert(text[:left], left + 1)), is_trained))
        left -= len(text)
        if left <= 0:
            pieces.append((Safe("…"), False))
            break
    return render(
        "data_row", title=tr("Row {n}, as the model sees it", n=f"{answer['index'] + 1:,}"), at=answer["index"],
        count=answer["sequences"], name="row", steps=lambda index: {"row": index}, reason="", pieces=pieces,
        pictures=Safe(small_pictures(answer["pictures"])), tokens=tr_n("{n} token", "{n} tokens", answer["tokens"]),
        trained=tr("{n} trained", n=f"{answer['trained_tokens']:,}"),
    )  # fmt: skip


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return all refused rows as CSV."""
    text, names = io.StringIO(), ("file", "row", "field", "reason")
    csv.writer(text).writerows([names, *([_cell(row[name]) for name in names] for row in rows)])
    return text.getvalue()


def _cell(value: Any) -> Any:
    # a spreadsheet would run such a cell as a formula
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
