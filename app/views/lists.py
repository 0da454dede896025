"""Boxes with a line per item: queue, trash, sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .templates import render


@dataclass(frozen=True)
class Item:
    """One line of a list."""

    text: str
    state: str = ""
    css: str = ""
    run: str = ""
    time: str = ""
    button: str = ""
    #: Sent by the button.
    message: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""


def item_list(title: str, items: Sequence[Item], hint: str = "") -> str:
    """Return a box with lines; empty without items."""
    return render("lines", title=title, lines=items, hint=hint)
