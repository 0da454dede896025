"""The language of the page: chosen for each request by the browser's cookie, else by the browser's preference.

A text is written in English where it is used, as `tr("Free: {size}", size=size)`; `languages/zh.po` has its Chinese. A constant
of a module is made before there is a request: `mark` names it for the catalogue, `tr` translates it when it is shown.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

#: Languages by their code in <html lang>, each with its own name.
LANGUAGES = {"en": "English", "zh": "中文"}
COOKIE = "ft_language"
_ENTRY = re.compile(r'^(msgid|msgid_plural|msgstr(?:\[0\])?) (".*")$|^(".*")$')
#: A part of the header accept-language: the language without its region, and its weight.
_PREFERENCE = re.compile(r"\s*([A-Za-z]+)(?:-[\w-]+)?\s*(?:;\s*q\s*=\s*([01](?:\.\d{0,3})?)\s*)?")
_LANGUAGE: ContextVar[str] = ContextVar("language", default="en")


def current() -> str:
    """The code of this request's language."""
    return _LANGUAGE.get()


@contextmanager
def spoken(code: str) -> Iterator[None]:
    """Texts inside are in this language."""
    token = _LANGUAGE.set(code)
    try:
        yield
    finally:
        _LANGUAGE.reset(token)


def tr(text: str, /, **values: Any) -> str:
    """The text in this request's language, with its values; English where the catalogue lacks it."""
    template = catalogue(current()).get(text, text)
    return template.format(**values) if values else template


def tr_n(singular: str, plural: str, n: int, **values: Any) -> str:
    """The text for `n` things; `{n}` is written with thousands separators."""
    text = catalogue(current()).get(singular) or (singular if n == 1 else plural)
    return text.format(n=f"{n:,}", **values)


def mark(text: str) -> str:
    """The text itself: says that it is translated where it is shown."""
    return text


def preferred(cookie: str, accepted: str) -> str:
    """The language of a browser, from its headers `cookie` and `accept-language`."""
    chosen = re.search(rf"(?:^|[;,]\s*){COOKIE}=(\w+)", cookie)
    if chosen and chosen[1] in LANGUAGES:
        return chosen[1]
    weights: dict[str, float] = {}
    for part in accepted.split(","):
        preference = _PREFERENCE.fullmatch(part)
        if preference and (code := preference[1].lower()) in LANGUAGES:
            weights[code] = max(weights.get(code, 0.0), float(preference[2] or 1))
    return max(weights, key=lambda code: weights[code]) if weights and max(weights.values()) > 0 else "en"


@cache
def catalogue(code: str) -> Mapping[str, str]:
    """English text -> the text in the language. The file is gettext's, so that any editor of translations opens it."""
    path = Path(__file__).parent / "languages" / f"{code}.po"
    texts: dict[str, str] = {}
    for entry in path.read_text(encoding="utf-8").split("\n\n") if path.is_file() else ():
        parts = _parts(entry)
        translation = parts.get("msgstr") or parts.get("msgstr[0]", "")
        if parts.get("msgid") and translation:
            texts[parts["msgid"]] = translation
    return texts


def _parts(entry: str) -> dict[str, str]:
    parts: dict[str, str] = {}
    keyword = ""
    for line in entry.splitlines():
        if match := _ENTRY.match(line):
            keyword = match[1] or keyword
            parts[keyword] = parts.get(keyword, "") + ast.literal_eval(match[2] or match[3])
    return parts
