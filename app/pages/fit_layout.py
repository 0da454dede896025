"""The components of the Fit page, in their order.

Those of the class ft-own-SETTING are fit.js's, and no handler's: Gradio would send what a box holds when an earlier request
ends, and write a late answer into a box that is being typed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradio as gr

from finetune.card.device_selection import cards_here
from finetune.recipe import shipped_recipes

from ..planning.catalogue import card_choices
from ..views.binding import show

#: Setting -> name and identity of its box.
NUMBERS = {
    "max_length": ("Longest row, tokens", "length"), "lora_r": ("LoRA rank", "rank"),
    "effective_batch_size": ("Rows per step", "batch"),
}  # fmt: skip
#: All settings: fetched when a person opens it, as its 80 fields would be a third of what the page loads.
_ADVANCED = (
    '<details class="ft-box" id="fit-advanced"><summary>Advanced: all recipe settings</summary>'
    '<div id="fit-fields"></div></details>'
)
#: Setting -> lowest and highest value that its box takes.
RANGES = {"max_length": (64, 16384), "lora_r": (1, 256), "effective_batch_size": (1, 256)}
#: Setting whose largest value is searched -> what its button says.
LARGEST = {"max_length": "Longest row", "lora_r": "LoRA rank", "per_device_train_batch_size": "Rows at a time"}


@dataclass(frozen=True)
class Largest:
    """The buttons by setting, where the answer is shown, and the timer that follows a search."""

    buttons: dict[str, Any]
    answer: Any
    timer: Any


@dataclass(frozen=True)
class Layout:
    """Components by what they are for. `answer`: what a plan fills, in the order of the handler's values."""

    card: Any
    bars: list[Any]
    refused: Any
    trouble: Any
    verdict: Any
    ledger: Any
    facts: Any
    smaller: Any
    reasons: Any
    others: Any
    largest: Largest
    ready: Any
    force: Any
    start: Any
    progress: Any
    command: Any
    load: Any
    shipped: Any
    act: Any

    @property
    def answer(self) -> list[Any]:
        """What a plan fills."""
        shown = [self.trouble, self.verdict, self.ledger, self.facts, self.smaller, self.reasons, self.others]
        return [*shown, self.ready, self.force, self.start]


def lay_out() -> Layout:
    """Make the components."""
    head = _head()
    middle = _middle()
    with gr.Column(elem_classes="ft-box"):
        show("<h2>What was chosen, and why</h2>")
        reasons = show(elem_id="fit-reasons")
    show(_ADVANCED)
    return Layout(**head, **middle, **_bottom(), **_drawer(), reasons=reasons)


def _head() -> dict[str, Any]:
    """The verdict, the memory and the facts."""
    parts: dict[str, Any] = {"refused": show(elem_id="fit-refused"), "trouble": show(elem_id="fit-trouble")}
    with gr.Column(elem_id="fit-answer", elem_classes="ft-box"):
        show('<p role="status">planning …</p>', elem_id="fit-planning")
        with gr.Row(elem_id="fit-top"):
            parts["verdict"] = show('<h1 class="ft-title" data-title="Fit">Fit</h1>', elem_id="fit-verdict")
            cards: list[Any] = [("This machine", "auto"), *cards_here(), ("CPU", "cpu"), *card_choices()]
            parts["card"] = gr.Dropdown(cards, label="GPU", allow_custom_value=True, elem_id="fit-card")
        parts["ledger"], parts["facts"] = show(elem_id="fit-ledger"), show(elem_id="fit-facts")
    parts["smaller"] = show(elem_id="fit-smaller")
    return parts


def _middle() -> dict[str, Any]:
    """What if, and other plans."""
    bars = []
    with gr.Row(elem_id="fit-more"):
        with gr.Column(scale=13, min_width=300, elem_classes="ft-box", elem_id="fit-whatif"):
            show('<h2>What if</h2><p class="ft-note">Each with its own fastest plan; an outline is not planned yet.</p>')
            for name, (label, identity) in NUMBERS.items():
                lowest, highest = RANGES[name]
                with gr.Row(elem_classes="ft-whatif"):
                    gr.Number(
                        label=label, minimum=lowest, maximum=highest, precision=0, elem_id=f"fit-{identity}", min_width=110,
                        elem_classes=f"ft-own-{name}",
                    )  # fmt: skip
                    bars.append(show(elem_id=f"fit-{identity}-bars"))
            largest = _largest()
        with gr.Column(scale=10, min_width=300, elem_classes="ft-box"):
            show('<h2>Other plans</h2><p class="ft-note">The same settings, other ways to fit.</p>')
            others = show(elem_id="fit-alternatives")
    return {"bars": bars, "others": others, "largest": largest}


def _largest() -> Largest:
    """The search of the largest value that fits."""
    show('<p class="ft-note">The largest that fits:</p>')
    with gr.Row():
        buttons = {name: gr.Button(label, size="sm", elem_id=f"fit-largest-{name}") for name, label in LARGEST.items()}
    return Largest(buttons, show(elem_id="fit-largest"), gr.Timer(1.0, active=False))


def _bottom() -> dict[str, Any]:
    """The bar with the start."""
    with gr.Row(elem_id="fit-go"):
        parts: dict[str, Any] = {"ready": show(elem_id="fit-ready"), "progress": show(elem_id="fit-progress")}
        parts["force"] = gr.Checkbox(label="Start anyway", visible=False, elem_id="fit-force", container=False)
        opens = 'aria-expanded="false" aria-controls="fit-drawer"'
        show(f'<button type="button" class="ft-plain" data-drawer {opens}>Recipe</button>')
        parts["start"] = gr.Button("Start training", variant="primary", elem_id="fit-start", interactive=False)
    parts["act"] = gr.Textbox(visible="hidden", elem_id="fit-act")
    return parts


def _drawer() -> dict[str, Any]:
    """Recipe and command, in step with the page."""
    parts: dict[str, Any] = {}
    with gr.Column(elem_id="fit-drawer"):
        show(
            '<div class="ft-drawer-head"><h2>Recipe</h2><button type="button" class="ft-plain" data-drawer>Close</button></div>'
        )
        gr.Textbox(
            label="Recipe", lines=14, max_lines=24, buttons=["copy"], elem_id="fit-yaml", elem_classes="ft-mono ft-own-text"
        )
        parts["command"] = gr.Textbox(
            label="The same as a command", interactive=False, buttons=["copy"], elem_id="fit-command", elem_classes="ft-mono"
        )
        with gr.Row():
            show('<a class="ft-button" href="/ft/recipe.yaml" download="recipe.yaml">Download</a>')
            parts["load"] = gr.UploadButton("Upload a recipe", file_types=[".yaml", ".yml"], size="sm", elem_id="fit-load")
        parts["shipped"] = gr.Dropdown(["", *shipped_recipes()], label="Recipes", elem_id="fit-shipped")
    return parts
