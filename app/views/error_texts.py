"""The engine's errors in the language of the page.

Their texts, with named values, are the entries of the catalogue that have the context `error`. A line that is none of them is
translated by its sentences, and what is no text stays in English, as commands do.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import islice

from ..language import catalogue, current
from .engine_texts import english, matched, of_engine
from .markup import as_on_page

#: Characters of a line that is translated, as the page shows no more; beginnings of sentences that are tried.
_LONGEST, _MOST_CUTS = 2000, 12
#: Where a sentence may begin: a fix after its problem, or another fix.
_BEGINNING = re.compile(r" +(?=[A-Z`])")
_SENTENCE = re.compile("[A-Za-z]+ [a-z]+ [a-z]+")
_NO_SPACE = re.compile(r"(?<=[。；？]) |(?<=[\u4e00-\u9fff]) (?=[\u4e00-\u9fff])")


def of_error(text: str) -> str:
    """A problem or a fix of an error in this request's language."""
    return text if current() == "en" else "\n".join(map(_line, text.split("\n")))


def of_message(text: str) -> str:
    """The message of an event, in this request's language: the engine's own, or an error's problems and fix."""
    own = of_engine(text)
    return as_on_page(of_error(text)) if own == as_on_page(text) else own


def _line(line: str) -> str:
    """A line as one text; where that leaves English sentences, as two, cut where one may begin."""
    if len(line) > _LONGEST:
        return line
    translation = _translated(line)
    has_english = translation == line or _SENTENCE.search(translation)
    beginnings = islice(_BEGINNING.finditer(line), _MOST_CUTS) if has_english else ()
    for beginning in sorted(beginnings, key=lambda match: line[match.start() - 1] not in ".?"):
        parts = line[: beginning.start()], line[beginning.end() :]
        first, others = map(_translated, parts)
        if first != parts[0] or others != parts[1]:
            translation = min(translation, f"{first} {_line(parts[1])}", key=english)
            break
    return _NO_SPACE.sub("", translation)


def _translated(text: str) -> str:
    return matched(text, _templates(current()), catalogue(current(), "error"), depth=4)


@cache
def _templates(code: str) -> tuple[str, ...]:
    """The texts, those with the most letters of their own first."""
    return tuple(sorted(catalogue(code, "error"), key=lambda text: -len(re.sub(r"\{\w+\}", "", text))))
