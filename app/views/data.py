"""The data as HTML: counts, refused rows with reasons, lengths with the limit, conversations, trained tokens marked."""

from __future__ import annotations

from typing import Any

from finetune.settings import AUTO, Recipe
from finetune.units import format_count

from .charts import histogram
from .markup import inert, note, table

_REFUSED_SHOWN = 20
_MARKED_CHARACTERS = 6000


def report(answer: dict[str, Any], recipe: Recipe) -> str:
    """Counts, warnings and refused rows."""
    counts = answer["report"]
    share = counts["trained_token_share"]
    trained = "no tokens are trained on" if share is None else f"{share:.0%} of the tokens are trained on"
    summary = f"{counts['rows_read']:,} rows read ({counts['format']}), {counts['rows_used']:,} can be trained on; {trained}."
    if pictures := counts.get("pictures"):
        width, height = pictures["largest"]
        summary += f" {pictures['pictures']:,} pictures, the largest has {width:,} x {height:,} pixels."
    eval_counts = answer["eval_report"]
    summary += f" {eval_counts['rows_used']:,} rows are held out." if eval_counts else " No rows are held out."
    parts = [f'<p class="ft-summary" role="status">{inert(summary)}</p>']
    parts += [note(text, "warn") for text in counts["warnings"]]
    refused = counts["rows_refused"]
    if refused:
        rows = [[row["file"], row["row"], row["field"], row["reason"]] for row in refused[:_REFUSED_SHOWN]]
        more = f" The first {_REFUSED_SHOWN} are shown." if len(refused) > _REFUSED_SHOWN else ""
        way = (
            "They are skipped."
            if recipe.dataset.on_bad_rows == "skip"
            else "A run does not start with them: correct them, or set dataset.on_bad_rows=skip."
        )
        parts.append(note(f"{len(refused):,} rows can't be trained on. {way}{more}", "bad"))
        parts.append(table(["file", ">row", "field", "reason"], rows, "Refused rows", hidden_caption=True))
    return "".join(parts)


def lengths(answer: dict[str, Any], recipe: Recipe) -> str:
    """Histogram of tokens per row with the limit of length, and the same as text."""
    counts, limit = answer["lengths"], None if recipe.max_length == AUTO else recipe.max_length
    if not counts:
        return note("No rows to measure.")
    marks = answer["report"]["lengths"]
    quantiles = ", ".join(f"{name} {format_count(value)}" for name, value in marks.items())
    over = sum(length > limit for length in counts) if limit else 0
    limit_text = f"limit {limit:,}: {over:,} rows are longer" if limit else "no limit set: auto chooses it from these lengths"
    label = f"Tokens per row: {quantiles}; {limit_text}."
    return f'{histogram(counts, limit, label)}<p class="ft-summary">{inert(label)}</p>'


def conversations(answer: dict[str, Any]) -> str:
    """The first rows as conversations."""
    shown = []
    for number, messages in enumerate(answer["conversations"], 1):
        turns = "".join(
            f'<div class="ft-turn {_role_css(turn["role"])}"><b>{inert(turn["role"], 40)}</b>{_pictures(turn)}'
            f"<p>{inert(turn['text'])}</p></div>"
            for turn in messages
        )
        shown.append(f"<li><h3>Row {number}</h3>{turns}</li>")
    return f'<ol class="ft-conversations">{"".join(shown)}</ol>' if shown else note("No rows to show.")


def _pictures(turn: dict[str, Any]) -> str:
    """The small pictures of a message; those that are gone as text."""
    shown = []
    for picture in turn.get("pictures", ()):
        size = f"{picture['width']:,} x {picture['height']:,} pixels"
        image = f'<img class="ft-picture" alt="Picture, {size}" title="{size}" src="{inert(picture["address"], 10**6)}">'
        shown.append(image if picture["address"] else inert(f"(a picture that can't be opened any more, {size})"))
    more = f" and {turn['more_pictures']:,} more" if turn.get("more_pictures") else ""
    return f"<p>{''.join(shown)}{more}</p>" if shown else ""


def marked(answer: dict[str, Any]) -> str:
    """The first row as the model sees it, trained tokens marked: by colour and underline, and for screen readers by `mark`."""
    pieces, left = [], _MARKED_CHARACTERS
    for text, trained in answer["marked"]:
        shown = inert(text[:left], left + 1)
        pieces.append(f"<mark>{shown}</mark>" if trained else shown)
        left -= len(text)
        if left <= 0:
            pieces.append("…")
            break
    return (
        f'<pre class="ft-marked" tabindex="0" role="region" aria-label="First row as the model sees it">{"".join(pieces)}</pre>'
    )


def _role_css(role: str) -> str:
    return role if role in ("user", "assistant", "system", "tool") else "other"
