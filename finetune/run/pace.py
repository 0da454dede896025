"""Remaining time of a run, and where the time of a step goes."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from finetune.events import Evaluation, Event, Start, Step

if TYPE_CHECKING:  # the chain of imports stays short
    from finetune.planner.plan import Plan

_NEWEST_STEPS, _NEWEST_EVALUATIONS = 50, 5
_WARM_UP_STEPS = 2  # slow first steps of an attempt
_LEAST_STEPS = 5  # fewest recorded steps for a report, slow first steps included
_REPORTED_SHARE = 0.1  # shortest reported wait, as a share of the step
#: Clauses about the time of a step, which the page translates.
STEP_TIME = WAITED, MODELLED, COMPILING, MORE_WORK, BUSY = (
    "The GPU waited about {waited} ms of each {step} ms step for Python;",
    "By the speed model, the GPU waited about {waited} ms of each {step} ms step for Python;",
    "compiled layers would save about {saved} ms (not compiled: {reason}).",
    "longer examples or a larger micro-batch would give the GPU more work.",
    "The GPU is busy: at the end of a {step} ms step, Python waited {wait} ms for the GPU.",
)


@dataclass
class Pace:
    """Seconds of the newest steps and evaluations of a run."""

    #: From the end of the previous step: includes a checkpoint in between, but no evaluation.
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NEWEST_STEPS))
    evaluations_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NEWEST_EVALUATIONS))  # with the sample answers
    #: step_s, host_wait_s and gpu_utilisation of the steps of this attempt.
    waits: deque[tuple[float, float, float | None]] = field(default_factory=lambda: deque(maxlen=_NEWEST_STEPS))
    eval_steps: int | None = None
    last: Step | Start | None = None
    _evaluation: Evaluation | None = None  # since the last step

    @classmethod
    def of(cls, events: Iterable[Event]) -> Pace:
        pace = cls()
        for event in events:
            pace.add(event)
        return pace

    def add(self, event: Event) -> None:
        match event:
            case Start():
                self.last, self.eval_steps, self._evaluation = event, event.eval_steps, None
                self.waits.clear()
            case Evaluation():
                self._evaluation = event
            case Step():
                self._add_step(event)
                self.last, self._evaluation = event, None

    def _add_step(self, step: Step) -> None:
        interval_s = step.step_s  # the first step after a start has no previous end
        previous = self.last
        if isinstance(previous, Step) and previous.time_s and step.time_s and step.step == previous.step + 1:
            interval_s = max(0.0, step.time_s - previous.time_s)  # the clock may have been set back
        if self._evaluation is not None and (evaluation_s := self._evaluation.eval_s) is not None:
            # the interval less the step is the evaluation with its sample answers
            if interval_s is not None and step.step_s is not None and interval_s > step.step_s:
                evaluation_s, interval_s = max(evaluation_s, interval_s - step.step_s), step.step_s
            self.evaluations_s.append(evaluation_s)
        if interval_s is not None:
            self.steps_s.append(interval_s)
        if step.step_s is not None and step.host_wait_s is not None:
            self.waits.append((step.step_s, step.host_wait_s, step.gpu_utilisation))

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step, by medians; None before the first step."""
        if not isinstance(self.last, Step) or self.last.total_steps is None or not self.steps_s:
            return None
        total, step = self.last.total_steps, self.last.step
        left_s = max(0, total - step) * statistics.median(self.steps_s)
        if self.eval_steps and self.evaluations_s:
            evaluations_left = (total - 1) // self.eval_steps - (step - 1) // self.eval_steps
            evaluations_left -= self._evaluation is not None  # the newest step's evaluation has ended
            left_s += max(0, evaluations_left) * statistics.fmean(self.evaluations_s)
        return left_s

    def step_time_clauses(self, plan: Plan) -> tuple[list[str], dict[str, str]]:
        """Return clauses of `STEP_TIME` and their values; both empty after too few steps, or without a long wait."""
        # a module-level import would make the import chain longer than ten modules
        from finetune.planner.speed import COMPILED_DISPATCH, DISPATCH, LEAN_DISPATCH

        if len(self.waits) < _LEAST_STEPS:
            return [], {}
        settings = plan.settings
        steps_s, waits_s, maybe_utilisations = zip(*list(self.waits)[_WARM_UP_STEPS:], strict=True)
        step_s, python_wait_s = statistics.median(steps_s), statistics.median(waits_s)
        utilisations = [utilisation for utilisation in maybe_utilisations if utilisation is not None]
        gpu_busy_s = statistics.median(utilisations) * step_s if utilisations else plan.modelled_gpu_s
        gpu_wait_s = step_s - gpu_busy_s if gpu_busy_s is not None else 0.0
        layer_dispatch_s, _ = LEAN_DISPATCH if settings.lean_layers else DISPATCH
        saved_s = step_s * (1 - COMPILED_DISPATCH[0] / layer_dispatch_s)
        seconds = {"step": step_s, "wait": python_wait_s, "waited": gpu_wait_s, "saved": min(gpu_wait_s, saved_s)}
        values = {name: f"{1000 * value_s:,.0f}" for name, value_s in seconds.items()}
        values["reason"] = plan.reasons.get("torch_compile", "")
        # Selecting the trained tokens waits for the GPU in every micro-batch, so at the end of the step only the last backward
        # pass is queued: compare the wait with one micro-batch, not with the whole step.
        gpu_was_idle = utilisations and gpu_wait_s >= _REPORTED_SHARE * step_s
        if python_wait_s >= _REPORTED_SHARE * step_s / settings.gradient_accumulation_steps and not gpu_was_idle:
            return [BUSY], values
        if gpu_wait_s < _REPORTED_SHARE * step_s:
            return [], {}
        return [WAITED if utilisations else MODELLED, MORE_WORK if settings.torch_compile else COMPILING], values
