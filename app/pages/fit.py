"""Fit: the plan for a GPU, its memory by part, the numbers that decide it, and the start. All controls always agree."""

from __future__ import annotations

import html
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import gradio as gr

from finetune.errors import RecipeError
from finetune.recipe import shipped_recipes

from ..context import Context
from ..language import tr
from ..planning.draft import Edited
from ..views import recipe_form
from ..views.binding import BUTTON, QUIET, change_trigger
from ..views.problems import problem, settings_problem
from . import fit_measured
from .fit_layout import RANGES, drafted, lay_out
from .starting import progress_of

_TICK_S = 1.0
#: Opened pages of which the last message is remembered.
_PAGES = 64


def build(context: Context, page: gr.Blocks) -> None:
    """Components, and the handlers that keep them in agreement."""
    view = _View(context)
    layout = lay_out()
    mine = gr.State("")
    stamp = change_trigger("fit-stamp")

    stamp.change(view.follow, layout.card, layout.card, **QUIET)
    gr.Timer(_TICK_S).tick(view.tick, mine, [layout.progress, stamp], **QUIET)
    layout.card.input(view.choose_card, layout.card, stamp, **QUIET)
    layout.act.submit(view.act, layout.act, layout.acted, **QUIET)  # fit.js calls it
    layout.load.upload(view.load, layout.load, stamp, **BUTTON)
    layout.shipped.input(view.start_from, layout.shipped, stamp, **BUTTON)
    fit_measured.build(context, layout.measure)
    layout.start.click(view.start, [layout.force, layout.act], [layout.progress, mine], **BUTTON)


class _View:
    """Handlers. Those of controls change the draft file and return at once, with its stamp; that makes fit.js ask for the plan
    of the draft as it then is (fit_answers.py). Numbers, recipe and fields are fit.js's: it sends what a person chose (`act`),
    and shows the draft that comes back where nothing is being typed."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._fields = {field.name: field for field in recipe_form.fields()}
        #: The number of the last message of each opened page that was acted on.
        self._acted: dict[str, int] = {}
        self._acting = threading.Lock()

    def follow(self, card: str | None) -> Any:
        """The draft's card, where another one is shown."""
        recipe = self.context.draft.read().recipe
        return gr.skip() if recipe is None or recipe.gpu == card else recipe.gpu

    def choose_card(self, card: str) -> str:
        """Set the card."""
        return self._changed(self._change(gpu=card))

    def act(self, text: str) -> Any:
        """What the page's own HTML asks for. Each message has those before it that this server has not acknowledged yet.
        Returns the acknowledgement: the number of the last message, why they were refused, whether a typed recipe was, and the
        draft that came of them."""
        try:
            newest = json.loads(text)
            page, messages = str(newest["page"])[:40], [*newest.get("earlier", []), newest]
            numbers = [int(message["sent"]) for message in messages]
        except (ValueError, AttributeError, KeyError, TypeError):  # no message of this page
            return gr.skip()
        refusals, is_text_refused = [], False
        with self._acting:
            for number, message in zip(numbers, messages, strict=True):
                if number <= self._acted.get(page, 0):
                    continue
                # Before it is acted on: one that fails is not tried again with each message that follows.
                others = {name: last for name, last in self._acted.items() if name != page}
                self._acted = {**dict(list(others.items())[1 - _PAGES :]), page: number}
                refusals.append(self._act(message, page))
                is_text_refused |= "text" in message and "field" not in message and bool(refusals[-1])
            version = self.context.draft.version()
        refused = {"refused": "".join(refusals)} if refusals else {}
        return json.dumps({"sent": numbers[-1], "text_refused": is_text_refused, **refused, **drafted(version)})

    def _act(self, message: dict[str, Any], page: str) -> str:
        """Do what a message asks for: the recipe's text, a value of a setting, `auto` for it, a field's text, or a change of a
        suggestion. Returns why it was refused; empty when it was not."""
        draft, field = self.context.draft, self._fields.get(str(message.get("field")))
        if message.get("auto") in RANGES:
            return self._change(**{message["auto"]: None})
        if message.get("set") in RANGES:
            return self._set_number(message["set"], message.get("value"))
        if isinstance(message.get("override"), str):
            return _refusal(draft.apply(message["override"]))
        if isinstance(message.get("basis"), str):
            return self._write(str(message.get("text")), message["basis"], page)
        if field is None or field.text(draft.read()) == str(message.get("text")).strip():
            return ""
        try:
            return self._change(**recipe_form.as_settings(field, message.get("text")))
        except RecipeError as error:
            return settings_problem(error.problems, error.fix)

    def _set_number(self, name: str, value: Any) -> str:
        """A number out of the setting's range changes nothing: it is being typed."""
        lowest, highest = RANGES[name]
        if not isinstance(value, (int, float)) or value != int(value) or not lowest <= value <= highest:
            return ""
        return self._change(**{name: int(value)})

    def _write(self, text: str, basis: str, page: str) -> str:
        """Take the recipe's text as a person typed or pasted it in a page that showed the draft of the stamp `basis`."""
        draft = self.context.draft
        if text == draft.read().text or draft.type_text(text, basis, page):
            return ""
        why = tr("the recipe was changed by another control or tab while you typed, so your text was not taken")
        return problem(tr("The recipe has changed"), [why], tr("Type it again, in the recipe as it is now."))

    def _change(self, **settings: Any) -> str:
        return _refusal(self.context.draft.change(**settings))

    def load(self, path: str | None) -> str:
        """Replace the draft by an uploaded recipe file."""
        if path:
            self.context.draft.write(Path(path).read_bytes()[:1_000_001].decode("utf-8", "replace"))
            shutil.rmtree(Path(path).parent, ignore_errors=True)
        return self._changed("")

    def start_from(self, name: str | None) -> str:
        """Replace the draft by a shipped recipe."""
        if name in shipped_recipes():
            self.context.draft.start_from(str(name))
        return self._changed("")

    def start(self, force: bool, messages: str) -> list[Any]:
        """Queue the draft; the starter does what the command line does. `messages`: the page's last ones for `act`, which may
        still be on their way."""
        self.act(messages)
        edited = self.context.draft.read()
        if edited.recipe is None:
            return [settings_problem(edited.problems, edited.fix), ""]
        entry = self.context.queue.add(edited.recipe, force=force)
        return [progress_of(self.context.queue, entry.path.name), entry.path.name]

    def tick(self, mine: str) -> list[Any]:
        """Progress of the requested start, the draft, which another tab may have changed, and what the planner does."""
        self.context.queue.ensure_starter()
        draft = _for_script({"stamp": self.context.draft.stamp, "doing": self.context.planner.doing})
        return [progress_of(self.context.queue, mine), draft]

    def _changed(self, refused: str) -> str:
        """For fit.js, after a change by one of Gradio's controls: why it was refused, and the draft's stamp."""
        return _for_script({"refused": refused, "stamp": self.context.draft.stamp})


def _for_script(values: dict[str, Any]) -> str:
    """Values for fit.js. In an attribute: Gradio adds texts of its own to a component's."""
    return f'<i data-json="{html.escape(json.dumps(values))}"></i>'


def _refusal(edited: Edited) -> str:
    return settings_problem(edited.problems, edited.fix) if edited.problems and edited.recipe else ""
