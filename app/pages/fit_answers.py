"""What Fit shows of the draft: the answers to `GET /ft/fit/draft`, `plan`, `bars` and `compared`, for which fit.js asks.

They do not go through Gradio, whose page takes longer to send a request and to show its answer than a plan takes.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response

from finetune.errors import FinetuneError
from finetune.planner.plan import Plan, Verdict
from finetune.recipe import write_recipe

from ..language import tr
from ..planning.blocker import Blocker, blocker_of
from ..planning.draft import Edited, command_line
from ..planning.planner import SupersededError
from ..planning.what_if import Outcomes, outcome_of
from ..views import choices as choices_view
from ..views import fit as fit_view
from ..views import plan as plan_view
from ..views import what_if as what_if_view
from ..views.problems import problem, settings_problem
from ..views.words import plan_in_languages
from ..web.own_files import compressed
from .fit_layout import NUMBERS, bars_head, drafted, numbers_of

if TYPE_CHECKING:
    from finetune.settings import Recipe

    from ..context import Context

_PLAN_GOOD_S = 10.0


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


class FitAnswers:
    """Answers to all tabs. Each is of the draft as it is then, and None when the draft has changed meanwhile."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._question: _Question | None = None
        self._lock = threading.Lock()
        self._compared = ""
        self._outcomes = Outcomes(context.planner.outcomes_path)
        #: The newest answer: the draft's stamp, the draft and its plan.
        self._latest: tuple[str, Edited, Plan | None] | None = None

    def draft(self) -> dict[str, Any]:
        """The draft alone, which takes no time."""
        return drafted(self.context.draft.version())

    def plan(self) -> dict[str, Any] | None:
        """The plan of the draft: HTML by the element that shows it, the numbers that the planner chose, and how to start."""
        asked = self.context.draft.version()
        shown: dict[str, Any] = {}
        while not shown:  # a question for the same recipe with its other plans may have ended this one
            if asked.stamp != self.context.draft.stamp:
                return None
            with contextlib.suppress(SupersededError):
                shown, plan = self._shown(asked.edited)
        if asked.stamp != self.context.draft.stamp:
            return None
        self._latest = asked.stamp, asked.edited, plan
        numbers = numbers_of(plan.settings if plan else None)
        return {"stamp": asked.stamp, "numbers": numbers, "planned": plan is not None, **shown}

    def bars(self) -> dict[str, Any] | None:
        """Plans at other values of each number, for the plan that was shown last; and the recipe as a command."""
        stamp, edited, plan = self._latest or ("", None, None)
        if edited is None or stamp != self.context.draft.stamp:
            return None
        bars = {**dict.fromkeys((f"{name}-bars" for _, name in NUMBERS.values()), ""), "bars-head": bars_head()}
        if edited.recipe is not None and plan is not None:
            bars |= self._bars(edited.recipe, plan, edited.values)
        return {"stamp": stamp, "parts": bars, "command": command_line(edited.recipe) if edited.recipe else ""}

    def _bars(self, recipe: Recipe, plan: Plan, values: dict[str, Any]) -> dict[str, str]:
        """HTML by element. All bars are of the same measure, which their heading names."""
        summaries = plan_in_languages(plan.settings)
        now = {name: outcome_of(plan, getattr(plan.settings, name), summaries) for name in NUMBERS}
        around = {name: self._outcomes.around(recipe, plan, name, now[name]) for name in NUMBERS}
        measure = what_if_view.measure_of([outcome for outcomes in around.values() for outcome in outcomes])
        bars = {"bars-head": bars_head(measure.name)}
        for name, (label, identity) in NUMBERS.items():
            is_auto, outcomes = values.get(name) in (None, "auto"), around[name]
            bars[f"{identity}-bars"] = what_if_view.what_if(name, tr(label), outcomes, now[name], measure, is_auto=is_auto)
        return bars

    def compared(self) -> dict[str, Any] | None:
        """The other plans of this recipe, forecast: that takes seconds, so it is asked for after the plan is shown."""
        stamp, edited = self.context.draft.stamp, self.context.draft.read()
        if edited.recipe is None:
            return None
        self._compared = write_recipe(edited.recipe)
        try:
            plan = self._plan(edited.recipe)
        except (FinetuneError, SupersededError):
            return None
        if stamp != self.context.draft.stamp:
            return None
        self._latest = stamp, edited, plan
        parts = {"alternatives": choices_view.other_plans(plan, complete=True), "ledger": fit_view.memory(plan)}
        return {"stamp": stamp, "parts": parts}

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

    def _shown(self, edited: Edited) -> tuple[dict[str, Any], Plan | None]:
        """HTML by element, whether it may be started, also where it is too big; and the plan when there is one."""
        trouble = settings_problem(edited.problems, edited.fix) if edited.problems else ""
        if edited.recipe is None:
            return _unknown(trouble, len(edited.problems)), None
        try:
            plan = self._plan(edited.recipe)
        except FinetuneError as error:
            return _unknown(problem(error.title, error.problems, error.fix)), None
        blocked = blocker_of(edited.recipe, plan, self.context.workspace.root)
        complete = write_recipe(edited.recipe) == self._compared
        parts = {
            "trouble": (plan_view.blocker_note(blocked) if blocked else "") + plan_view.data_note(plan),
            "verdict": fit_view.verdict(plan, blocked=bool(blocked and not blocked.elsewhere)), "ledger": fit_view.memory(plan),
            "facts": fit_view.facts(plan), "smaller": fit_view.smaller(plan), "reasons": choices_view.chosen(plan),
            "alternatives": choices_view.other_plans(plan, complete=complete),
            "ready": fit_view.ready(plan, _obstacle(blocked)),
        }  # fmt: skip
        return {"parts": parts, "start": blocked is None, "too_big": plan.verdict == Verdict.NO_FIT}, plan


def route_of(make_answer: Callable[[], dict[str, Any] | None]) -> Callable[[Request], Response]:
    """The route's handler."""

    def handler(request: Request) -> Response:
        content, encoding = compressed(json.dumps(make_answer()).encode(), request.headers.get("accept-encoding", ""))
        return Response(content, media_type="application/json", headers={"cache-control": "no-store", **encoding})

    return handler


def _unknown(trouble: str, count: int = 0) -> dict[str, Any]:
    """What is shown without a plan."""
    parts = dict.fromkeys(("ledger", "facts", "smaller", "reasons", "alternatives", "ready"), "")
    return {"parts": {"trouble": trouble, "verdict": fit_view.cannot_say(count), **parts}, "start": False, "too_big": False}


def _obstacle(blocked: Blocker | None) -> str:
    """What keeps a run from starting here, in a few words; empty when nothing is known to."""
    if blocked is None:
        return ""
    return tr("Planned for another machine." if blocked.elsewhere else blocked.title)
