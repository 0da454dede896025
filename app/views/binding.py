"""Options for Gradio event handlers (no API, newest input wins), the HTML component, and the updates of a page.

No handler uses Gradio's queue. Its client opens a stream of server-sent events for each event and closes it when the server
says that all were answered; an event that joins at that moment is never answered, and a page with timers has such moments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradio as gr

from ..language import FIRST_HTML

#: For timers and re-planning: no spinner over the content, and no queue of stale requests.
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "trigger_mode": "always_last", "queue": False}


def show(value: str | Callable[[], str] = "", elem_id: str | None = None) -> gr.HTML:
    """An HTML component without Gradio's styles and click script; a function makes its first value for each request."""
    if callable(value):
        render, value = value, value()
        FIRST_HTML[value] = render
    return gr.HTML(value, elem_id=elem_id, apply_default_css=False, js_on_load=None)


def change_trigger(elem_id: str | None = None) -> gr.HTML:
    """A hidden component with a fingerprint of all that is shown: its `change` updates the page, an idle tick sends only this.

    A tick that skips its outputs would leak: Gradio makes a new component for each skipped output, and keeps it. The browser
    reports the change; a changed `gr.State` is only reported by Gradio's queue.
    """
    return gr.HTML(visible="hidden", elem_id=elem_id, apply_default_css=False, js_on_load=None)


def fingerprint(*shown: Any) -> str:
    """A short text that differs when one of the values does."""
    return f"{hash(repr(shown)):x}"
