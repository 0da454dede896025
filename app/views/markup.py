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

from finetune.errors import FinetuneError, RecipeError
from finetune.units import format_bytes, format_count, gib

from ..language import mark, tr, tr_n

_OVERRIDE = re.compile(r"(?<![\w./-])([a-z][a-z0-9_.]*)=([^\s,;=]+)")
#: A command, up to the end of its line or bracket; shown unchanged.
_COMMAND = re.compile(r"(\b(?:docker|finetune|git|hf|(?:uv )?pip) [a-z]+ [^\n)）]*)")
#: Values of `finetune eval --score` by the page's label.
SCORES = {
    mark("Chosen by the answers"): "", mark("Exact match"): "exact", mark("Contains the expected answer"): "contains",
    mark("Regular expression"): "regex", mark("JSON, field by field"): "json", mark("Last number"): "numeric",
    mark("Calls of tools"): "calls", mark("Token accuracy"): "tokens", mark("Loss only, no answers"): "loss",
}  # fmt: skip
_OPTION_LABELS = {
    "score": mark("Score"), "pattern": mark("Pattern"), "tolerance": mark("Tolerance"), "data": mark("Rows"),
    "output": mark("Folder in the run"),
    "type": mark("Type"), "to": mark("Separate files for base and adapter"), "public": mark("Public, else private"),
    "force": mark("Start anyway"),
}  # fmt: skip
_SCORE_LABELS = {value: label for label, value in SCORES.items() if value}
#: An option and its value: number, quoted text, score, GGUF type, or the placeholder `FILE`.
_OPTION = re.compile(
    rf"(?<![\w-])--({'|'.join(_OPTION_LABELS)})\b(?!-)(?: (FILE|'[^']*'|\d[\d.]*\d|{'|'.join(_SCORE_LABELS)}|[a-z]+\d\w*)\b)?"
)
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


def action(**message: object) -> str:
    """Return button attributes that send a message to the page."""
    return f'data-act="{inert(json.dumps(message), 10**6)}"'


class Safe(str):
    """HTML made by this app, not escaped again."""


def part(name: str, parts: Mapping[str, str], css: str = "", identity: str = "") -> Safe:
    """Return the element of a part, whose HTML `parts.js` replaces."""
    html, id_attribute = parts.get(name, ""), f' id="{identity}"' if identity else ""
    # without a stamp the browser fetches the part
    stamp = f' data-stamp="{stamp_of(name, html)}"' if name in parts else ""
    return Safe(f'<div data-part="{name}" class="{css}"{id_attribute}{stamp}>{html}</div>')


def as_on_page(text: str) -> str:
    """Return a finetune message in page terms: settings as in recipes, options as labels."""
    # split with one group: every second piece is a command, which stays
    pieces = _COMMAND.split(text)
    pieces[::2] = [_OPTION.sub(_labelled, _OVERRIDE.sub(_as_in_recipe, piece)) for piece in pieces[::2]]
    return "".join(pieces)


def _as_in_recipe(override: re.Match[str]) -> str:
    return f"{override[1]}: {override[2]}" if override[1] in _setting_names() else override[0]


@cache
def _setting_names() -> frozenset[str]:
    from finetune.settings.reference import settings_reference  # here: imports stay at most ten deep

    return frozenset(row.name for row in settings_reference())


def _labelled(option: re.Match[str]) -> str:
    # `--tolerance 0.01` is “Tolerance: 0.01” on the page
    label, value = tr(_OPTION_LABELS[option[1]]), option[2] or ""
    if value not in ("", "FILE"):
        label = tr("{change}: {result}", change=label, result=tr(_SCORE_LABELS.get(value, value)))
    return f"“{label}”"


def page_title(name: str) -> str:
    """Return the heading of a page."""
    return f'<h1 class="ft-title" data-title="{inert(tr(name))}">{inert(tr(name))}</h1>'


def note(text: str, kind: str = "", attributes: str = "") -> Safe:
    """Return one line of information."""
    return Safe(f'<p class="ft-note {kind}"{attributes}>{inert(text)}</p>')


#: Attributes of a note after which the browser opens New run.
TO_NEW_RUN = ' data-go="/" role="status"'


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


#: Errors in handling a malformed message, which the page's scripts never send.
MALFORMED_MESSAGE = (ValueError, KeyError, IndexError, AttributeError, TypeError)


def refusal(error: Exception) -> Safe:
    """Return the box of an error in handling a message."""
    if isinstance(error, RecipeError):
        title = tr_n("{n} setting to correct", "{n} settings to correct", len(error.problems))
        return problem(title, error.problems, error.fix)
    # a UnicodeError, though a ValueError, comes from the text of a file
    if isinstance(error, MALFORMED_MESSAGE) and not isinstance(error, UnicodeError):
        return problem(tr("Not done"), [tr("the server does not know this request")], tr("Reload the page."))
    return problem_of(error)


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
        "tr": tr, "tr_n": tr_n, "action": lambda **message: Safe(action(**message)), "as_on_page": as_on_page, "part": part,
        "table": table, "problem": problem, "pixels": pixels, "gib": gib, "format_count": format_count,
        "format_bytes": format_bytes,
    }  # fmt: skip
    return environment


def render(name: str, /, **values: Any) -> Safe:
    """Return the HTML of a template."""
    return Safe(_environment().get_template(f"{name}.html").render(**values).strip())
