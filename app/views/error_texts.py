"""The engine's errors in the language of the page.

Their texts, with named values, are the entries of the catalogue that have the context `error`. A line that is none of them is
translated by its sentences; what is still none stays in English, as commands do.
"""

from __future__ import annotations

import re
from functools import cache

from ..language import catalogue, current, tr
from .engine_texts import first_match, matched

_VALUE = re.compile(r"\{\w+\}")
#: Where a problem is: a file and its line, a setting, a folder.
_LOCATION = re.compile(r"(\s*\S+): (.+)")
_SENTENCES = re.compile(r"(?<=[.?;]) (?=[A-Z`])")


def of_error(text: str) -> str:
    """A problem or a fix of an error in this request's language."""
    return text if current() == "en" else "\n".join(map(_line, text.split("\n")))


def _line(line: str) -> str:
    templates, translations = _templates(current()), catalogue(current(), "error")
    whole, location = first_match(line.strip(), templates), _LOCATION.fullmatch(line)
    what = first_match(location[2], templates) if location else None
    if location and what and (whole is None or templates.index(what[0]) <= templates.index(whole[0])):
        return tr("{change}: {result}", change=location[1], result=matched(location[2], templates, translations))
    if whole:
        return matched(line, templates, translations)
    sentences = [matched(sentence, templates, translations) for sentence in _SENTENCES.split(line)]
    return re.sub(r"(?<=[。；？]) ", "", " ".join(sentences))


@cache
def _templates(code: str) -> tuple[str, ...]:
    """The texts: those that begin with a value last, which may match another one's, then by the letters of their own."""
    return tuple(sorted(catalogue(code, "error"), key=lambda text: (text.startswith("{"), -_letters(text))))


def _letters(template: str) -> int:
    return len(_VALUE.sub("", template))
