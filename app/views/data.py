"""The data as HTML: counts, problems, one row with trained tokens marked, lengths."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from finetune.settings import AUTO, Recipe
from finetune.settings.schema import DEFAULT_SHARE
from finetune.units import format_count

from ..language import mark, tr, tr_n
from ..planning.refused_rows import Problem
from .markup import Safe, as_on_page, inert, note, pixels, render, small_pictures
from .svg_charts import histogram
from .words import rows as rows_in_words

_MARKED_CHARACTERS = 6000
#: Offered shares of held-out rows.
_HELD_OUT = {0: mark("none"), 0.02: "2 %", 0.05: "5 %", 0.1: "10 %", 0.2: "20 %"}


def head(answer: Mapping[str, Any], recipe: Recipe) -> str:
    """Return row counts, the held-out share and the template."""
    counts, eval_counts = answer["report"], answer["eval_report"]
    refused = len(counts["rows_refused"])
    share = counts["trained_token_share"]
    facts = [tr_n("{n} problem", "{n} problems", refused) if refused else tr("no problems")]
    facts += [tr("read as {format}", format=counts["format"])]
    trained = tr("trained on {share} of the tokens", share=f"{share or 0:.0%}")
    facts += [tr("trained on no tokens") if share is None else trained]
    if pictures := counts.get("pictures"):
        width, height = pictures["largest"]
        size = pixels(width, height)
        facts += [tr_n("{n} image, {size}", "{n} images, the largest {size}", pictures["pictures"], size=size)]
    held_out_rows = rows_in_words(eval_counts["rows_used"]) if eval_counts else ""
    title = tr("{n} of {rows} are ready", n=f"{counts['rows_used']:,}", rows=rows_in_words(counts["rows_read"]))
    if split_off := counts.get("rows_held_out"):
        title = tr("{rows} to train on, {n} held out", rows=rows_in_words(counts["rows_used"]), n=f"{split_off:,}")
    dataset, template = recipe.dataset, recipe.chat_template or ""
    templates = {template: template, "": tr("the model's own"), "plain": tr("plain")}
    held_out_file = ""
    if dataset.eval_path or dataset.eval_split or (held_out_rows and not split_off):
        held_out_file = tr("Held out: {rows}, from a separate file", rows=held_out_rows or tr("none"))
    now = (DEFAULT_SHARE if split_off else 0) if dataset.test_split_size is None else dataset.test_split_size
    shares = {str(value): tr(text) for value, text in {**_HELD_OUT, now: _HELD_OUT.get(now, f"{now:g}")}.items()}
    label = tr("Hold out ({rows})", rows=held_out_rows) if held_out_rows else tr("Hold out")
    return render(
        "data_head", title=title, facts=" · ".join(facts), held_out_file=held_out_file, hold_out=(label, shares, str(now)),
        template=(tr("Template"), templates, template),
    )  # fmt: skip


def problems(kinds: Sequence[Problem], answer: Mapping[str, Any], recipe: Recipe) -> str:
    """Return reasons that keep rows from training, each with a count and a remedy, then warnings."""
    return render(
        "data_problems", problems=list(map(_problem, kinds)), total=sum(len(problem.rows) for problem in kinds),
        are_left_out=recipe.dataset.on_bad_rows == "skip", warnings=map(as_on_page, answer["report"]["warnings"]),
    )  # fmt: skip


def _problem(problem: Problem) -> tuple[str, str, str, bool]:
    # count, reason, field of a single row, whether a button corrects the rows
    row, is_single = problem.rows[0], len(problem.rows) == 1
    text = as_on_page(row["reason"] if is_single else problem.reason)
    if problem.correction:
        wrong, meant = problem.correction
        text = tr("role '{wrong}': did you mean {meant}?", wrong=wrong, meant=meant)
    field = row["field"] or "" if is_single and not problem.correction else ""
    return f"{len(problem.rows):,}", text, field, bool(problem.correction)


def refused_row(number: int, at: int, problem: Problem, text: str) -> str:
    """Return row `at` of problem `number`, cut to 5,000 characters, with buttons for its neighbours."""
    row = problem.rows[at]
    return render(
        "data_row", title=tr("{file}, row {row}", file=row["file"], row=f"{row['row']:,}"), at=at, count=len(problem.rows),
        name="walk", steps=lambda index: {"walk": number, "at": index}, field=row["field"] or "", reason=row["reason"],
        pieces=[(Safe(inert(text, 5000)), False)] if text else [], trained="",
    )  # fmt: skip


def marked(answer: Mapping[str, Any]) -> str:
    """Return a row as the model sees the row, with trained tokens marked."""
    if not answer["sequences"]:
        return f"<h2>{tr('No valid row')}</h2>"
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


def lengths(answer: Mapping[str, Any], recipe: Recipe) -> str:
    """Return a histogram of tokens per row with the limit, also as text."""
    row_lengths, limit = answer["lengths"], None if recipe.max_length == AUTO else recipe.max_length
    if not row_lengths:
        return note(tr("No rows to measure."))
    percentiles = answer["report"]["lengths"]
    percentiles_text = tr(", ").join(
        f"{tr('longest') if name == 'max' else name} {format_count(value)}" for name, value in percentiles.items()
    )
    over = sum(length > limit for length in row_lengths) if limit else 0
    cut_text = tr_n("{n} row is longer", "{n} rows are longer", over) if over else tr("no row is cut")
    limit_text = tr("no limit set, the plan chooses one from these lengths")
    if limit:
        limit_text = tr("limit {tokens}: {result}", tokens=f"{limit:,}", result=cut_text)
    label = tr("Tokens per row: {lengths}; {limit}.", lengths=percentiles_text, limit=limit_text)
    return f'<h2>{tr("Lengths")}</h2>{histogram(row_lengths, limit, label)}<p class="ft-note">{inert(label)}</p>'


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return all refused rows as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, ["file", "row", "field", "reason"], extrasaction="ignore")
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    # a spreadsheet would run such a cell as a formula
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
