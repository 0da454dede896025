"""Fit: the plan for a card, its memory by part, suggestions, and Run. Form, recipe text and command line always agree."""

from __future__ import annotations

import functools
import secrets
import shutil
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import gradio as gr

from finetune.card.device_selection import cards_here
from finetune.errors import FinetuneError
from finetune.planner.plan import Plan, Verdict
from finetune.recipe import Recipe, shipped_recipes, write_recipe

from ..context import Context
from ..planning.blocker import Blocker, blocker_of
from ..planning.catalogue import card_choices
from ..planning.draft import TYPED, Edited, command_line
from ..planning.planner import SupersededError
from ..views import plan as plan_view
from ..views import recipe_form
from ..views.binding import BUTTON, QUIET, NumberBox, NumberSlider, change_trigger, show
from ..views.markup import inert, note, problem, settings_problem

_SUGGESTIONS = 5
_TICK_S = 1.0
#: The queue's states as they are shown.
_STATES = {"waiting": "In the queue", "preparing": "Starting"}
_PLAN_GOOD_S = 10.0
#: Seconds after which a change is no longer one of several.
_SETTLED_S = 1.0
#: The control of a draft's version that is the card box or a slider.
_SLIDER = "slider"
#: Setting -> lowest and highest value of its slider.
RANGES = {"max_length": (64, 16384), "lora_r": (1, 256), "effective_batch_size": (1, 256)}
#: Gradio's change also reports what the server writes, and its input does not report what is pasted or deleted.
_TYPED_BASIS = "(text, basis, tab) => [text, window.ftTyped === text ? basis : '', tab]"


def build(context: Context, page: gr.Blocks) -> None:
    """Components, and the handlers that keep them in agreement."""
    view = _View(context)
    show('<h1 class="ft-title" data-title="Fit">Does it fit?</h1>')
    with gr.Row(elem_classes="ft-controls"):
        cards: list[Any] = ["auto", *cards_here(), "cpu", *card_choices()]
        info = "auto: this machine's card"
        card = gr.Dropdown(cards, label="Card", info=info, allow_custom_value=True, elem_id="fit-card")
        sliders = {
            name: NumberSlider(*RANGES[name], step=step, label=label, info=info, buttons=[], elem_id=f"fit-{identity}")
            for name, step, label, info, identity in (
                ("max_length", 64, "Max length", "tokens per row", "length"),
                ("lora_r", 1, "LoRA rank", "r of each adapter", "rank"),
                ("effective_batch_size", 1, "Effective batch", "rows per step", "batch"),
            )
        }
        price = NumberBox(0.0, label="Price per hour", minimum=0, info="optional, for the cost", elem_id="fit-price")
        back = gr.Button("Auto: let the planner choose", size="sm", elem_id="fit-auto")
    refused = show(elem_id="fit-refused")
    trouble = show(elem_id="fit-trouble")
    with gr.Row():
        with gr.Column(scale=3, min_width=320, elem_id="fit-answer"):
            show('<p role="status">planning …</p>', elem_id="fit-planning")
            verdict = show(elem_id="fit-verdict")
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
            shipped = gr.Dropdown(["", *shipped_recipes()], label="Start from a shipped recipe", elem_id="fit-shipped")
            force = gr.Checkbox(label="Run although it does not fit", visible=False, elem_id="fit-force")
            remedy = gr.Button(visible=False, size="sm", elem_id="fit-remedy")
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
    mine, overrides, tab = gr.State(""), gr.State([]), gr.State("")
    asked, answered, basis, settled = (change_trigger(f"fit-{name}") for name in ("asked", "answered", "basis", "settled"))
    shown = [trouble, verdict, ledger, reasons, others, no_suggestion, *suggested, force, start, compare, remedy, overrides]
    shown += [answered]
    form, texts = [card, *sliders.values()], [text, command, basis]
    settings = [component for _, component in rows]
    edited = [refused, asked]
    view.rows = [row for row, _ in rows]

    page.load(view.open, None, [tab, asked], **QUIET)
    asked.change(view.follow, tab, [*texts, *form, *settings], **QUIET)
    asked.change(view.answer, [price, tab], [*shown, *form], **QUIET)
    gr.Timer(_TICK_S).tick(view.tick, [mine, asked, settled], [progress, asked, settled], **QUIET)
    settled.change(view.settle, form, form, **QUIET)
    for name, slider in sliders.items():
        slider.input(functools.partial(view.slide, name), [slider, tab], edited, **QUIET)
    card.input(functools.partial(view.slide, "gpu"), [card, tab], edited, **QUIET)
    price.input(view.reprice, price, [verdict, others], **QUIET)
    text.change(view.write, [text, basis, tab], [refused, asked, basis], js=_TYPED_BASIS, **QUIET)
    for row, component in rows:
        listens = [component.input] if row.choices else [component.submit, component.blur]
        for listen in listens:
            listen(functools.partial(view.set_field, row), [component, tab], edited, **QUIET)
    for number, button in enumerate([*suggested, remedy]):
        button.click(functools.partial(view.override, number), overrides, edited, **BUTTON)
    compare.click(view.compare, [price, tab], [*shown, *form], **BUTTON)
    back.click(view.back_to_auto, None, edited, **BUTTON)
    load.upload(view.load, load, edited, **BUTTON)
    shipped.input(view.start_from, shipped, edited, **BUTTON)
    start.click(view.start, force, [progress, mine], **BUTTON)


@dataclass(frozen=True)
class _Question:
    """A plan that was asked for, and its answer; every tab that shows the same recipe waits for the same one."""

    recipe: str
    compare: bool
    answer: Future[dict[str, Any]] = field(default_factory=Future)
    asked_s: float = field(default_factory=time.monotonic)

    @property
    def is_old(self) -> bool:
        """Whether to ask again: free memory changes, and an error may have gone."""
        return self.answer.done() and (self.answer.exception() is not None or time.monotonic() - self.asked_s > _PLAN_GOOD_S)


class _View:
    """Handlers. Those of controls change the draft file and return at once, with its stamp; that makes the browser ask for the
    text (`follow`) and for the plan (`answer`) of the draft as it then is."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.rows: list[recipe_form.Field] = []
        self._question: _Question | None = None
        self._lock = threading.Lock()
        self._compared = ""
        #: The newest answer: the draft's stamp, the draft and its plan.
        self._latest: tuple[str, Edited, Plan | None] | None = None

    def open(self) -> list[str]:
        """A name for the tab, and the draft's stamp."""
        return [secrets.token_hex(8), self.context.draft.stamp]

    def follow(self, tab: str) -> list[Any]:
        """Text and form as the draft is now, but for what a person uses in this tab: that shows the draft already."""
        version = self.context.draft.version()
        edited, mine = version.edited, version.control if version.tab == tab else ""
        command = command_line(edited.recipe) if edited.recipe else ""
        texts = [gr.skip(), command, gr.skip()] if mine == TYPED else [edited.text, command, version.stamp]
        form = [gr.skip()] * 4 if mine == _SLIDER else self._form(edited, edited.recipe)
        return [*texts, *form, *(gr.skip() if mine == row.name else row.text(edited) for row in self.rows)]

    def answer(self, price: float | None, tab: str) -> list[Any]:
        """The plan of the draft and all that is shown of it; nothing when the draft has changed since."""
        asked = self.context.draft.version()
        try:
            shown, plan = self._shown(asked.edited, _price(price))
        except SupersededError:
            return gr.skip()
        now = self.context.draft.version()
        if asked.stamp != now.stamp:
            return gr.skip()
        self._latest = asked.stamp, asked.edited, plan
        sliding = (now.tab, now.control) == (tab, _SLIDER)
        form = [gr.skip()] * 4 if sliding or plan is None else self._form(asked.edited, plan.settings)
        return [*shown, asked.stamp, *form]

    def settle(self, *shown: Any) -> list[Any]:
        """Card and sliders when nobody moves them: set by the recipe, or chosen by the plan.

        Only those that show another value are set: the answer may arrive when a person has begun to move one.
        """
        _, edited, plan = self._latest or ("", None, None)
        if edited is None or plan is None:
            return [gr.skip()] * 4
        form = self._form(edited, plan.settings)
        return [gr.skip() if value == now else value for value, now in zip(form, shown, strict=True)]

    def slide(self, name: str, value: Any, tab: str) -> list[Any]:
        """Set a slider's setting or the card. A number out of the slider's range changes nothing: it is being typed."""
        if name != "gpu":
            lowest, highest = RANGES[name]
            if value is None or value != int(value) or not lowest <= value <= highest:
                return gr.skip()
            value = int(value)
        return self._changed(tab, _SLIDER, **{name: value})

    def write(self, text: str, basis: str, tab: str) -> list[Any]:
        """Take the recipe's text when a person typed or pasted it in this tab; `basis` is empty when none did."""
        draft = self.context.draft
        if not basis or text == draft.read().text:
            return gr.skip()
        if draft.type_text(text, basis, tab):
            return ["", draft.stamp, draft.stamp]
        problems = ["the recipe was changed by another control or tab while you typed, so your text was not taken"]
        return [
            problem("The recipe has changed", problems, "Type it again, in the recipe as it is now."),
            draft.stamp,
            gr.skip(),
        ]

    def set_field(self, field: recipe_form.Field, text: Any, tab: str) -> list[Any]:
        """Set one field under Advanced."""
        if field.text(self.context.draft.read()) == str(text).strip():
            return gr.skip()
        return self._changed(tab, field.name, **recipe_form.as_settings(field, text))

    def override(self, number: int, overrides: list[str]) -> list[Any]:
        """Apply a suggestion, or what lets the run start."""
        if number >= len(overrides) or not overrides[number]:
            return gr.skip()
        return self._refusal(self.context.draft.apply(overrides[number]))

    def back_to_auto(self) -> list[Any]:
        """Leave length, rank and batch to the planner."""
        return self._changed("", "", **dict.fromkeys([*RANGES, "per_device_train_batch_size"]))

    def load(self, path: str | None) -> list[Any]:
        """Replace the draft by an uploaded recipe file."""
        if path:
            self.context.draft.write(Path(path).read_bytes()[:1_000_001].decode("utf-8", "replace"))
            shutil.rmtree(Path(path).parent, ignore_errors=True)
        return ["", self.context.draft.stamp]

    def start_from(self, name: str | None) -> list[Any]:
        """Replace the draft by a shipped recipe."""
        if name in shipped_recipes():
            self.context.draft.start_from(str(name))
        return ["", self.context.draft.stamp]

    def _changed(self, tab: str, control: str, **settings: Any) -> list[Any]:
        return self._refusal(self.context.draft.change(tab, control, **settings))

    def _refusal(self, edited: Edited) -> list[Any]:
        """Why a change was refused, and the draft's stamp."""
        refusal = settings_problem(edited.problems, edited.fix) if edited.problems and edited.recipe else ""
        return [refusal, self.context.draft.stamp]

    def reprice(self, price: float | None) -> list[Any]:
        """Update the cost only."""
        stamp, edited, plan = self._latest or ("", None, None)
        if edited is None or plan is None or stamp != self.context.draft.stamp:
            return [gr.skip(), gr.skip()]
        blocked = blocker_of(edited.recipe, plan) if edited.recipe else None
        return [plan_view.verdict(plan, _price(price), blocked=_is_fault(blocked)), plan_view.alternatives(plan, _price(price))]

    def start(self, force: bool) -> list[Any]:
        """Queue the draft; the starter does what the command line does."""
        edited = self.context.draft.read()
        if edited.recipe is None:
            return [settings_problem(edited.problems, edited.fix), ""]
        entry = self.context.queue.add(edited.recipe, force=force)
        return [self._progress(entry.path.name), entry.path.name]

    def tick(self, mine: str, asked: str | None, settled: str | None) -> list[Any]:
        """Progress of the requested start; the draft's stamp, which another tab may have changed; and once more when it was
        planned and is a while old."""
        self.context.queue.ensure_starter()
        now = self.context.draft.stamp
        if self._latest and self._latest[0] == now and self.context.draft.age_s > _SETTLED_S:
            settled = now
        return [self._progress(mine), now if asked else asked, settled]

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
        message = f"{inert(_STATES.get(status['state'], status['state']))}: {inert(status['message'])}"
        return f'<p class="ft-note" role="status"><span class="ft-busy"></span> {message}</p>'

    def compare(self, price: float | None, tab: str) -> list[Any]:
        """Forecast the alternatives of this recipe: that takes seconds, so only on request."""
        edited = self.context.draft.read()
        if edited.recipe is not None:
            self._compared = write_recipe(edited.recipe)
        return self.answer(price, tab)

    def _plan(self, recipe: Recipe) -> Plan:
        """The recipe's plan. Raises FinetuneError, and SupersededError when another recipe's plan was asked for since."""
        text = write_recipe(recipe)
        with self._lock:
            question, compare = self._question, text == self._compared
            asks = question is None or question.is_old or (question.recipe, question.compare) != (text, compare)
            if question is None or asks:
                question = self._question = _Question(text, compare)
        if asks:
            try:
                question.answer.set_result(self.context.planner.ask("plan", recipe=text, free_bytes=None, compare=compare))
            except Exception as error:  # noqa: BLE001 - raised below, and in every tab that waits
                question.answer.set_exception(error)
        return Plan.from_json(question.answer.result()["plan"])

    def _shown(self, edited: Edited, price: float) -> tuple[list[Any], Plan | None]:
        """Values for `shown` but the stamp, and the plan when there is one."""
        trouble = settings_problem(edited.problems, edited.fix) if edited.problems else ""
        if edited.recipe is None:
            return self._unknown(trouble), None
        try:
            plan = self._plan(edited.recipe)
        except FinetuneError as error:
            return self._unknown(problem(error.title, error.problems, error.fix)), None
        blocked = blocker_of(edited.recipe, plan)
        buttons = [_action(plan_view.suggestion(item, plan)) for item in plan.suggestions[:_SUGGESTIONS]]
        buttons += [gr.Button(visible=False)] * (_SUGGESTIONS - len(buttons))
        overrides = [item.override for item in plan.suggestions[:_SUGGESTIONS]]
        overrides += [""] * (_SUGGESTIONS - len(overrides)) + [blocked.override if blocked else ""]
        return [
            (plan_view.blocker_note(blocked) if blocked else "") + plan_view.data_note(plan),
            plan_view.verdict(plan, price, blocked=_is_fault(blocked)), plan_view.ledger(plan),
            plan_view.reasons(plan), plan_view.alternatives(plan, price), "" if plan.suggestions else note("No suggestions."),
            *buttons, gr.Checkbox(visible=plan.verdict == Verdict.NO_FIT), gr.Button(interactive=blocked is None),
            gr.Button(visible=plan.verdict != Verdict.NO_FIT),
            _action(blocked.label) if blocked and blocked.override else gr.Button(visible=False), overrides,
        ], plan  # fmt: skip

    def _unknown(self, trouble: str) -> list[Any]:
        """Values for `shown` without a plan."""
        verdict = '<div class="ft-verdict unknown" role="status"><strong>unknown</strong></div>'
        hidden = [gr.Button(visible=False)] * _SUGGESTIONS
        buttons = [*hidden, gr.Checkbox(visible=False), gr.Button(interactive=False)]
        return [trouble, verdict, "", "", "", "", *buttons, gr.Button(visible=False), gr.Button(visible=False), []]

    def _form(self, edited: Edited, settings: Recipe | None) -> list[Any]:
        """Values of card and sliders; those that `settings` leave open stay."""
        if edited.recipe is None or settings is None:
            return [gr.skip()] * 4
        numbers = [getattr(settings, name) for name in RANGES]
        return [edited.recipe.gpu, *(number if isinstance(number, int) else gr.skip() for number in numbers)]


def _action(label: str) -> Any:
    """A button that was hidden until now; Gradio shows it disabled unless told otherwise."""
    return gr.Button(label, visible=True, interactive=True)


def _is_fault(blocked: Blocker | None) -> bool:
    """Whether something is wrong with the recipe, and not only planned for another machine."""
    return blocked is not None and not blocked.elsewhere


def _price(price: float | None) -> float:
    """Price per hour: nothing where the box is empty."""
    return max(0.0, price or 0.0)
