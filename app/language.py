"""Language of a request: the browser's cookie, else its preference."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

#: Names of languages by their code in <html lang>.
LANGUAGES = {"en": "English", "zh": "中文"}
# Texts stand in English where they are used, as `tr("Free: {size}", size=size)`; `languages/zh.po` has the Chinese.
# A module's constant exists before a request: `mark` adds it to the catalogue, `tr` translates it where it is shown.
COOKIE = "ft_language"
#: Text and translation of an entry, each as Python's adjacent strings.
_ENTRY = re.compile(r'^msgid ((?:".*"\n)+)(?:msgid_plural (?:".*"\n)+)?msgstr(?:\[0\])? (".*"(?:\n".*")*)', re.MULTILINE)
#: Text in a script: `tr("Free")`.
SCRIPT_CALL = re.compile(r'\btr(?:_n)?\(\s*"([^"\\]+)"')
Marked = TypeVar("Marked")
_LANGUAGE: ContextVar[str] = ContextVar("language", default="en")


def current() -> str:
    """Return the request's language code."""
    return _LANGUAGE.get()


@contextmanager
def use_language(code: str) -> Iterator[None]:
    """Translate to this language inside the block."""
    token = _LANGUAGE.set(code)
    try:
        yield
    finally:
        _LANGUAGE.reset(token)


def tr(text: str, /, **values: Any) -> str:
    """Return the text in the request's language, else in English."""
    template = catalogue(current()).get(text, text)
    return template.format(**values) if values else template


def tr_n(singular: str, plural: str, n: int, **values: Any) -> str:
    """Return the text for `n` things, with thousands separators."""
    # a translation has one form for all numbers, as in Chinese
    text = catalogue(current()).get(singular) or (singular if n == 1 else plural)
    return text.format(n=f"{n:,}", **values)


def mark(texts: Marked) -> Marked:
    """Mark a constant, or the values of a constant dict, for the catalogue."""
    return texts


def preferred_language(cookie: str, accept_language: str) -> str:
    """Return the language code for these request headers."""
    # the cookie is the user's choice on the page, accept-language the browser's setting
    chosen = re.search(rf"(?:^|[;,]\s*){COOKIE}=(\w+)", cookie)
    if chosen and chosen[1] in LANGUAGES:
        return chosen[1]
    # browsers list the languages by preference
    codes = re.findall(r"(?:^|,)\s*([a-z]+)", accept_language.lower())
    return next((code for code in codes if code in LANGUAGES), "en")


@cache
def catalogue(code: str) -> Mapping[str, str]:
    """Return a language's translations by English text."""
    path = Path(__file__).parent / "languages" / f"{code}.po"
    # gettext's format: every translation editor opens the file
    entries = _ENTRY.findall(path.read_text(encoding="utf-8")) if path.is_file() else []
    texts = {ast.literal_eval(f"({text})"): ast.literal_eval(f"({translation})") for text, translation in entries}
    return {text: translation for text, translation in texts.items() if text and translation}


@cache
def script_texts(code: str) -> dict[str, str]:
    """Return the translations that the scripts use."""
    scripts = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.js"))]
    calls = dict.fromkeys(call[1] for script in scripts for call in SCRIPT_CALL.finditer(script))
    return {text: catalogue(code)[text] for text in calls if text in catalogue(code)}
