"""HTML templates of app/templates, with escaped values."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ..language import tr, tr_n
from .markup import Safe, action, as_on_page, inert, part


@functools.cache
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    # stricter than autoescape: `inert` also removes colours and text direction
    def shown(value: Any) -> Any:
        return value if isinstance(value, Markup) else Markup(value if isinstance(value, Safe) else inert(value))

    folder = Path(__file__).parents[1] / "templates"
    environment = Environment(
        loader=FileSystemLoader(folder), autoescape=True, finalize=shown, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.globals.update(
        tr=tr, tr_n=tr_n, action=lambda **message: Safe(action(**message)), as_on_page=as_on_page, part=part
    )
    return environment


def render(name: str, /, **values: Any) -> Safe:
    """Return the HTML of a template."""
    return Safe(_environment().get_template(f"{name}.html").render(**values).strip())
