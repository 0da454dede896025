"""Find the writing script of a text."""

from __future__ import annotations

import re

#: Script -> characters of a regular expression. Chinese and Japanese share theirs, and Japanese answers may have Han alone.
SCRIPTS = {
    "Latin": "A-Za-z\u00c0-\u024f\u1e00-\u1eff",
    "Greek": "\u0370-\u03ff",
    "Cyrillic": "\u0400-\u052f",
    "Hebrew": "\u0590-\u05ff",
    "Arabic": "\u0600-\u06ff\u0750-\u077f",
    "Indic": "\u0900-\u0dff",
    "Thai": "\u0e00-\u0e7f",
    "Chinese or Japanese": "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff",
    "Korean": "\uac00-\ud7af",
}
_LETTERS = {name: re.compile(f"[{characters}]+") for name, characters in SCRIPTS.items()}
#: Characters of a text that are counted.
_MAX_CHARACTERS = 2_000


def script_of(text: str) -> str | None:
    """Return the script of most letters; None without letters of listed scripts."""
    if text.isascii():
        return "Latin" if _LETTERS["Latin"].search(text) else None
    counts = {name: sum(map(len, letters.findall(text[:_MAX_CHARACTERS]))) for name, letters in _LETTERS.items()}
    main_script = max(counts, key=lambda name: counts[name])
    return main_script if counts[main_script] else None
