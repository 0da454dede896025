"""How handlers are bound: quiet, not offered as an API, the newest input wins; and how our HTML is shown.

Not one goes through Gradio's queue. Its client opens a stream of server-sent events for each event and shuts it when the server
says that all were answered; an event that joins at that moment is never answered, and a page that ticks has such moments.
"""

from __future__ import annotations

from typing import Any

import gradio as gr

#: For ticks and re-plans: no spinner over what is shown, and no queue of stale requests.
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "trigger_mode": "always_last", "queue": False}
#: For buttons: one at a time.
BUTTON: dict[str, Any] = {"show_progress": "minimal", "api_visibility": "private", "trigger_mode": "once", "queue": False}


def show(value: str = "", elem_id: str | None = None) -> gr.HTML:
    """HTML of ours, in our own looks, without Gradio's script for clicks."""
    return gr.HTML(value, elem_id=elem_id, apply_default_css=False, js_on_load=None)
