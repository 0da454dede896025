"""Untrusted text, escaped for terminals."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

#: Callback that shows what a long task is doing.
Progress = Callable[[str], None]


def printable(text: str) -> str:
    """Escape control and bidirectional characters."""
    if text.isprintable():
        return text
    return "".join(
        character
        if character in "\n\t" or character.isprintable() or unicodedata.category(character) == "Zs"
        else character.encode("unicode_escape").decode()
        for character in text
    )
