"""Options for Gradio event handlers (no API, newest input wins), and the HTML component.

No handler uses Gradio's queue. Its client opens a stream of server-sent events for each event and closes it when the server
says that all were answered; an event that joins at that moment is never answered, and a page with timers has such moments.
"""

from __future__ import annotations

from typing import Any

import gradio as gr

#: For timers and re-planning: no spinner over the content, and no queue of stale requests.
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "trigger_mode": "always_last", "queue": False}
#: For buttons: one at a time.
BUTTON: dict[str, Any] = {"show_progress": "minimal", "api_visibility": "private", "trigger_mode": "once", "queue": False}


def show(value: str = "", elem_id: str | None = None) -> gr.HTML:
    """An HTML component without Gradio's styles and click script."""
    return gr.HTML(value, elem_id=elem_id, apply_default_css=False, js_on_load=None)
