"""Plans at other values of a setting, made ahead by the planner process: one line of JSON each, which the page reads.

Nothing is interpolated: a value without a plan has none. The file begins empty with each planner process, which has read the
data that these plans are of.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from finetune.planner.plan import Plan
from finetune.recipe import write_recipe
from finetune.settings import Recipe, resolved

from .prefetch import USUAL

#: Free memory changes a little all the time: a plan for a budget that differs by more than this share is not shown.
_BUDGET_SHARE = 0.02


@dataclass(frozen=True)
class Outcome:
    """What a plan at `value` came to; `peak_high_bytes` is None where none was made. `problem`: why not.

    `summaries`: the plan in words, by the language's code.
    """

    value: int
    summaries: dict[str, str] = field(default_factory=dict)
    peak_high_bytes: int | None = None
    budget_bytes: int | None = None
    seconds: float | None = None
    tokens_per_s: float | None = None
    rows: int | None = None
    rows_problem: str = ""
    problem: str = ""

    @property
    def is_made(self) -> bool:
        """Whether there is a plan with a forecast."""
        return self.peak_high_bytes is not None

    @property
    def fits(self) -> bool:
        """Whether the forecast's upper end is within the budget."""
        return self.peak_high_bytes is not None and self.budget_bytes is not None and self.peak_high_bytes <= self.budget_bytes


def outcome_of(plan: Plan, value: int, summaries: dict[str, str]) -> Outcome:
    """The outcome of a plan that was made, with its way to fit in each language."""
    forecast, budget = plan.forecast, plan.budget_bytes or plan.card.free_bytes
    if forecast is None:
        return Outcome(value, summaries, budget_bytes=budget, problem="no forecast")
    seconds = forecast.step_s * plan.total_steps if forecast.step_s and plan.total_steps else None
    rows, problem = plan.data.rows if plan.data else None, plan.data_problem.problems[0][:200] if plan.data_problem else ""
    return Outcome(value, summaries, forecast.peak_high_bytes, budget, seconds, forecast.tokens_per_s, rows, problem)


class Outcomes:
    """The file: forks of the planner process append to it, the page reads what is new."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._offset, self._file = 0, (0, 0)
        self._known: dict[str, dict[str, Any]] = {}

    def clear(self) -> None:
        """Begin anew, with another file."""
        with suppress(FileNotFoundError):
            self._path.unlink()
        self._path.touch(mode=0o600)

    def add(self, recipe: Recipe, values: dict[str, Any]) -> None:
        """Append the outcome of a recipe in one write, which no other process's write can split."""
        line = json.dumps({"recipe": _key(recipe), **values}) + "\n"
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)

    def has(self, recipe: Recipe) -> bool:
        """Whether the recipe's outcome is there."""
        self._read()
        return _key(recipe) in self._known

    @property
    def count(self) -> int:
        """How many outcomes there are."""
        self._read()
        return len(self._known)

    def around(self, recipe: Recipe, plan: Plan, name: str, current: Outcome) -> list[Outcome]:
        """The outcome at each usual value of a setting and at the plan's own, in their order."""
        self._read()
        values = sorted({*USUAL[name], current.value})
        return [current if value == current.value else self._outcome(recipe, plan, name, value) for value in values]

    def _outcome(self, recipe: Recipe, plan: Plan, name: str, value: int) -> Outcome:
        try:
            changed = resolved(recipe, **{name: value})
        except ValidationError as error:
            return Outcome(value, problem=error.errors()[0]["msg"].removeprefix("Value error, ")[:200])
        values = self._known.get(_key(changed))
        if values is None:
            return Outcome(value)
        outcome = Outcome(**{**values, "value": value})
        budget = plan.budget_bytes or plan.card.free_bytes
        is_current = outcome.budget_bytes is None or abs(outcome.budget_bytes - budget) <= _BUDGET_SHARE * budget
        return outcome if is_current else Outcome(value)

    def _read(self) -> None:
        with self._lock, suppress(FileNotFoundError), self._path.open("rb") as file:
            stat = os.fstat(file.fileno())
            if (stat.st_dev, stat.st_ino) != self._file or stat.st_size < self._offset:
                self._file, self._offset, self._known = (stat.st_dev, stat.st_ino), 0, {}
            file.seek(self._offset)
            for line in file.read().splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    break  # it is being written
                self._offset += len(line)
                values = json.loads(line)
                self._known[values.pop("recipe")] = values


def _key(recipe: Recipe) -> str:
    return hashlib.sha256(write_recipe(recipe).encode()).hexdigest()[:24]
