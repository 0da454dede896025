"""Escaping of untrusted text: names, rows, chat and logs can't add markup, scripts, colours or text direction."""

from __future__ import annotations

import html
import json
import re
import unicodedata
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from ..language import tr
from .options import with_labels

_OVERRIDE = re.compile(r"(?<![\w./-])([a-z][a-z0-9_.]*)=([^\s,;=]+)")
#: A command, up to the end of its line or brackets: shown as typed.
_COMMAND = re.compile(r"(\b(?:docker|finetune|git|hf|(?:uv )?pip|lm-eval) [a-z]+ [^\n)）]*)")
_ANSI = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[@-Z\\-_])")


def inert(value: Any, limit: int = 2000) -> str:
    """Return `value` as text that browsers never interpret, cut to `limit` characters."""
    text = plain(str(value))
    return html.escape(text if len(text) <= limit else f"{text[: limit - 1]}…", quote=True)


def plain(text: str) -> str:
    """Return text without ANSI sequences, control characters and direction marks."""
    lines = _ANSI.sub("", text).split("\n")
    return "\n".join(line if line.isprintable() else "".join(filter(_is_shown, line)) for line in lines)


def _is_shown(letter: str) -> bool:
    return letter == "\t" or unicodedata.category(letter) not in ("Cc", "Cf", "Cs")


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], caption: str, *, hidden_caption: bool = False) -> str:
    """Return a table; `Safe` cells are HTML, and columns that start with `>` are right-aligned."""
    aligned = ["right" if column.startswith(">") else "left" for column in columns]
    head = "".join(
        f'<th scope="col" class="{align}">{inert(column.removeprefix(">"))}</th>'
        for column, align in zip(columns, aligned, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(f'<td class="{align}">{_cell(cell)}</td>' for cell, align in zip(row, aligned, strict=True)) + "</tr>"
        for row in rows
    )
    shown = f'<caption class="{"sr-only" if hidden_caption else ""}">{inert(caption)}</caption>'
    label = inert(caption)
    return (
        f'<div class="ft-scroll" role="region" aria-label="{label}" tabindex="0"><table>{shown}'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def stamp_of(name: str, html: str) -> str:
    """Return the checksum of a part's HTML."""
    return f"{zlib.crc32(f'{name} {html}'.encode()):08x}"


def interval_text(lower: float, upper: float) -> str:
    """Return both ends of an interval, signed."""
    return tr("{low} to {high}", low=f"{lower:+.4f}", high=f"{upper:+.4f}")


def action(**message: object) -> str:
    """Return button attributes that send a message to the page."""
    return f'data-act="{inert(json.dumps(message), 10**6)}"'


class Safe(str):
    """HTML made by this app, not escaped again."""


def part(name: str, parts: Mapping[str, str], css: str = "", identity: str = "") -> Safe:
    """Return the element of a part, whose HTML `parts.js` replaces."""
    html, named = parts.get(name, ""), f' id="{identity}"' if identity else ""
    # without a stamp the browser fetches the part
    stamp = f' data-stamp="{stamp_of(name, html)}"' if name in parts else ""
    return Safe(f'<div data-part="{name}" class="{css}"{named}{stamp}>{html}</div>')


def as_on_page(text: str) -> str:
    """Return an engine message in page terms: settings as in a recipe, options as labels, commands as typed."""
    return "".join(part if is_command else with_labels(_as_in_recipe(part)) for is_command, part in _parts(text))


def _parts(text: str) -> Iterable[tuple[int, str]]:
    # split with one group: every second part is a command
    return ((number % 2, part) for number, part in enumerate(_COMMAND.split(text)))


def _as_in_recipe(text: str) -> str:
    return _OVERRIDE.sub(lambda match: f"{match[1]}: {match[2]}" if match[1] in setting_names() else match[0], text)


@cache
def setting_names() -> frozenset[str]:
    """Return the setting names of a recipe."""
    from finetune.settings.reference import settings_reference

    return frozenset(row.name for row in settings_reference())


def page_title(name: str) -> str:
    """Return the heading of a page."""
    return f'<h1 class="ft-title" data-title="{inert(tr(name))}">{inert(tr(name))}</h1>'


def note(text: str, kind: str = "") -> str:
    """Return one line of information."""
    return f'<p class="ft-note {kind}">{inert(text)}</p>'


def to_new_run(text: str) -> str:
    """Return a line after which the browser opens New run."""
    return f'<p class="ft-note" data-go="/" role="status">{inert(text)}</p>'


def _cell(value: Any) -> str:
    return value if isinstance(value, Safe) else inert("–" if value is None else value)
