"""Data panel: counts, refused rows, one row with trained tokens marked, row lengths."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.settings import AUTO, Recipe
from finetune.settings.schema import DEFAULT_SHARE

from ..language import tr, tr_n
from .charts import histogram
from .markup import Safe, inert, render

_MARKED_CHARACTERS = 6000
_LINE_FILES = (".jsonl", ".ndjson", ".csv", ".tsv")  # files with one row per line
_LINE_CHARACTERS = 4000


@dataclass(frozen=True)
class Problem:
    """Refused rows of one kind."""

    kind: str
    rows: tuple[dict[str, Any], ...]

    @property
    def reason(self) -> str:
        reasons = {row["reason"] for row in self.rows}
        if len(reasons) == 1:
            return reasons.pop()
        # without the field, which the page shows apart
        field = re.sub(r"\[\d+\]", "[]", self.rows[0]["field"] or "")
        return self.kind.removeprefix(field).strip()


def problems_of(answer: dict[str, Any]) -> list[Problem]:
    """Return the refused rows by kind, largest first."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for kind, row in zip(answer["kinds"], answer["report"]["rows_refused"], strict=True):
        groups.setdefault(kind, []).append(row)
    return sorted((Problem(kind, tuple(rows)) for kind, rows in groups.items()), key=lambda problem: -len(problem.rows))


def source_text(root: Path, row: dict[str, Any]) -> str:
    """Return a row's line in its file; empty if rows are not lines."""
    path = root / row["file"]
    if path.suffix not in _LINE_FILES:
        return ""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return next(islice(file, row["row"] - 1, row["row"]), "")[:_LINE_CHARACTERS].strip()
    except OSError:
        return ""


def look(answer: dict[str, Any], recipe: Recipe, columns: Safe) -> Safe:
    """Return the data panel: counts, problems, columns, first row and lengths."""
    counts, problems = answer["report"], problems_of(answer)
    share = recipe.dataset.test_split_size
    if share is None:
        share = DEFAULT_SHARE if counts.get("rows_held_out") else 0
    limit = None if recipe.max_length == AUTO else recipe.max_length
    return render(
        "look", counts=counts, eval_counts=answer["eval_report"], dataset=recipe.dataset, share=share, shown_share=f"{share:g}",
        template=recipe.chat_template or "", problems=problems, total=sum(len(problem.rows) for problem in problems),
        are_left_out=recipe.dataset.on_bad_rows == "skip", warnings=counts["warnings"],
        findings=counts["findings"], columns=columns, row=marked_row(answer),
        bars=histogram(answer["lengths"], limit), limit=limit, percentiles=counts.get("lengths"),
        over=sum(length > limit for length in answer["lengths"]) if limit else 0,
    )  # fmt: skip


def refused_row(number: int, at: int, problem: Problem, text: str) -> str:
    """Return row `at` of a problem as in its file, with buttons for its neighbours."""
    row = problem.rows[at]
    return render(
        "data_row", title=tr("{file}, row {row}", file=row["file"], row=f"{row['row']:,}"), at=at, count=len(problem.rows),
        name="walk", steps=lambda index: {"walk": number, "at": index}, field=row["field"] or "", reason=row["reason"],
        pieces=[(Safe(inert(text, _LINE_CHARACTERS)), False)] if text else [], trained="",
    )  # fmt: skip


def marked_row(answer: Mapping[str, Any]) -> Safe:
    """Return a row as the model sees it, with trained tokens marked."""
    if not answer["sequences"]:
        return Safe(f"<h2>{tr('No valid row')}</h2>")
    pieces, characters_left = [], _MARKED_CHARACTERS
    for text, is_trained in answer["marked"]:
        pieces.append((Safe(inert(text[:characters_left], characters_left + 1)), is_trained))
        characters_left -= len(text)
        if characters_left <= 0:
            pieces.append((Safe("…"), False))
            break
    return render(
        "data_row", title=tr("Row {n}, as the model sees it", n=f"{answer['index'] + 1:,}"), at=answer["index"],
        count=answer["sequences"], name="row", steps=lambda index: {"row": index}, reason="", pieces=pieces,
        pictures=render("pictures", pictures=answer["pictures"]), tokens=tr_n("{n} token", "{n} tokens", answer["tokens"]),
        trained=tr("{n} trained", n=f"{answer['trained_tokens']:,}"),
    )  # fmt: skip
