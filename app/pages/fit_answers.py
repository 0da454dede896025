"""What Fit shows of the draft: the answers to `GET /ft/fit/draft`, `plan` and `compared`, for which fit.js asks.

They do not go through Gradio, whose page takes longer to send a request and to show its answer than a plan takes.
"""

from __future__ import annotations

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
from ..views import choices as choices_view
from ..views import fit as fit_view
from ..views import plan as plan_view
from ..views.problems import problem, settings_problem
from ..web.own_files import compressed
from ..worker import SupersededError
from .fit_layout import NUMBERS, drafted, numbers_of

if TYPE_CHECKING:
    from finetune.settings import Recipe

    from ..context import Context
    from ..worker import Worker

_PLAN_GOOD_S = 10.0


@dataclass(frozen=True)
class _Question:
    """A plan that was asked for; every tab that shows the same recipe waits for the same one.

    `first`: the plan. `complete`: the plan with the forecasts of its alternatives.
    """

    recipe: str
    first: Future[Plan] = field(default_factory=Future)
    complete: Future[Plan] = field(default_factory=Future)
    asked_s: float = field(default_factory=time.monotonic)

    @property
    def is_old(self) -> bool:
        """Whether to ask again: free memory changes, and an error may have gone."""
        return self.complete.done() and (bool(self.complete.exception()) or time.monotonic() - self.asked_s > _PLAN_GOOD_S)

    def ask(self, planner: Worker) -> None:
        """Ask the planner, which ends its work on an earlier question, and wait."""

        def report(value: Any) -> None:
            if isinstance(value, dict) and not self.first.done():
                self.first.set_result(Plan.from_json(value))

        try:
            report(answer := planner.call("plan", newest=True, report=report, recipe=self.recipe))
            self.complete.set_result(Plan.from_json(answer))
        except Exception as error:  # noqa: BLE001 - raised in every tab that waits
            for future in [future for future in (self.first, self.complete) if not future.done()]:
                future.set_exception(error)


class FitAnswers:
    """Answers to all tabs. Each is of the draft as it is then, and None when the draft has changed meanwhile."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._question: _Question | None = None
        self._lock = threading.Lock()

    def draft(self) -> dict[str, Any]:
        """The draft alone, which takes no time."""
        return drafted(self.context.draft.version())

    def plan(self) -> dict[str, Any] | None:
        """The plan of the draft: HTML by the element that shows it, the numbers that the planner chose, and how to start."""
        asked = self.context.draft.version()
        try:
            shown, plan = self._shown(asked.edited)
        except SupersededError:  # the recipe has changed
            return None
        if asked.stamp != self.context.draft.stamp:
            return None
        numbers = numbers_of(plan.settings if plan else None)
        return {"stamp": asked.stamp, "numbers": numbers, "planned": plan is not None, **shown}

    def compared(self) -> dict[str, Any] | None:
        """The other plans of this recipe, whose forecasts take seconds."""
        asked = self.context.draft.version()
        if asked.edited.recipe is None:
            return None
        try:
            plan = self._question_of(asked.edited.recipe).complete.result()
        except (FinetuneError, SupersededError):
            return None
        parts = {"alternatives": choices_view.other_plans(plan, complete=True), "ledger": fit_view.memory(plan)}
        return {"stamp": asked.stamp, "parts": parts}

    def _question_of(self, recipe: Recipe) -> _Question:
        """The question for a recipe's plan."""
        text = write_recipe(recipe)
        with self._lock:
            question = self._question
            if question is None or question.is_old or question.recipe != text:
                question = self._question = _Question(text)
                threading.Thread(target=question.ask, args=(self.context.planner,), daemon=True).start()
        return question

    def _shown(self, edited: Edited) -> tuple[dict[str, Any], Plan | None]:
        """HTML by element, whether it may be started, also where it is too big; and the plan when there is one."""
        trouble = settings_problem(edited.problems, edited.fix) if edited.problems else ""
        if edited.recipe is None:
            return _unknown(trouble, len(edited.problems)), None
        question = self._question_of(edited.recipe)
        try:
            plan = (question.complete if question.complete.done() else question.first).result()
        except FinetuneError as error:
            return _unknown(problem(error.title, error.problems, error.fix)), None
        blocked = blocker_of(edited.recipe, plan, self.context.workspace.root)
        parts = {
            "trouble": (plan_view.blocker_note(blocked) if blocked else "") + plan_view.data_note(plan),
            "verdict": fit_view.verdict(plan, blocked=bool(blocked and not blocked.elsewhere)), "ledger": fit_view.memory(plan),
            "facts": fit_view.facts(plan), "smaller": fit_view.smaller(plan), "reasons": choices_view.chosen(plan),
            "alternatives": choices_view.other_plans(plan, complete=question.complete.done()),
            "ready": fit_view.ready(plan, _obstacle(blocked)),
            **{f"{identity}-auto": fit_view.auto(name, edited.values) for name, (_, identity) in NUMBERS.items()},
        }  # fmt: skip
        return {
            "command": command_line(edited.recipe),
            "parts": parts,
            "start": blocked is None,
            "too_big": plan.verdict == Verdict.NO_FIT,
        }, plan


def route_of(make_answer: Callable[[], dict[str, Any] | None]) -> Callable[[Request], Response]:
    """The route's handler."""

    def handler(request: Request) -> Response:
        content, encoding = compressed(json.dumps(make_answer()).encode(), request.headers.get("accept-encoding", ""))
        return Response(content, media_type="application/json", headers={"cache-control": "no-store", **encoding})

    return handler


def _unknown(trouble: str, count: int = 0) -> dict[str, Any]:
    """What is shown without a plan."""
    parts = dict.fromkeys(("ledger", "facts", "smaller", "reasons", "alternatives", "ready"), "")
    return {
        "command": "",
        "parts": {"trouble": trouble, "verdict": fit_view.cannot_say(count), **parts},
        "start": False,
        "too_big": False,
    }


def _obstacle(blocked: Blocker | None) -> str:
    """What keeps a run from starting here, in a few words; empty when nothing is known to."""
    if blocked is None:
        return ""
    return tr("Planned for another machine." if blocked.elsewhere else blocked.title)
