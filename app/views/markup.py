"""Templates and escaping: names, rows, chat and logs can't add markup, colours or text direction."""

from __future__ import annotations

import html
import json
import re
import unicodedata
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.units import format_bytes, format_count, gib

from ..language import tr, tr_n

_ANSI = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[@-Z\\-_])")


def inert(value: Any, limit: int = 2000) -> str:
    """Return `value` as text that browsers never interpret, cut to `limit` characters."""
    text = plain(str(value))
    return html.escape(text if len(text) <= limit else f"{text[: limit - 1]}…", quote=True)


def plain(text: str) -> str:
    """Return text without ANSI sequences, control characters and direction marks."""
    text = _ANSI.sub("", text)
    if text.isprintable():
        return text
    letters = {*text} - {"\n", "\t"}
    return text.translate({ord(letter): None for letter in letters if unicodedata.category(letter) in ("Cc", "Cf", "Cs")})


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], caption: str, *, hidden_caption: bool = False) -> Safe:
    """Return a table; `Safe` cells are HTML, and columns that start with `>` are right-aligned."""
    return render("table", columns=columns, rows=rows, caption=caption, is_hidden=hidden_caption)


def stamp_of(name: str, html: str) -> str:
    """Return a checksum that tells whether a part has changed."""
    return f"{zlib.crc32(f'{name} {html}'.encode()):08x}"


class Safe(str):
    """HTML made by this app, not escaped again."""


def action(**message: object) -> Safe:
    """Return button attributes that send a message to the page."""
    return Safe(f'data-act="{inert(json.dumps(message), 10**6)}"')


def part(name: str, parts: Mapping[str, str], css: str = "", identity: str = "") -> Safe:
    """Return the element of a part, whose HTML `parts.js` replaces."""
    html, id_attribute = parts.get(name, ""), f' id="{identity}"' if identity else ""
    # without a stamp the browser fetches the part
    stamp = f' data-stamp="{stamp_of(name, html)}"' if name in parts else ""
    return Safe(f'<div data-part="{name}" class="{css}"{id_attribute}{stamp}>{html}</div>')


def page_title(name: str) -> str:
    """Return the heading of a page."""
    return f'<h1 class="ft-title" data-title="{inert(tr(name))}">{inert(tr(name))}</h1>'


def note(text: str) -> Safe:
    """Return one line of information."""
    return Safe(f'<p class="ft-note">{inert(text)}</p>')


def problem(title: str, problems: Sequence[str], fix: str = "") -> Safe:
    """Return an error box, which screen readers announce."""
    return render("problem", title=tr(title), problems=problems[:20], fix=fix)


def problem_of(error: Exception) -> Safe:
    """Return the box of any error."""
    if isinstance(error, FinetuneError):
        return problem(error.title, error.problems, error.fix)
    return problem(FinetuneError.title, [str(error)])


def chart_element(runs: Sequence[str], labels: Sequence[str] = ()) -> Safe:
    """Return the chart of one run, or of several to compare."""
    labels_attribute = f' data-labels="{inert(json.dumps([*labels]), 10_000)}"' if labels else ""
    # without points, which the element fetches: a page does not redraw an equal element
    return Safe(f'<ft-chart data-runs="{inert(json.dumps([*runs]), 10_000)}"{labels_attribute}></ft-chart>')


def pixels(width: int, height: int) -> str:
    """Return `640 x 480 pixels`."""
    return tr("{width} x {height} pixels", width=f"{width:,}", height=f"{height:,}")


@cache
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    from . import words  # here: imports stay at most ten deep

    # stricter than autoescape: `inert` also removes colours and text direction
    def escape_unless_safe(value: Any) -> Any:
        return value if isinstance(value, Markup) else Markup(value if isinstance(value, Safe) else inert(value))

    folder = Path(__file__).parents[1] / "templates"
    environment = Environment(
        loader=FileSystemLoader(folder), autoescape=True, finalize=escape_unless_safe, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.globals |= {name: value for name, value in vars(words).items() if not name.startswith("_")}
    environment.globals |= {
        "tr": tr, "tr_n": tr_n, "action": action, "part": part,
        "table": table, "problem": problem, "pixels": pixels, "gib": gib, "format_count": format_count,
        "format_bytes": format_bytes,
    }  # fmt: skip
    return environment


def render(name: str, /, **values: Any) -> Safe:
    """Return the HTML of a template."""
    return Safe(_environment().get_template(f"{name}.html").render(**values).strip())
