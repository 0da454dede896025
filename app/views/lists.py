"""Boxes with a line for each item: queue, trash and sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .templates import render


@dataclass(frozen=True)
class Item:
    """A line of a list. `message`: sent by the line's button."""

    text: str
    state: str = ""
    css: str = ""
    run: str = ""
    time: str = ""
    button: str = ""
    message: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""


def item_list(title: str, items: Sequence[Item], hint: str = "") -> str:
    """A box with lines; empty without any."""
    return render("lines", title=title, lines=items, hint=hint)
