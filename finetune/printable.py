"""Untrusted text, escaped for terminals."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

#: Shows a message about work that goes on.
Progress = Callable[[str], None]


def printable(text: str) -> str:
    """Escape control and bidirectional characters."""
    if text.isprintable():
        return text
    return "".join(
        letter
        if letter in "\n\t" or letter.isprintable() or unicodedata.category(letter) == "Zs"
        else letter.encode("unicode_escape").decode()
        for letter in text
    )
