"""Remaining time of a run."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from finetune.events import Evaluation, Event, Start, Step

_NEWEST_STEPS, _NEWEST_EVALUATIONS = 50, 5


@dataclass
class Pace:
    """Seconds of the newest steps and evaluations of a run."""

    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NEWEST_STEPS))
    evaluations_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NEWEST_EVALUATIONS))
    eval_steps: int | None = None
    newest: Step | None = None  # of this attempt

    def add(self, event: Event) -> None:
        match event:
            case Start():
                self.newest, self.eval_steps = None, event.eval_steps
            case Evaluation() if event.eval_s is not None:
                self.evaluations_s.append(event.eval_s)
            case Step():
                self.newest = event
                if event.step_s is not None:
                    self.steps_s.append(event.step_s)

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step, without checkpoints and sample answers; None before the first step."""
        if self.newest is None or self.newest.total_steps is None or not self.steps_s:
            return None
        total, step = self.newest.total_steps, self.newest.step
        left_s = max(0, total - step) * statistics.median(self.steps_s)
        if self.eval_steps and self.evaluations_s:
            evaluations_left = (total - 1) // self.eval_steps - (step - 1) // self.eval_steps  # the newest step's included
            left_s += max(0, evaluations_left) * statistics.fmean(self.evaluations_s)
        return left_s
