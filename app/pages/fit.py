"""Fit: the plan for a GPU, its memory by part, what another value would cost, and the start. All controls always agree."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import secrets
import shutil
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gradio as gr

from finetune.errors import FinetuneError, RecipeError
from finetune.planner.plan import Plan, Verdict
from finetune.recipe import shipped_recipes, write_recipe
from finetune.settings import Recipe

from ..context import Context
from ..planning.blocker import Blocker, blocker_of
from ..planning.draft import TYPED, Edited, command_line
from ..planning.planner import SupersededError
from ..planning.what_if import Outcomes, outcome_of
from ..views import choices as choices_view
from ..views import fit as fit_view
from ..views import plan as plan_view
from ..views import recipe_form
from ..views import what_if as what_if_view
from ..views.binding import BUTTON, QUIET, change_trigger, fingerprint
from ..views.markup import problem, settings_problem
from ..views.words import plan_in_words
from . import fit_largest
from .fit_layout import NUMBERS, RANGES, lay_out
from .starting import progress_of

_TICK_S = 1.0
_PLAN_GOOD_S = 10.0
#: Seconds after which a change is no longer one of several.
_SETTLED_S = 1.0
#: Opened pages of which the last message is remembered.
_PAGES = 64
#: The control of a draft's version that is the card box or a slider.
_SLIDER = "slider"
#: Gradio's change also reports what the server writes, and its input does not report what is pasted or deleted.
_TYPED_BASIS = "(text, basis, tab) => [text, window.ftTyped === text ? basis : '', tab]"


def build(context: Context, page: gr.Blocks) -> None:
    """Components, and the handlers that keep them in agreement."""
    view = _View(context)
    layout = lay_out()
    mine, tab = gr.State(""), gr.State("")
    asked, answered, basis, settled, ahead, alone, fields = (
        change_trigger(f"fit-{name}") for name in ("asked", "answered", "basis", "settled", "ahead", "alone", "values")
    )
    form = [layout.card, *layout.numbers.values()]
    shown = [*layout.answer, answered, alone, ahead]
    texts = [layout.text, layout.command, basis]
    edited = [layout.refused, asked]

    page.load(view.open, None, [tab, asked, layout.price], **QUIET)
    asked.change(view.follow, tab, [*texts, *form, fields], **QUIET)
    asked.change(view.answer, [layout.price, tab], [*shown, *form], **QUIET)
    alone.change(view.compare, layout.price, [layout.others, layout.ledger, ahead], **QUIET)
    ahead.change(view.what_if, None, layout.bars, **QUIET)
    gr.Timer(_TICK_S).tick(view.tick, [mine, settled], [layout.progress, asked, settled, ahead], **QUIET)
    settled.change(view.settle, form, form, **QUIET)
    for name, number in layout.numbers.items():
        number.input(functools.partial(view.slide, name), [number, tab], edited, **QUIET)
    layout.card.input(functools.partial(view.slide, "gpu"), [layout.card, tab], edited, **QUIET)
    layout.price.input(view.reprice, layout.price, layout.facts, **QUIET)
    layout.text.change(view.write, [layout.text, basis, tab], [layout.refused, asked, basis], js=_TYPED_BASIS, **QUIET)
    layout.act.change(view.act, layout.act, edited, **QUIET)
    layout.load.upload(view.load, layout.load, edited, **BUTTON)
    layout.shipped.input(view.start_from, layout.shipped, edited, **BUTTON)
    fit_largest.build(context, layout.largest)
    layout.start.click(view.start, layout.force, [layout.progress, mine], **BUTTON)


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
        self._fields = {field.name: field for field in recipe_form.fields()}
        #: The last message of each opened page that was acted on.
        self._acted: dict[str, int] = {}
        self._question: _Question | None = None
        self._lock = threading.Lock()
        self._compared = ""
        self._outcomes = Outcomes(context.planner.outcomes_path)
        #: The newest answer: the draft's stamp, the draft and its plan.
        self._latest: tuple[str, Edited, Plan | None] | None = None

    def open(self) -> list[Any]:
        """A name for the tab, the draft's stamp, and the usual price of an hour."""
        return [secrets.token_hex(8), self.context.draft.stamp, self.context.preferences.price]

    def follow(self, tab: str) -> list[Any]:
        """Text and form as the draft is now, but for what a person uses in this tab: that shows the draft already."""
        version = self.context.draft.version()
        edited, mine = version.edited, version.control if version.tab == tab else ""
        command = command_line(edited.recipe) if edited.recipe else ""
        texts = [gr.skip(), command, gr.skip()] if mine == TYPED else [edited.text, command, version.stamp]
        form = [gr.skip()] * 4 if mine == _SLIDER else self._form(edited, edited.recipe)
        return [*texts, *form, recipe_form.changed_values(edited)]

    def answer(self, price: float | None, tab: str) -> list[Any]:
        """The plan of the draft and all that is shown of it; nothing when the draft has changed since."""
        asked = self.context.draft.version()
        shown: list[Any] = []
        while not shown:  # a question for the same recipe with its other plans may have ended this one
            if asked.stamp != self.context.draft.stamp:
                return gr.skip()
            with contextlib.suppress(SupersededError):
                shown, plan = self._shown(asked.edited, _price(price))
        now = self.context.draft.version()
        if asked.stamp != now.stamp:
            return gr.skip()
        self._latest = asked.stamp, asked.edited, plan
        sliding = (now.tab, now.control) == (tab, _SLIDER)
        form = [gr.skip()] * 4 if sliding or plan is None else self._form(asked.edited, plan.settings)
        return [*shown, asked.stamp, asked.stamp if plan else "", self._ahead(), *form]

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

    def act(self, text: str) -> list[Any]:
        """What the page's own HTML asks for. Of several quick messages Gradio reports the last: each has those before it."""
        try:
            newest = json.loads(text)
            messages = [*newest.get("earlier", []), newest]
        except (ValueError, AttributeError, TypeError):
            return gr.skip()
        with self._lock:
            page, refusals = str(newest.get("page"))[:40], []
            for message in messages:
                number = message.get("sent", math.inf)
                if number > self._acted.get(page, 0):
                    refusals += self._act(message)
            self._acted.pop(page, None)
            self._acted = {**dict(list(self._acted.items())[-_PAGES:]), page: newest.get("sent", 0)}
        return ["".join(refusals), self.context.draft.stamp] if refusals else gr.skip()

    def _act(self, message: dict[str, Any]) -> list[str]:
        """Do what a message asks for: a value of a setting, `auto` for it, a field's text, or a change of a suggestion.

        Returns why it was refused, empty when it was not; nothing when there was nothing to do.
        """
        draft, field = self.context.draft, self._fields.get(str(message.get("field")))
        if message.get("auto") in RANGES:
            return self._changed("", "", **{message["auto"]: None})[:1]
        if message.get("set") in RANGES:
            changed = self.slide(message["set"], message.get("value"), "")
            return changed[:1] if isinstance(changed, list) else []
        if isinstance(message.get("override"), str):
            return self._refusal(draft.apply(message["override"]))[:1]
        if field is None or field.text(draft.read()) == str(message.get("text")).strip():
            return []
        try:
            return self._changed("", "", **recipe_form.as_settings(field, message.get("text")))[:1]
        except RecipeError as error:
            return [settings_problem(error.problems, error.fix)]

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

    def reprice(self, price: float | None) -> Any:
        """Update the cost only."""
        stamp, edited, plan = self._latest or ("", None, None)
        if edited is None or plan is None or stamp != self.context.draft.stamp:
            return gr.skip()
        return fit_view.facts(plan, _price(price))

    def start(self, force: bool) -> list[Any]:
        """Queue the draft; the starter does what the command line does."""
        edited = self.context.draft.read()
        if edited.recipe is None:
            return [settings_problem(edited.problems, edited.fix), ""]
        entry = self.context.queue.add(edited.recipe, force=force)
        return [progress_of(self.context.queue, entry.path.name), entry.path.name]

    def tick(self, mine: str, settled: str | None) -> list[Any]:
        """Progress of the requested start; the draft's stamp, which another tab may have changed; and once more when it was
        planned and is a while old.

        The stamp is the draft's whatever the browser had when it asked: the answer to a tick from before the page was filled
        may come after that, and must not empty it.
        """
        self.context.queue.ensure_starter()
        now = self.context.draft.stamp
        if self._latest and self._latest[0] == now and self.context.draft.age_s > _SETTLED_S:
            settled = now
        return [progress_of(self.context.queue, mine), now, settled, self._ahead()]

    def compare(self, _price: float | None) -> list[Any]:
        """Forecast the other plans of this recipe: that takes seconds, so after the plan itself is shown."""
        stamp, edited = self.context.draft.stamp, self.context.draft.read()
        if edited.recipe is None:
            return gr.skip()
        self._compared = write_recipe(edited.recipe)
        try:
            plan = self._plan(edited.recipe)
        except (FinetuneError, SupersededError):
            return gr.skip()
        if stamp != self.context.draft.stamp:
            return gr.skip()
        self._latest = stamp, edited, plan
        return [choices_view.other_plans(plan, complete=True), fit_view.memory(plan), self._ahead()]

    def _ahead(self) -> str:
        """Changes with the plan that is shown, and with each one that was made ahead."""
        return fingerprint(self._latest[0] if self._latest else "", self._outcomes.count)

    def what_if(self) -> list[Any]:
        """Bars of each number: plans at other values."""
        _, edited, plan = self._latest or ("", None, None)
        if edited is None or edited.recipe is None or plan is None:
            return [""] * len(RANGES)
        bars = []
        for name, (label, _) in NUMBERS.items():
            now = outcome_of(plan, getattr(plan.settings, name), plan_in_words(plan.settings))
            around = self._outcomes.around(edited.recipe, plan, name, now)
            is_auto = edited.values.get(name) in (None, "auto")
            bars.append(what_if_view.what_if(name, label, around, now, is_auto=is_auto))
        return bars

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
            return self._unknown(trouble, len(edited.problems)), None
        try:
            plan = self._plan(edited.recipe)
        except FinetuneError as error:
            return self._unknown(problem(error.title, error.problems, error.fix)), None
        blocked = blocker_of(edited.recipe, plan, self.context.workspace.root)
        complete = write_recipe(edited.recipe) == self._compared
        too_big = plan.verdict == Verdict.NO_FIT
        return [
            (plan_view.blocker_note(blocked) if blocked else "") + plan_view.data_note(plan),
            fit_view.verdict(plan, blocked=_is_fault(blocked)), fit_view.memory(plan), fit_view.facts(plan, price),
            fit_view.smaller(plan), choices_view.chosen(plan), choices_view.other_plans(plan, complete=complete),
            fit_view.ready(plan, _obstacle(blocked)), gr.Checkbox(visible=too_big),
            gr.Button(interactive=blocked is None),
        ], plan  # fmt: skip

    def _unknown(self, trouble: str, count: int = 0) -> list[Any]:
        """Values for `shown` without a plan."""
        return [trouble, fit_view.cannot_say(count), *[""] * 6, gr.Checkbox(visible=False), gr.Button(interactive=False)]

    def _form(self, edited: Edited, settings: Recipe | None) -> list[Any]:
        """Values of card and sliders; those that `settings` leave open stay."""
        if edited.recipe is None or settings is None:
            return [gr.skip()] * 4
        numbers = [getattr(settings, name) for name in RANGES]
        return [edited.recipe.gpu, *(number if isinstance(number, int) else gr.skip() for number in numbers)]


def _obstacle(blocked: Blocker | None) -> str:
    """What keeps a run from starting here, in a few words; empty when nothing is known to."""
    if blocked is None:
        return ""
    return "Planned for another machine." if blocked.elsewhere else blocked.title


def _is_fault(blocked: Blocker | None) -> bool:
    """Whether something is wrong with the recipe, and not only planned for another machine."""
    return blocked is not None and not blocked.elsewhere


def _price(price: float | None) -> float:
    """Price per hour: nothing where the box is empty."""
    return max(0.0, price or 0.0)
