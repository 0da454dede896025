"""The engine's errors in the language of the page.

Their texts, with named values, are the entries of the catalogue that have the context `error`. A line that is none of them is
translated by its sentences; what is still none stays in English, as commands do.
"""

from __future__ import annotations

import re
from functools import cache

from ..language import catalogue, current
from .engine_texts import matched

_SENTENCES = re.compile(r"(?<=[.?;]) (?=[A-Z`])")
_NO_SPACE = re.compile(r"(?<=[。；？]) |(?<=[\u4e00-\u9fff]) (?=[\u4e00-\u9fff])")


def of_error(text: str) -> str:
    """A problem or a fix of an error in this request's language."""
    return text if current() == "en" else "\n".join(map(_line, text.split("\n")))


def _line(line: str) -> str:
    whole = _translated(line)
    return _NO_SPACE.sub("", whole if whole != line else " ".join(map(_translated, _SENTENCES.split(line))))


def _translated(text: str) -> str:
    return matched(text, _templates(current()), catalogue(current(), "error"), depth=4)


@cache
def _templates(code: str) -> tuple[str, ...]:
    """The texts, those with the most letters of their own first."""
    return tuple(sorted(catalogue(code, "error"), key=lambda text: -len(re.sub(r"\{\w+\}", "", text))))
