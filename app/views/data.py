"""The data as HTML: counts, the problems to work off, a row as the model sees it with trained tokens marked, lengths."""

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
from .charts import histogram
from .markup import action, as_on_page, inert, note
from .pictures import pixels, small_pictures
from .words import rows as rows_in_words

_MARKED_CHARACTERS = 6000
#: Shares of the rows to hold out, as they are offered.
_HELD_OUT = {0: mark("none"), 0.02: "2 %", 0.05: "5 %", 0.1: "10 %", 0.2: "20 %"}


def head(answer: Mapping[str, Any], recipe: Recipe) -> str:
    """Counts of rows, the held-out share, and the template."""
    counts, eval_counts = answer["report"], answer["eval_report"]
    refused = len(counts["rows_refused"])
    share = counts["trained_token_share"]
    facts = [tr_n("{n} problem", "{n} problems", refused) if refused else tr("no problems")]
    facts += [tr("read as {format}", format=counts["format"])]
    trained = tr("{share} of the tokens are trained on", share=f"{share or 0:.0%}")
    facts += [tr("no tokens are trained on") if share is None else trained]
    if pictures := counts.get("pictures"):
        width, height = pictures["largest"]
        size = pixels(width, height)
        facts += [tr_n("{n} picture, {size}", "{n} pictures, the largest {size}", pictures["pictures"], size=size)]
    held_out_rows = rows_in_words(eval_counts["rows_used"]) if eval_counts else ""
    title = tr("{n} of {rows} are ready", n=f"{counts['rows_used']:,}", rows=rows_in_words(counts["rows_read"]))
    if split_off := counts.get("rows_held_out"):
        title = tr("{rows} to train on, {n} held out", rows=rows_in_words(counts["rows_used"]), n=f"{split_off:,}")
    return (
        f'<div class="ft-runs-head"><div><h1 class="ft-title" data-title="{tr("Data")}">{title}</h1>'
        f'<p class="ft-note" role="status">{inert(" · ".join(facts))}</p></div>'
        f"{_held_out(recipe, held_out_rows, split_off)}{_template(recipe)}</div>"
    )


def _held_out(recipe: Recipe, held_out_rows: str, split_off: int) -> str:
    """The share of rows to hold out; the count for a separate file."""
    dataset = recipe.dataset
    if dataset.eval_path or dataset.eval_split or (held_out_rows and not split_off):
        text = tr("Held out: {rows}, from a file of their own", rows=held_out_rows or tr("none"))
        return f'<span class="ft-note">{text}</span>'
    now = (DEFAULT_SHARE if split_off else 0) if dataset.test_split_size is None else dataset.test_split_size
    values = {**_HELD_OUT, **({now: f"{now:g}"} if now not in _HELD_OUT else {})}
    label = tr("Hold out ({rows})", rows=held_out_rows) if held_out_rows else tr("Hold out")
    return _select("hold_out", label, {str(value): tr(text) for value, text in values.items()}, str(now))


def _template(recipe: Recipe) -> str:
    now = recipe.chat_template or ""
    values = {"": tr("the model's own"), "plain": tr("plain"), **({now: now} if now not in ("", "plain") else {})}
    return _select("template", tr("Template"), values, now)


def _select(name: str, label: str, values: Mapping[str, str], now: str) -> str:
    options = "".join(
        f'<option value="{inert(value)}"{" selected" if value == now else ""}>{inert(text)}</option>'
        for value, text in values.items()
    )
    return f'<label class="ft-field">{inert(label)} <select data-send="{name}" data-key="{name}">{options}</select></label>'


def problems(kinds: Sequence[Problem], answer: Mapping[str, Any], recipe: Recipe) -> str:
    """Reasons that keep rows from training, each with a count and a remedy; then warnings."""
    warnings = "".join(note(as_on_page(text), "warn") for text in answer["report"]["warnings"])
    if not kinds:
        return f"<h2>{tr('Problems')}</h2>{note(tr('Every row can be trained on.'), 'ok')}{warnings}"
    count = sum(len(problem.rows) for problem in kinds)
    lines = "".join(_problem(number, problem) for number, problem in enumerate(kinds))
    leave = tr_n("Leave {n} out", "Leave all {n} out", count)
    leaves = f"<button type='button' class='ft-act' {action(leave_out=True)}>{leave}</button>"
    if recipe.dataset.on_bad_rows == "skip":
        leaves = f'<span class="ft-note ok">{tr_n("{n} is left out.", "All {n} are left out.", count)}</span>'
    return (
        f'<h2>{tr("Problems")}</h2><ul class="ft-problems">{lines}</ul><div class="ft-acts">{leaves}'
        f'<a class="ft-button" href="/ft/refused.csv" download="refused.csv">{tr("List as CSV")}</a></div>{warnings}'
    )


def _problem(number: int, problem: Problem) -> str:
    buttons = f"<button type='button' class='ft-act' {action(walk=number, at=0)} data-key='walk-{number}'>{tr('Walk')}</button>"
    row = problem.rows[0]
    field = f"<small>{inert(row['field'])}</small>" if row["field"] and len(problem.rows) == 1 else ""
    reason = row["reason"] if len(problem.rows) == 1 else problem.reason
    text = f"{inert(as_on_page(reason))} {field}"
    if problem.correction:
        wrong, meant = problem.correction
        text = inert(tr("role '{wrong}', {meant} meant?", wrong=wrong, meant=meant))
        press = f"{action(correct=number)} data-key='correct-{number}'"
        buttons += f"<button type='button' class='ft-act' {press}>{tr('Correct')}</button>"
    return f"<li><b>{len(problem.rows):,}</b><span>{text}</span>{buttons}</li>"


def refused_row(number: int, at: int, problem: Problem, text: str) -> str:
    """One refused row as it stands in its file, with the way to the next one of its kind."""
    row, count = problem.rows[at], len(problem.rows)
    where = inert(tr("{file}, row {row}", file=row["file"], row=f"{row['row']:,}"), 90)
    field = f"<b>{inert(row['field'])}</b>: " if row["field"] else ""
    shown = (
        f'<pre class="ft-marked" tabindex="0" role="region" aria-label="{tr("The row in its file")}">{inert(text, 5000)}</pre>'
    )
    return (
        f'<div class="ft-boxhead"><h2>{where}</h2>{_steps(at, count, "walk", walk=number)}</div>'
        f'<p class="ft-note bad">{field}{inert(row["reason"])}</p>{shown if text else ""}'
        f"<button type='button' class='ft-act' {action(row=0)}>{tr('Show rows that are ready')}</button>"
    )


def marked(answer: Mapping[str, Any]) -> str:
    """A row as the model sees it, trained tokens marked: by colour and underline, and for screen readers by `mark`."""
    if not answer["sequences"]:
        return f"<h2>{tr('No row is ready')}</h2>"
    pieces, left = [], _MARKED_CHARACTERS
    for text, trained in answer["marked"]:
        shown = inert(text[:left], left + 1)
        pieces.append(f"<mark>{shown}</mark>" if trained else shown)
        left -= len(text)
        if left <= 0:
            pieces.append("…")
            break
    index, count = answer["index"], answer["sequences"]
    name, text = tr("Row {n}, as the model sees it", n=f"{index + 1:,}"), "".join(pieces)
    tokens = tr_n("{n} token", "{n} tokens", answer["tokens"])
    trained = tr("{n} trained", n=f"{answer['trained_tokens']:,}")
    return (
        f'<div class="ft-boxhead"><h2>{name}</h2>{_steps(index, count, "row")}</div>'
        f'<pre class="ft-marked" tabindex="0" role="region" aria-label="{name}">{text}</pre>'
        f'{small_pictures(answer["pictures"])}<p class="ft-note">{tokens}{tr(", ")}<mark>{trained}</mark></p>'
    )


def _steps(at: int, count: int, name: str, **message: Any) -> str:
    """‹ 40 of 564 ›"""
    key = "at" if message else "row"
    buttons = [
        f"<button type='button' class='ft-act' {action(**message, **{key: index})} data-key='{name}{sign}' "
        f"aria-label='{label}'{'' if 0 <= index < count else ' disabled'}>{sign}</button>"
        for label, sign, index in ((tr("previous row"), "‹", at - 1), (tr("next row"), "›", at + 1))
    ]
    where = tr("{n} of {total}", n=f"{at + 1:,}", total=f"{count:,}")
    return f'<span class="ft-stepper">{buttons[0]}{where}{buttons[1]}</span>'


def lengths(answer: Mapping[str, Any], recipe: Recipe) -> str:
    """Histogram of tokens per row with the limit of length, and the same as text."""
    row_lengths, limit = answer["lengths"], None if recipe.max_length == AUTO else recipe.max_length
    if not row_lengths:
        return note(tr("No rows to measure."))
    percentiles = answer["report"]["lengths"]
    percentiles_text = tr(", ").join(
        f"{tr('longest') if name == 'max' else name} {format_count(value)}" for name, value in percentiles.items()
    )
    over = sum(length > limit for length in row_lengths) if limit else 0
    cut_text = tr_n("{n} row is longer", "{n} rows are longer", over) if over else tr("no row is cut")
    limit_text = tr("no limit set: it is chosen from these lengths")
    if limit:
        limit_text = tr("limit {tokens}: {result}", tokens=f"{limit:,}", result=cut_text)
    label = tr("Tokens per row: {lengths}; {limit}.", lengths=percentiles_text, limit=limit_text)
    return f'<h2>{tr("Lengths")}</h2>{histogram(row_lengths, limit, label)}<p class="ft-note">{inert(label)}</p>'


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Every refused row with its file, row, field and reason."""
    text = io.StringIO()
    writer = csv.DictWriter(text, ["file", "row", "field", "reason"], extrasaction="ignore")
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    """A value that no spreadsheet takes for a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
