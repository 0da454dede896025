"""Fit: the plan for a card, its memory by part, suggestions, and Run. Form, recipe text and command line always agree."""

from __future__ import annotations

import functools
import shutil
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import gradio as gr

from finetune.card.device_selection import cards_here
from finetune.errors import FinetuneError
from finetune.planner.plan import Plan, Verdict
from finetune.recipe import AUTO, shipped_recipes, write_recipe

from ..context import Context
from ..planning.catalogue import card_choices
from ..planning.draft import Edited, command_line
from ..views import plan as plan_view
from ..views import recipe_form
from ..views.binding import BUTTON, QUIET, show
from ..views.markup import inert, note, problem

_SUGGESTIONS = 5
_TICK_S = 1.0
_PLAN_GOOD_S = 10.0


def build(context: Context, page: gr.Blocks) -> None:
    """Components, and the handlers that keep them in agreement."""
    view = _View(context)
    show('<h1 class="ft-title" data-title="Fit">Does it fit?</h1>')
    with gr.Row(elem_classes="ft-controls"):
        cards: list[Any] = ["auto", *cards_here(), "cpu", *card_choices()]
        info = "auto: this machine's card"
        card = gr.Dropdown(cards, label="Card", info=info, allow_custom_value=True, elem_id="fit-card")
        length = gr.Slider(64, 16384, step=64, label="Max length", info="tokens per row", elem_id="fit-length")
        rank = gr.Slider(1, 256, step=1, label="LoRA rank", info="r of each adapter", elem_id="fit-rank")
        batch = gr.Slider(1, 256, step=1, label="Effective batch", info="rows per step", elem_id="fit-batch")
        price = gr.Number(0.0, label="Price per hour", minimum=0, info="optional, for the cost", elem_id="fit-price")
    trouble = show(elem_id="fit-trouble")
    with gr.Row():
        with gr.Column(scale=3, min_width=320):
            verdict = show('<p class="ft-note"><span class="ft-busy"></span> planning</p>', elem_id="fit-verdict")
            ledger = show(elem_id="fit-ledger")
            show("<h2>Ways to use less memory</h2>")
            suggested = [
                gr.Button(visible=False, size="sm", elem_id=f"fit-suggestion-{number}") for number in range(_SUGGESTIONS)
            ]
            no_suggestion = show()
        with gr.Column(scale=2, min_width=320):
            text = gr.Textbox(
                label="Recipe", lines=16, max_lines=30, buttons=["copy"], elem_id="fit-yaml", elem_classes="ft-mono"
            )
            command = gr.Textbox(
                label="The same as a command",
                interactive=False,
                buttons=["copy"],
                elem_id="fit-command",
                elem_classes="ft-mono",
            )
            with gr.Row():
                show('<a class="ft-button" href="/ft/recipe.yaml" download="recipe.yaml">Download</a>')
                load = gr.UploadButton("Upload a recipe", file_types=[".yaml", ".yml"], size="sm", elem_id="fit-load")
                back = gr.Button("Reset sliders to auto", size="sm", elem_id="fit-auto")
            shipped = gr.Dropdown(["", *shipped_recipes()], label="Start from a shipped recipe", elem_id="fit-shipped")
            force = gr.Checkbox(label="Run although it does not fit", visible=False, elem_id="fit-force")
            start = gr.Button("Run", variant="primary", elem_id="fit-start")
            progress = show(elem_id="fit-progress")
    with gr.Accordion("Settings and reasons", open=True):
        reasons = show(elem_id="fit-reasons")
    with gr.Accordion("Alternatives", open=True):
        others = show(elem_id="fit-alternatives")
        compare = gr.Button("Compare alternatives", size="sm", elem_id="fit-compare")
    with gr.Accordion("Advanced: all recipe settings", open=False, elem_id="fit-advanced"):
        show(note("trust_remote_code is not here: a model's own code can be allowed on the command line only."))
        rows = recipe_form.build()
    seen, mine, overrides, stamp = gr.State(0), gr.State(""), gr.State([]), gr.State(0)
    buttons = [*suggested, command, force, start, compare]
    shown = [trouble, verdict, ledger, reasons, others, no_suggestion, *buttons, overrides, seen]
    form = [card, length, rank, batch]
    everything = [*shown, text, *form, *(component for _, component in rows)]
    view.rows = [field for field, _ in rows]

    page.load(view.everything, price, everything, **QUIET)
    gr.Timer(_TICK_S).tick(view.tick, [mine, stamp], [progress, stamp], **QUIET)
    stamp.change(view.if_changed, [seen, price], everything, **QUIET)
    for component, name in ((length, "max_length"), (rank, "lora_r"), (batch, "effective_batch_size")):
        component.input(functools.partial(view.slide, name), [component, price], [*shown, text], **QUIET)
    card.input(functools.partial(view.slide, "gpu"), [card, price], [*shown, text], **QUIET)
    price.input(view.reprice, price, [verdict, others], **QUIET)
    text.change(view.write, [text, price], [*shown, *form, *(component for _, component in rows)], **QUIET)
    for field, component in rows:
        listen = component.input if field.choices else component.submit
        listen(functools.partial(view.set_field, field), [component, price], [*shown, text, *form], **QUIET)
        if not field.choices:
            component.blur(functools.partial(view.set_field, field), [component, price], [*shown, text, *form], **QUIET)
    for number, button in enumerate(suggested):
        button.click(functools.partial(view.suggestion, number), [overrides, price], everything, **BUTTON)
    compare.click(view.compare, price, everything, **BUTTON)
    back.click(view.back_to_auto, price, everything, **BUTTON)
    load.upload(view.load, [load, price], everything, **BUTTON)
    shipped.input(view.start_from, [shipped, price], everything, **BUTTON)
    start.click(view.start, force, [progress, mine], **BUTTON)


class _View:
    """Handlers: each changes the draft file or nothing, then shows the file's contents."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.rows: list[recipe_form.Field] = []
        self._planned: tuple[str, float, dict[str, Any]] | None = None
        self._compared = ""

    def everything(self, price: float | None) -> list[Any]:
        """Values of all components, from the draft."""
        edited = self.context.draft.read()
        shown, plan = self._shown(edited, price or 0.0)
        return [*shown, edited.text, *self._form(edited, plan), *(field.text(edited) for field in self.rows)]

    def if_changed(self, seen: int, price: float | None) -> list[Any]:
        """Values of all components when another tab has changed the draft, else nothing."""
        if seen == self.context.draft.stamp:
            return gr.skip()
        return self.everything(price)

    def slide(self, name: str, value: Any, price: float | None) -> list[Any]:
        """Set a slider's setting or the card, plan again, update the recipe's text."""
        edited = self.context.draft.change(**{name: int(value) if isinstance(value, float) else value})
        return [*self._shown(edited, price or 0.0)[0], edited.text]

    def write(self, text: str, price: float | None) -> list[Any]:
        """Update the form from the edited recipe text, which stays as typed.

        Bound to every change, as pasting is no input event in Gradio; text that equals the draft is skipped.
        """
        if text == self.context.draft.read().text:
            return gr.skip()
        edited = self.context.draft.write(text)
        shown, plan = self._shown(edited, price or 0.0)
        return [*shown, *self._form(edited, plan), *(field.text(edited) for field in self.rows)]

    def set_field(self, field: recipe_form.Field, text: Any, price: float | None) -> list[Any]:
        """Set one field under Advanced."""
        if field.text(self.context.draft.read()) == str(text).strip():
            return gr.skip()
        edited = self.context.draft.change(**recipe_form.as_settings(field, text))
        shown, plan = self._shown(edited, price or 0.0)
        return [*shown, edited.text, *self._form(edited, plan)]

    def suggestion(self, number: int, overrides: list[str], price: float | None) -> list[Any]:
        """Apply a suggestion."""
        if number < len(overrides):
            self.context.draft.apply(overrides[number])
        return self.everything(price)

    def back_to_auto(self, price: float | None) -> list[Any]:
        """Leave length, rank and batch to the planner."""
        self.context.draft.change(max_length=None, lora_r=None, effective_batch_size=None, per_device_train_batch_size=None)
        return self.everything(price)

    def load(self, path: str | None, price: float | None) -> list[Any]:
        """Replace the draft by an uploaded recipe file."""
        if path:
            self.context.draft.write(Path(path).read_bytes()[:1_000_001].decode("utf-8", "replace"))
            shutil.rmtree(Path(path).parent, ignore_errors=True)
        return self.everything(price)

    def start_from(self, name: str | None, price: float | None) -> list[Any]:
        """Replace the draft by a shipped recipe."""
        if name in shipped_recipes():
            self.context.draft.start_from(str(name))
        return self.everything(price)

    def reprice(self, price: float | None) -> list[Any]:
        """Update the cost only."""
        edited = self.context.draft.read()
        plan = self._plan(edited) if edited.recipe else None
        return (
            [plan_view.verdict(plan, price or 0.0), plan_view.alternatives(plan, price or 0.0)]
            if plan
            else [gr.skip(), gr.skip()]
        )

    def start(self, force: bool) -> list[Any]:
        """Queue the draft; the starter does what the command line does."""
        edited = self.context.draft.read()
        if edited.recipe is None:
            return [problem("The recipe needs a change", edited.problems, edited.fix), ""]
        entry = self.context.queue.add(edited.recipe, force=force)
        return [self._progress(entry.path.name), entry.path.name]

    def tick(self, mine: str, stamp: int) -> list[Any]:
        """Progress of the requested start, and whether the draft has changed."""
        self.context.queue.ensure_starter()
        now = self.context.draft.stamp
        return [self._progress(mine), gr.skip() if now == stamp else now]

    def _progress(self, mine: str) -> str:
        entries = [
            entry
            for entry in self.context.queue.entries()
            if entry.path.name == mine or entry.status()["state"] in ("waiting", "preparing")
        ]
        if not entries:
            return ""
        status = entries[-1].status()
        if status["state"] == "failed":
            return problem(status["message"], status.get("problems") or [], status.get("fix") or "")
        if status["state"] == "started":
            link, name = f"/run?run={quote(status['run'])}", inert(status["run"])
            return f'<p class="ft-note ok" role="status">Started. <a href="{link}" data-go="{link}">Watch {name}</a></p>'
        message = f"{inert(status['state'])}: {inert(status['message'])}"
        return f'<p class="ft-note" role="status"><span class="ft-busy"></span> {message}</p>'

    def compare(self, price: float | None) -> list[Any]:
        """Forecast the alternatives of this recipe: that takes seconds, so only on request."""
        edited = self.context.draft.read()
        if edited.recipe is not None:
            self._compared, self._planned = write_recipe(edited.recipe), None
        return self.everything(price)

    def _plan(self, edited: Edited) -> Plan:
        """The plan of the draft; the last one is reused for seconds: other tabs ask the same, and free memory changes."""
        key = write_recipe(edited.recipe) if edited.recipe else ""
        if self._planned is None or self._planned[0] != key or time.monotonic() - self._planned[1] > _PLAN_GOOD_S:
            answer = self.context.planner.ask("plan", recipe=key, free_bytes=None, compare=key == self._compared)
            self._planned = (key, time.monotonic(), answer)
        answer = self._planned[2]
        return Plan.from_json(answer["plan"])

    def _shown(self, edited: Edited, price: float) -> tuple[list[Any], Plan | None]:
        """Values for `shown`, and the plan when there is one."""
        stamp = self.context.draft.stamp
        trouble = problem("The recipe needs a change", edited.problems, edited.fix) if edited.problems else ""
        plan = None
        if edited.recipe is not None and not edited.problems:
            try:
                plan = self._plan(edited)
            except FinetuneError as error:
                trouble = problem(error.title, error.problems, error.fix)
        command = command_line(edited.recipe) if edited.recipe else ""
        if plan is None:
            empty = ['<div class="ft-verdict unknown" role="status"><strong>unknown</strong></div>', "", "", "", ""]
            hidden = [gr.Button(visible=False)] * _SUGGESTIONS
            return [
                trouble,
                *empty,
                *hidden,
                command,
                gr.Checkbox(visible=False),
                gr.Button(interactive=False),
                gr.Button(visible=False),
                [],
                stamp,
            ], None
        buttons = [gr.Button(plan_view.suggestion(item, plan), visible=True) for item in plan.suggestions[:_SUGGESTIONS]]
        buttons += [gr.Button(visible=False)] * (_SUGGESTIONS - len(buttons))
        nothing = "" if plan.suggestions else note("No suggestions.")
        return [
            trouble + plan_view.card_note(plan) + plan_view.data_note(plan),
            plan_view.verdict(plan, price), plan_view.ledger(plan),
            plan_view.reasons(plan), plan_view.alternatives(plan, price), nothing, *buttons, command,
            gr.Checkbox(visible=plan.verdict == Verdict.NO_FIT),
            gr.Button(interactive=True), gr.Button(visible=plan.verdict != Verdict.NO_FIT),
            [item.override for item in plan.suggestions[:_SUGGESTIONS]], stamp,
        ], plan  # fmt: skip

    def _form(self, edited: Edited, plan: Plan | None) -> list[Any]:
        """Values of card and sliders: set by the recipe, or chosen by the plan."""
        recipe = plan.settings if plan else edited.recipe
        if recipe is None:
            return [gr.skip() for _ in range(4)]
        numbers = [getattr(recipe, name) for name in ("max_length", "lora_r", "effective_batch_size")]
        gpu = edited.recipe.gpu if edited.recipe else AUTO
        return [gpu, *(number if isinstance(number, int) else gr.skip() for number in numbers)]
