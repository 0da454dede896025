"""Fit: the plan for a GPU, its memory by part, what another value would cost, and the start. All controls always agree."""

from __future__ import annotations

import contextlib
import html
import json
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
from ..language import tr
from ..planning.blocker import Blocker, blocker_of
from ..planning.draft import Edited, Version, command_line
from ..planning.planner import SupersededError
from ..planning.what_if import Outcomes, outcome_of
from ..views import choices as choices_view
from ..views import fit as fit_view
from ..views import plan as plan_view
from ..views import recipe_form
from ..views import what_if as what_if_view
from ..views.binding import BUTTON, QUIET, change_trigger, fingerprint
from ..views.problems import problem, settings_problem
from ..views.words import plan_in_languages
from . import fit_largest, fit_measured
from .fit_layout import NUMBERS, RANGES, lay_out
from .starting import progress_of

_TICK_S = 1.0
_PLAN_GOOD_S = 10.0
#: Opened pages of which the last message is remembered.
_PAGES = 64


def build(context: Context, page: gr.Blocks) -> None:
    """Components, and the handlers that keep them in agreement."""
    view = _View(context)
    layout = lay_out()
    mine = gr.State("")
    asked, answered, planned, drafted, acted, ahead, alone = (
        change_trigger(f"fit-{name}") for name in ("asked", "answered", "planned", "drafted", "acted", "ahead", "alone")
    )
    edited = [layout.refused, asked]

    page.load(view.stamp, None, asked, **QUIET)
    # The plan is asked for first: the browser takes a while between two requests.
    asked.change(view.answer, None, [*layout.answer, answered, planned, alone, ahead], **QUIET)
    asked.change(view.follow, layout.card, [layout.card, layout.command, drafted], **QUIET)
    alone.change(view.compare, None, [layout.others, layout.ledger, ahead], **QUIET)
    ahead.change(view.what_if, None, layout.bars, **QUIET)
    gr.Timer(_TICK_S).tick(view.tick, mine, [layout.progress, asked, ahead], **QUIET)
    layout.card.input(view.choose_card, layout.card, edited, **QUIET)
    layout.act.change(view.act, layout.act, [*edited, acted], **QUIET)
    layout.load.upload(view.load, layout.load, edited, **BUTTON)
    layout.shipped.input(view.start_from, layout.shipped, edited, **BUTTON)
    fit_largest.build(context, layout.largest)
    fit_measured.build(context, layout.measure)
    layout.start.click(view.start, [layout.force, layout.act], [layout.progress, mine], **BUTTON)


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
    draft (`follow`) and for its plan (`answer`) as it then is. Numbers, recipe and fields are fit.js's: it sends what a person
    chose (`act`), and shows what `follow` brings where nothing is being typed."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._fields = {field.name: field for field in recipe_form.fields()}
        #: The number of the last message of each opened page that was acted on.
        self._acted: dict[str, int] = {}
        self._question: _Question | None = None
        self._lock, self._acting = threading.Lock(), threading.Lock()
        self._compared = ""
        self._outcomes = Outcomes(context.planner.outcomes_path)
        #: The newest answer: the draft's stamp, the draft and its plan.
        self._latest: tuple[str, Edited, Plan | None] | None = None

    def stamp(self) -> str:
        """The draft's stamp."""
        return self.context.draft.stamp

    def follow(self, card: str | None) -> list[Any]:
        """The draft as it is now: the card where another one is shown, the command, and the rest for fit.js."""
        version = self.context.draft.version()
        recipe = version.edited.recipe
        if recipe is None:
            return [gr.skip(), "", _for_script(_drafted(version))]
        return [gr.skip() if recipe.gpu == card else recipe.gpu, command_line(recipe), _for_script(_drafted(version))]

    def answer(self) -> list[Any]:
        """The plan of the draft and all that is shown of it; nothing when the draft has changed since."""
        asked = self.context.draft.version()
        shown: list[Any] = []
        while not shown:  # a question for the same recipe with its other plans may have ended this one
            if asked.stamp != self.context.draft.stamp:
                return gr.skip()
            with contextlib.suppress(SupersededError):
                shown, plan = self._shown(asked.edited)
        if asked.stamp != self.context.draft.stamp:
            return gr.skip()
        self._latest = asked.stamp, asked.edited, plan
        planned = {"stamp": asked.stamp, "numbers": _numbers(plan.settings if plan else None)}
        return [*shown, asked.stamp, _for_script(planned), asked.stamp if plan else "", self._ahead()]

    def choose_card(self, card: str) -> list[Any]:
        """Set the card."""
        return [self._change(gpu=card), self.context.draft.stamp]

    def act(self, text: str) -> list[Any]:
        """What the page's own HTML asks for. Of several quick messages Gradio reports the last: each has those that this server
        has not acknowledged yet. Returns why they were refused, the draft's stamp, and the acknowledgement: the number of the
        last message, the draft that came of it, and whether a typed recipe was refused."""
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
        acknowledged = {"sent": numbers[-1], "read": version.read_s, "stamp": version.stamp, "refused": is_text_refused}
        return ["".join(refusals) if refusals else gr.skip(), version.stamp, _for_script(acknowledged)]

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
        """Progress of the requested start, and the draft's stamp, which another tab may have changed.

        The stamp is the draft's whatever the browser had when it asked: the answer to a tick from before the page was filled
        may come after that, and must not empty it.
        """
        self.context.queue.ensure_starter()
        return [progress_of(self.context.queue, mine), self.context.draft.stamp, self._ahead()]

    def compare(self) -> list[Any]:
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
            now = outcome_of(plan, getattr(plan.settings, name), plan_in_languages(plan.settings))
            around = self._outcomes.around(edited.recipe, plan, name, now)
            is_auto = edited.values.get(name) in (None, "auto")
            bars.append(what_if_view.what_if(name, tr(label), around, now, is_auto=is_auto))
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

    def _shown(self, edited: Edited) -> tuple[list[Any], Plan | None]:
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
            fit_view.verdict(plan, blocked=_is_fault(blocked)), fit_view.memory(plan), fit_view.facts(plan),
            fit_view.smaller(plan), choices_view.chosen(plan), choices_view.other_plans(plan, complete=complete),
            fit_view.ready(plan, _obstacle(blocked)), gr.Checkbox(visible=too_big),
            gr.Button(interactive=blocked is None),
        ], plan  # fmt: skip

    def _unknown(self, trouble: str, count: int = 0) -> list[Any]:
        """Values for `shown` without a plan."""
        return [trouble, fit_view.cannot_say(count), *[""] * 6, gr.Checkbox(visible=False), gr.Button(interactive=False)]


def _drafted(version: Version) -> dict[str, Any]:
    """The draft as fit.js shows it."""
    edited = version.edited
    return {
        "read": version.read_s, "stamp": version.stamp, "text": edited.text, "numbers": _numbers(edited.recipe),
        "values": recipe_form.changed_values(edited),
    }  # fmt: skip


def _numbers(settings: Recipe | None) -> dict[str, int]:
    """The settings that have a box for their number and are not left to the planner."""
    numbers = {name: getattr(settings, name, None) for name in RANGES}
    return {name: number for name, number in numbers.items() if isinstance(number, int)}


def _for_script(values: dict[str, Any]) -> str:
    """Values for fit.js. In an attribute: Gradio adds texts of its own to a component's."""
    return f'<i data-json="{html.escape(json.dumps(values))}"></i>'


def _refusal(edited: Edited) -> str:
    """Why a change was refused."""
    return settings_problem(edited.problems, edited.fix) if edited.problems and edited.recipe else ""


def _obstacle(blocked: Blocker | None) -> str:
    """What keeps a run from starting here, in a few words; empty when nothing is known to."""
    if blocked is None:
        return ""
    return tr("Planned for another machine." if blocked.elsewhere else blocked.title)


def _is_fault(blocked: Blocker | None) -> bool:
    """Whether something is wrong with the recipe, and not only planned for another machine."""
    return blocked is not None and not blocked.elsewhere
