"""Escapes untrusted text: names, rows, chat and log lines can't add markup, scripts, colours or text direction."""

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
#: A command stays as it is typed, to the end of its line or of its brackets.
_COMMAND = re.compile(r"(\b(?:docker|finetune|git|hf|(?:uv )?pip|lm-eval) [a-z]+ [^\n)）]*)")
_ANSI = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[@-Z\\-_])")


def inert(value: Any, limit: int = 2000) -> str:
    """`value` as text that a browser shows and never interprets; longer than `limit` characters is cut, with an ellipsis."""
    text = plain(str(value))
    return html.escape(text if len(text) <= limit else f"{text[: limit - 1]}…", quote=True)


def plain(text: str) -> str:
    """Text without ANSI sequences, control characters and marks that change the writing direction."""
    lines = _ANSI.sub("", text).split("\n")
    return "\n".join(line if line.isprintable() else "".join(filter(_is_shown, line)) for line in lines)


def _is_shown(letter: str) -> bool:
    return letter == "\t" or unicodedata.category(letter) not in ("Cc", "Cf", "Cs")


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], caption: str, *, hidden_caption: bool = False) -> str:
    """A table of texts; a cell that is a `Safe` is HTML already. Columns that start with `>` are right-aligned."""
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
    """The checksum by which a browser says which HTML of a part it shows."""
    return f"{zlib.crc32(f'{name} {html}'.encode()):08x}"


def interval_text(lower: float, upper: float) -> str:
    """Both ends of an interval with their signs."""
    return tr("{low} to {high}", low=f"{lower:+.4f}", high=f"{upper:+.4f}")


def action(**message: object) -> str:
    """Attributes of a button whose press sends this to the page's handler of actions."""
    return f'data-act="{inert(json.dumps(message), 10**6)}"'


class Safe(str):
    """HTML made by this app, not escaped again."""


def part(name: str, parts: Mapping[str, str], css: str = "", identity: str = "") -> Safe:
    """The element of a part, whose HTML parts.js replaces; it is filled when the part is among `parts`."""
    html, named = parts.get(name, ""), f' id="{identity}"' if identity else ""
    stamp = f' data-stamp="{stamp_of(name, html)}"' if name in parts else ""
    return Safe(f'<div data-part="{name}" class="{css}"{named}{stamp}>{html}</div>')


def as_on_page(text: str) -> str:
    """A message of the engine: settings as a recipe has them, `key: value`, options as the page's labels, commands as typed."""
    return "".join(part if is_command else with_labels(_as_in_recipe(part)) for is_command, part in _parts(text))


def _parts(text: str) -> Iterable[tuple[int, str]]:
    """The text between commands, and the commands, with whether it is one."""
    return ((number % 2, part) for number, part in enumerate(_COMMAND.split(text)))


def _as_in_recipe(text: str) -> str:
    return _OVERRIDE.sub(lambda match: f"{match[1]}: {match[2]}" if match[1] in setting_names() else match[0], text)


@cache
def setting_names() -> frozenset[str]:
    """The settings of a recipe."""
    from finetune.settings.reference import settings_reference

    return frozenset(row.name for row in settings_reference())


def page_title(name: str) -> str:
    """The heading of a page before it has a better one; `name` is one of its steps' or the rail's."""
    return f'<h1 class="ft-title" data-title="{inert(tr(name))}">{inert(tr(name))}</h1>'


def note(text: str, kind: str = "") -> str:
    """One line of information."""
    return f'<p class="ft-note {kind}">{inert(text)}</p>'


def to_new_run(text: str) -> str:
    """A line after which the browser opens New run."""
    return f'<p class="ft-note" data-go="/" role="status">{inert(text)}</p>'


def _cell(value: Any) -> str:
    return value if isinstance(value, Safe) else inert("–" if value is None else value)
