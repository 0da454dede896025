"""The data as HTML: counts, the problems to work off, a row as the model sees it with trained tokens marked, lengths."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from finetune.settings import AUTO, Recipe
from finetune.units import format_count

from ..planning.refused_rows import Problem
from .charts import histogram
from .markup import action, inert, note

_MARKED_CHARACTERS = 6000
#: Shares of the rows to hold out, as they are offered.
_HELD_OUT = {0: "none", 0.02: "2 %", 0.05: "5 %", 0.1: "10 %", 0.2: "20 %"}


def chooser(names: Sequence[str], endings: Sequence[str]) -> str:
    """Where the data is from: a box with what is here, and a place to drop a file."""
    options = "".join(f'<option value="{inert(name)}">' for name in names)
    return (
        '<form class="ft-pick" data-form="data"><label for="data-name">Data</label>'
        '<input id="data-name" name="value" list="data-names" maxlength="400" autocomplete="off" '
        f'placeholder="a file, or OWNER/NAME on Hugging Face"><datalist id="data-names">{options}</datalist>'
        f'<button class="ft-act">Use it</button><button type="button" class="ft-act ft-plain" data-pick="data-upload" '
        f'title="{inert(", ".join(endings))}">Upload a file</button></form>'
    )


def head(answer: Mapping[str, Any], recipe: Recipe) -> str:
    """How many rows are ready, what is held out, the template."""
    counts, eval_counts = answer["report"], answer["eval_report"]
    refused = len(counts["rows_refused"])
    share = counts["trained_token_share"]
    facts = [f"{refused:,} problem{'' if refused == 1 else 's'}" if refused else "no problems", f"read as {counts['format']}"]
    facts += ["no tokens are trained on" if share is None else f"{share:.0%} of the tokens are trained on"]
    if pictures := counts.get("pictures"):
        width, height = pictures["largest"]
        facts += [f"{pictures['pictures']:,} pictures, the largest {width:,} x {height:,} pixels"]
    held_out_rows = f"{eval_counts['rows_used']:,} rows" if eval_counts else "none"
    title = f"{counts['rows_used']:,} of {counts['rows_read']:,} rows are ready"
    return (
        f'<div class="ft-runs-head"><div><h1 class="ft-title" data-title="Data">{title}</h1>'
        f'<p class="ft-note" role="status">{inert(" · ".join(facts))}</p></div>'
        f"{_held_out(recipe, held_out_rows)}{_template(recipe)}</div>"
    )


def waiting(message: str) -> str:
    """Before the rows are read."""
    return (
        '<h1 class="ft-title" data-title="Data">Data</h1>'
        f'<p class="ft-note" role="status"><span class="ft-busy"></span> {inert(message or "reading the rows")}</p>'
    )


def _held_out(recipe: Recipe, held_out_rows: str) -> str:
    """The share of the rows to hold out; where they come from a file of their own, only how many."""
    dataset = recipe.dataset
    if dataset.eval_path or dataset.eval_split or (held_out_rows != "none" and not dataset.test_split_size):
        return f'<span class="ft-note">Held out: {held_out_rows}, from a file of their own</span>'
    now = dataset.test_split_size
    values = {**_HELD_OUT, **({now: f"{now:g}"} if now not in _HELD_OUT else {})}
    label = "Hold out" if held_out_rows == "none" else f"Hold out ({held_out_rows})"
    return _select("hold_out", label, {str(value): text for value, text in values.items()}, str(now))


def _template(recipe: Recipe) -> str:
    now = recipe.chat_template or ""
    values = {"": "the model's own", "plain": "plain", **({now: now} if now not in ("", "plain") else {})}
    return _select("template", "Template", values, now)


def _select(name: str, label: str, values: Mapping[str, str], now: str) -> str:
    options = "".join(
        f'<option value="{inert(value)}"{" selected" if value == now else ""}>{inert(text)}</option>'
        for value, text in values.items()
    )
    return f'<label class="ft-field">{inert(label)} <select data-send="{name}" data-key="{name}">{options}</select></label>'


def problems(kinds: Sequence[Problem], answer: Mapping[str, Any], recipe: Recipe) -> str:
    """What keeps rows from being trained on: counts first, each with what can be done; then what else was noticed."""
    warnings = "".join(note(text, "warn") for text in answer["report"]["warnings"])
    if not kinds:
        return f'<h2>Problems</h2><p class="ft-note ok">Every row can be trained on.</p>{warnings}'
    count = sum(len(problem.rows) for problem in kinds)
    lines = "".join(_problem(number, problem) for number, problem in enumerate(kinds))
    leaves = f"<button type='button' class='ft-act' {action(leave_out=True)}>Leave all {count:,} out</button>"
    if recipe.dataset.on_bad_rows == "skip":
        leaves = f'<span class="ft-note ok">All {count:,} are left out.</span>'
    return (
        f'<h2>Problems</h2><ul class="ft-problems">{lines}</ul><div class="ft-acts">{leaves}'
        f'<a class="ft-button" href="/ft/refused.csv" download="refused.csv">List as CSV</a></div>{warnings}'
    )


def _problem(number: int, problem: Problem) -> str:
    buttons = f"<button type='button' class='ft-act' {action(walk=number, at=0)} data-key='walk-{number}'>Walk</button>"
    row = problem.rows[0]
    field = f"<small>{inert(row['field'])}</small>" if row["field"] and len(problem.rows) == 1 else ""
    text = f"{inert(row['reason'] if len(problem.rows) == 1 else problem.reason)} {field}"
    if problem.correction:
        wrong, meant = problem.correction
        text = f"role {inert(wrong)!r}, {inert(meant)} meant?"
        buttons += f"<button type='button' class='ft-act' {action(correct=number)} data-key='correct-{number}'>Correct</button>"
    return f"<li><b>{len(problem.rows):,}</b><span>{text}</span>{buttons}</li>"


def refused_row(number: int, at: int, problem: Problem, text: str) -> str:
    """One refused row as it stands in its file, with the way to the next one of its kind."""
    row, count = problem.rows[at], len(problem.rows)
    where = f"{inert(row['file'], 60)}, row {row['row']:,}"
    field = f"<b>{inert(row['field'])}</b>: " if row["field"] else ""
    shown = f'<pre class="ft-marked" tabindex="0" role="region" aria-label="The row in its file">{inert(text, 5000)}</pre>'
    return (
        f'<div class="ft-boxhead"><h2>{where}</h2>{_steps(at, count, "walk", walk=number)}</div>'
        f'<p class="ft-note bad">{field}{inert(row["reason"])}</p>{shown if text else ""}'
        f"<button type='button' class='ft-act' {action(row=0)}>Show rows that are ready</button>"
    )


def marked(answer: Mapping[str, Any]) -> str:
    """A row as the model sees it, trained tokens marked: by colour and underline, and for screen readers by `mark`."""
    if not answer["sequences"]:
        return "<h2>No row is ready</h2>"
    pieces, left = [], _MARKED_CHARACTERS
    for text, trained in answer["marked"]:
        shown = inert(text[:left], left + 1)
        pieces.append(f"<mark>{shown}</mark>" if trained else shown)
        left -= len(text)
        if left <= 0:
            pieces.append("…")
            break
    index, count = answer["index"], answer["sequences"]
    name, text = f"Row {index + 1:,}, as the model sees it", "".join(pieces)
    return (
        f'<div class="ft-boxhead"><h2>{name}</h2>{_steps(index, count, "row")}</div>'
        f'<pre class="ft-marked" tabindex="0" role="region" aria-label="{name}">{text}</pre>'
        f'{small_pictures(answer["pictures"])}<p class="ft-note">{answer["tokens"]:,} tokens, '
        f"<mark>{answer['trained_tokens']:,} trained</mark></p>"
    )


def small_pictures(small: Sequence[Mapping[str, Any]]) -> str:
    """Small copies of pictures, as `display.small_pictures` makes them; those that are gone as text."""
    shown = []
    for picture in small:
        size = f"{picture['width']:,} x {picture['height']:,} pixels"
        image = f'<img class="ft-picture" alt="Picture, {size}" title="{size}" src="{inert(picture["address"], 10**6)}">'
        shown.append(image if picture["address"] else inert(f"(a picture that can't be opened any more, {size})"))
    return f"<p>{''.join(shown)}</p>" if shown else ""


def _steps(at: int, count: int, name: str, **message: Any) -> str:
    """‹ 40 of 564 ›"""
    key = "at" if message else "row"
    buttons = [
        f"<button type='button' class='ft-act' {action(**message, **{key: index})} data-key='{name}{label}' "
        f"aria-label='{label} row'{'' if 0 <= index < count else ' disabled'}>{sign}</button>"
        for label, sign, index in (("previous", "‹", at - 1), ("next", "›", at + 1))
    ]
    return f'<span class="ft-stepper">{buttons[0]}{at + 1:,} of {count:,}{buttons[1]}</span>'


def lengths(answer: Mapping[str, Any], recipe: Recipe) -> str:
    """Histogram of tokens per row with the limit of length, and the same as text."""
    counts, limit = answer["lengths"], None if recipe.max_length == AUTO else recipe.max_length
    if not counts:
        return note("No rows to measure.")
    marks = answer["report"]["lengths"]
    quantiles = ", ".join(f"{name} {format_count(value)}" for name, value in marks.items())
    over = sum(length > limit for length in counts) if limit else 0
    cut = "no row is cut" if not over else f"{over:,} rows are longer"
    limit_text = f"limit {limit:,}: {cut}" if limit else "no limit set: it is chosen from these lengths"
    label = f"Tokens per row: {quantiles}; {limit_text}."
    return f'<h2>Lengths</h2>{histogram(counts, limit, label)}<p class="ft-note">{inert(label)}</p>'


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
