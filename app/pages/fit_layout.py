"""The components of the Fit page, in their order.

Those of the class ft-own-SETTING are fit.js's, and no handler's: Gradio would send what a box holds when an earlier request
ends, and write a late answer into a box that is being typed in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gradio as gr

from finetune.card.device_selection import cards_here
from finetune.recipe import shipped_recipes

from ..language import mark, tr
from ..planning.catalogue import card_choices
from ..views import recipe_form
from ..views.binding import change_trigger, show
from ..views.markup import note, page_title
from ..views.words import SETTING_NAMES

if TYPE_CHECKING:
    from finetune.settings import Recipe

    from ..planning.draft import Version

#: Setting -> name and identity of its box.
NUMBERS = {
    "max_length": (mark("Longest row, tokens"), "length"), "lora_r": (SETTING_NAMES["lora_r"], "rank"),
    "effective_batch_size": (SETTING_NAMES["effective_batch_size"], "batch"),
}  # fmt: skip


#: All settings: fetched when a person opens it, as its 80 fields would be a third of what the page loads.
def _advanced() -> str:
    summary = tr("Advanced: all recipe settings")
    return f'<details class="ft-box" id="fit-advanced"><summary>{summary}</summary><div id="fit-fields"></div></details>'


#: Setting -> lowest and highest value that its box takes.
RANGES = {"max_length": (64, 16384), "lora_r": (1, 256), "effective_batch_size": (1, 256)}


@dataclass(frozen=True)
class Layout:
    """Components with a handler, by what they are for."""

    card: Any
    measure: list[Any]
    force: Any
    start: Any
    progress: Any
    load: Any
    shipped: Any
    act: Any
    acted: Any


def lay_out() -> Layout:
    """Make the components."""
    head = _head()
    middle = _middle()
    with gr.Column(elem_classes="ft-box"):
        show(lambda: f"<h2>{tr('What was chosen, and why')}</h2>")
        _part("reasons")
    show(_advanced)
    return Layout(**head, **middle, **_bottom(), **_drawer())


def _part(name: str, first: Callable[[], str] = str) -> None:
    """An element that fit.js fills with what the server answers; `first` makes what it has before."""
    show(lambda: f"<div data-part>{first()}</div>", elem_id=f"fit-{name}")


def _head() -> dict[str, Any]:
    parts: dict[str, Any] = {}
    _part("refused")
    _part("trouble")
    with gr.Column(elem_id="fit-answer", elem_classes="ft-box"):
        show(_planning, elem_id="fit-planning")
        with gr.Row(elem_id="fit-top"):
            _part("verdict", functools.partial(page_title, "Fit"))
            cards: list[Any] = [(mark("This machine"), "auto"), *cards_here(), ("CPU", "cpu"), *card_choices()]
            parts["card"] = gr.Dropdown(cards, label="GPU", allow_custom_value=True, elem_id="fit-card")
        _part("ledger")
        _part("facts")
    _part("smaller")
    return parts


def _middle() -> dict[str, Any]:
    with gr.Row(elem_id="fit-more"):
        with gr.Column(scale=13, min_width=300, elem_classes="ft-box", elem_id="fit-numbers"):
            show(lambda: _headed(mark("Numbers"), tr("The plan follows what you type.")))
            for name, (label, identity) in NUMBERS.items():
                lowest, highest = RANGES[name]
                with gr.Row(elem_classes="ft-number"):
                    gr.Number(
                        label=label, minimum=lowest, maximum=highest, precision=0, elem_id=f"fit-{identity}", min_width=110,
                        elem_classes=f"ft-own-{name}",
                    )  # fmt: skip
                    _part(f"{identity}-auto")
            button = gr.Button(mark("Measure what 4-bit and 8-bit weights cost"), size="sm", elem_id="fit-measure")
            measure = [button, show(elem_id="fit-measured"), gr.Timer(1.0, active=False)]
        with gr.Column(scale=10, min_width=300, elem_classes="ft-box"):
            show(lambda: _headed(mark("Other plans"), tr("The same settings, other ways to fit.")))
            _part("alternatives")
    return {"measure": measure}


def _bottom() -> dict[str, Any]:
    with gr.Row(elem_id="fit-go"):
        _part("ready")
        parts: dict[str, Any] = {"progress": show(elem_id="fit-progress")}
        parts["force"] = gr.Checkbox(label=mark("Start anyway"), elem_id="fit-force", container=False)
        opens = 'aria-expanded="false" aria-controls="fit-drawer"'
        show(lambda: f'<button type="button" class="ft-plain" data-drawer {opens}>{tr("Recipe")}</button>')
        parts["start"] = gr.Button(mark("Start training"), variant="primary", elem_id="fit-start")
    parts["act"], parts["acted"] = gr.Textbox(visible="hidden", elem_id="fit-act"), change_trigger()
    return parts


def _drawer_head() -> str:
    close = f'<button type="button" class="ft-plain" data-drawer>{tr("Close")}</button>'
    return f'<div class="ft-drawer-head"><h2>{tr("Recipe")}</h2>{close}</div>'


def _planning() -> str:
    """What is said while a plan is made; and for fit.js, the stamps of the draft and of the one that the plan shown is of."""
    return f'<p role="status">{tr("planning …")} <span></span></p><i id="fit-asked" hidden></i><i id="fit-answered" hidden></i>'


def _headed(title: str, explained: str) -> str:
    return f"<h2>{tr(title)}</h2>{note(explained)}"


def _drawer() -> dict[str, Any]:
    """Recipe and command, in step with the page."""
    parts: dict[str, Any] = {}
    with gr.Column(elem_id="fit-drawer"):
        show(_drawer_head)
        gr.Textbox(
            label=mark("Recipe"),
            lines=14,
            max_lines=24,
            buttons=["copy"],
            elem_id="fit-yaml",
            elem_classes="ft-mono ft-own-text",
        )
        gr.Textbox(
            label=mark("The same as a command"), interactive=False, buttons=["copy"], elem_id="fit-command",
            elem_classes="ft-mono ft-own-command",
        )  # fmt: skip
        with gr.Row():
            show(lambda: f'<a class="ft-button" href="/ft/recipe.yaml" download="recipe.yaml">{tr("Download")}</a>')
            upload = mark("Upload a recipe")
            parts["load"] = gr.UploadButton(upload, file_types=[".yaml", ".yml"], size="sm", elem_id="fit-load")
        parts["shipped"] = gr.Dropdown(["", *shipped_recipes()], label=mark("Recipes"), elem_id="fit-shipped")
    return parts


def drafted(version: Version) -> dict[str, Any]:
    """The draft as fit.js shows it."""
    edited = version.edited
    return {
        "read": version.read_s, "stamp": version.stamp, "text": edited.text, "numbers": numbers_of(edited.recipe),
        "values": recipe_form.changed_values(edited),
    }  # fmt: skip


def numbers_of(settings: Recipe | None) -> dict[str, int]:
    """The settings that have a box for their number and are not left to the planner."""
    numbers = {name: getattr(settings, name, None) for name in RANGES}
    return {name: number for name, number in numbers.items() if isinstance(number, int)}
