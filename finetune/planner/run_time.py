"""Run time by earlier runs, and cost."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from finetune.events import ENDED_STATES, Event, RunWarning, Start, State
from finetune.units import format_seconds


@dataclass(frozen=True)
class MeasuredRun:
    """A finished run: workload in seconds of the speed model, and measured seconds."""

    model: str
    workload_s: float
    train_s: float
    load_s: float


@dataclass(frozen=True)
class RunTime:
    """Medians of `runs` earlier runs on this machine, scaled by workload."""

    load_s: float
    train_s: float
    runs: int

    @property
    def summary(self) -> str:
        return f"{format_seconds(self.load_s + self.train_s)}, by {self.runs} earlier run{'s' * (self.runs != 1)} here"


def run_time(workload: float | None, model: str, measured: Sequence[MeasuredRun]) -> RunTime | None:
    """Return the expected time of a run, None before the first measured run."""
    # other models' runs are better than none: workloads scale
    runs = [run for run in measured if run.model == model] or measured
    if not workload or not runs:
        return None
    factor = statistics.median(run.train_s / run.workload_s for run in runs)
    return RunTime(statistics.median(run.load_s for run in runs), workload * factor, len(runs))


def cost_of(seconds: float | None, price_per_hour: float | None) -> float | None:
    """Multiply by the price."""
    return None if seconds is None or price_per_hour is None else seconds / 3600 * price_per_hour


def seconds_spent(events: Sequence[Event]) -> float:
    """Sum all attempts of a run, without pauses; repeated steps count again."""
    seconds = 0.0
    last_s: float | None = None  # between attempts
    for event in events:
        if event.time_s is None or isinstance(event, RunWarning):  # the next attempt's warning precedes its start
            continue
        state = event.state if isinstance(event, State) else None
        if last_s is None or state in ("queued", "starting"):  # a killed attempt ends with its last event
            last_s = event.time_s if state == "starting" or isinstance(event, Start) else None
        else:
            seconds += event.time_s - last_s
            last_s = None if state in ENDED_STATES else event.time_s
    return seconds
