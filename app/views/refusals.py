"""Why rows are refused, in words of the page: the sentences that the data's reader writes most, others as it writes them."""

from __future__ import annotations

import re

from ..language import tr
from ..planning.refused_rows import WRONG_ROLE
from .words import rows

#: Reasons of `finetune.data` without values of the row.
REASONS = (
    "the answer is empty", "is empty", "has no token to train on",
    "has only a system prompt; there is no assistant turn to train on",
    "has no assistant turn; there is nothing to train on",
    "has weight 0 or train: false on every assistant turn; there is nothing to train on",
    "the assistant speaks first; a conversation begins with the user",
    "a tool speaks first; a conversation begins with the user",
    "has no answer: the columns are prompt and completion, messages, or instruction and output",
    "and rejected are equal; there is nothing to prefer",
    "the chat template leaves this answer out",
)  # fmt: skip
_COUNT = re.compile(r"([\d,]+) of ([\d,]+) row\(s\) can't be trained on:?")
_KIND = re.compile(r"\s*([\d,]+) x (?:(\S+): )?(.+) \((.+), row ([\d, .]+)\)")
_ROW = re.compile(r"\s*(\S+), row (\d+): (?:(\S+): )?(.+)")


def reason_in_words(reason: str) -> str:
    """A reason, or what it is without the details of a row."""
    if match := WRONG_ROLE.fullmatch(reason):
        return tr("role '{wrong}', {meant} meant?", wrong=match[1], meant=match[2])
    return next((full for full in REASONS if full == reason or full.startswith((f"{reason};", f"{reason}:"))), reason)


def refusal_in_words(line: str) -> str:
    """A line of the message with which a run refuses its data."""
    if match := _COUNT.fullmatch(line):
        return tr("{n} of {rows} can't be trained on", n=match[1], rows=rows(int(match[2].replace(",", ""))))
    if match := _KIND.fullmatch(line):
        what = _with_field(match[2], match[3])
        return tr("{n} × {what} ({file}, row {rows})", n=match[1], what=what, file=match[4], rows=match[5])
    if match := _ROW.fullmatch(line):
        return tr("{change}: {result}", change=tr("{file}, row {row}", file=match[1], row=match[2]),
                  result=_with_field(match[3], match[4]))  # fmt: skip
    return line


def _with_field(field: str | None, reason: str) -> str:
    return tr("{change}: {result}", change=field, result=reason_in_words(reason)) if field else reason_in_words(reason)
