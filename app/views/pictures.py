"""Small copies of images, as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..language import tr
from .markup import inert


def small_pictures(small: Sequence[Mapping[str, Any]]) -> str:
    """Return small copies of images; missing images as text."""
    shown = []
    for picture in small:
        size = pixels(picture["width"], picture["height"])
        name, source = tr("Picture, {size}", size=size), inert(picture["address"], 10**6)
        image = f'<img class="ft-picture" alt="{name}" title="{size}" src="{source}">'
        gone = tr("(a picture that can't be opened any more, {size})", size=size)
        gone = inert(gone if picture["width"] else tr("(a picture that can't be opened any more)"))
        shown.append(image if picture["address"] else gone)
    return f"<p>{''.join(shown)}</p>" if shown else ""


def pixels(width: int, height: int) -> str:
    """Return `640 x 480 pixels`."""
    return tr("{width} x {height} pixels", width=f"{width:,}", height=f"{height:,}")
