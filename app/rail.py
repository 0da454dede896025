"""The rail as a part of each page, kept up to date."""

from __future__ import annotations

from pathlib import Path

import gradio as gr

from .context import Context
from .language import tr
from .machine import Machine
from .views import rail as view
from .views.binding import QUIET, show

_TICK_S = 3.0


def build(context: Context, machine: Machine, page: gr.Blocks, address: str) -> None:
    """The rail of the page at `address`, and the steps of a new run where it is one of them."""

    def status() -> str:
        return view.status(*machine.status())

    def steps() -> list[str]:
        return [status(), view.steps(address, _results(context))]

    with gr.Column(elem_id="ft-rail"):
        show(lambda: view.rail(address))
        now = show(elem_id="ft-rail-now")
        show(view.foot)
    show('<div id="ft-main" tabindex="-1"></div>')
    is_step = address in view.NEW_RUN
    update, shown = (steps, [now, show(lambda: view.steps(address), elem_id="ft-steps")]) if is_step else (status, [now])
    page.load(update, None, shown, **QUIET)
    gr.Timer(_TICK_S).tick(update, None, shown, **QUIET)


def _results(context: Context) -> dict[str, str]:
    """What the draft has, by the step that chooses it."""
    recipe = context.draft.read().recipe
    if recipe is None:
        return {}
    path = recipe.dataset.path
    data = Path(path).name if isinstance(path, str) else tr("{n} files", n=len(path))
    return {"model": Path(recipe.model_name_or_path).name, "data": data}
