"""How long the rest of a run will take, by its own steps and evaluations."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from finetune.events import Evaluation, Event, Start, Step

_NEWEST_STEPS, _NEWEST_EVALUATIONS, _MOST_STEP_S = 50, 5, 1e9


@dataclass
class Pace:
    """What the newest steps and evaluations of a run took, in seconds, from its events.

    `steps_s`: from the end of the step before, so with a checkpoint between, but without an evaluation. `evaluations_s`: an
    evaluation with its samples. `last`: the newest step or start.
    """

    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NEWEST_STEPS))
    evaluations_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NEWEST_EVALUATIONS))
    eval_steps: int | None = None
    last: Step | Start | None = None
    _evaluation: Evaluation | None = None

    @classmethod
    def of(cls, events: Iterable[Event]) -> Pace:
        pace = cls()
        for event in events:
            pace.add(event)
        return pace

    def add(self, event: Event) -> None:
        """Take in one event; most kinds change nothing."""
        match event:
            case Start():
                self.last, self.eval_steps, self._evaluation = event, event.eval_steps, None
            case Evaluation():
                self._evaluation = event
            case Step():
                self._add_step(event)
                self.last, self._evaluation = event, None

    def _add_step(self, step: Step) -> None:
        seconds, before = step.step_s, self.last  # after a start, the step's own
        if isinstance(before, Step) and before.time_s and step.time_s and step.step == before.step + 1:
            seconds = step.time_s - before.time_s
        interval_s = _plausible(seconds)
        if self._evaluation is not None and (evaluation_s := _plausible(self._evaluation.eval_s)) is not None:
            if interval_s is not None and step.step_s is not None and interval_s > step.step_s:  # with its samples
                evaluation_s, interval_s = max(evaluation_s, interval_s - step.step_s), step.step_s
            self.evaluations_s.append(evaluation_s)
        if interval_s is not None:
            self.steps_s.append(interval_s)

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step, by the median of the newest steps; None before the first step."""
        if not isinstance(self.last, Step) or self.last.total_steps is None or not self.steps_s:
            return None
        steps = max(0, self.last.total_steps - self.last.step)
        return steps * statistics.median(self.steps_s) + self._evaluations_left_s()

    def _evaluations_left_s(self) -> float:
        """Seconds of the evaluations before the last step, which are as long as the newest ones."""
        if not (self.eval_steps and self.evaluations_s and isinstance(self.last, Step) and self.last.total_steps):
            return 0.0
        count = (self.last.total_steps - 1) // self.eval_steps - (self.last.step - 1) // self.eval_steps
        count -= self._evaluation is not None  # that of the newest step has ended
        return max(0, count) * statistics.fmean(self.evaluations_s)

    def as_json(self) -> dict[str, Any]:
        """What `from_json` needs beside the newest events."""
        return {"steps_s": list(self.steps_s), "evaluations_s": list(self.evaluations_s)}

    @classmethod
    def from_json(cls, values: dict[str, Any], newest: Iterable[Event]) -> Pace:
        """The pace of `as_json`; `newest`: the newest event of each kind, the oldest first."""
        pace = cls.of(newest)
        pace.steps_s = deque(values["steps_s"], maxlen=_NEWEST_STEPS)
        pace.evaluations_s = deque(values["evaluations_s"], maxlen=_NEWEST_EVALUATIONS)
        return pace


def _plausible(seconds: float | None) -> float | None:
    """None where a damaged file has no such time."""
    return seconds if seconds is not None and 0 <= seconds < _MOST_STEP_S else None
