"""The rail as a part of each page, kept up to date."""

from __future__ import annotations

import gradio as gr

from .machine import Machine
from .views import rail as view
from .views.binding import QUIET, show

_TICK_S = 3.0


def build(machine: Machine, page: gr.Blocks, address: str) -> None:
    """The rail of the page at `address`, and the steps of a new run where it is one of them."""

    def status() -> str:
        return view.status(*machine.status())

    with gr.Column(elem_id="ft-rail"):
        show(view.rail(address))
        now = show(elem_id="ft-rail-now")
        show(view.foot())
    show('<div id="ft-main" tabindex="-1"></div>')
    if address in view.NEW_RUN:
        show(view.steps(address))
    page.load(status, None, now, **QUIET)
    gr.Timer(_TICK_S).tick(status, None, now, **QUIET)
