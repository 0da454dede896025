"""Run time by earlier runs on this machine, and the cost of a run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from finetune.events import ENDED_STATES, Event, RunWarning, Start, State
from finetune.units import format_seconds


@dataclass(frozen=True)
class MeasuredRun:
    """A finished run on this machine: its workload in seconds of the speed model, and its measured seconds."""

    model: str
    workload_s: float
    train_s: float
    load_s: float


@dataclass(frozen=True)
class RunTime:
    """Seconds to load and to train: medians of `runs` earlier runs on this machine, scaled by workload."""

    load_s: float
    train_s: float
    runs: int

    @property
    def summary(self) -> str:
        """`12 min, by 5 earlier runs here`."""
        return f"{format_seconds(self.load_s + self.train_s)}, by {self.runs} earlier run{'s' * (self.runs != 1)} here"


def run_time(workload: float | None, model: str, measured: Sequence[MeasuredRun]) -> RunTime | None:
    """Return the expected time of a run, by runs of the same model if there are any. None before the first measured run."""
    runs = [run for run in measured if run.model == model] or measured
    if not workload or not runs:
        return None
    factor = statistics.median(run.train_s / run.workload_s for run in runs)
    return RunTime(statistics.median(run.load_s for run in runs), workload * factor, len(runs))


def cost_of(seconds: float | None, price_per_hour: float | None) -> float | None:
    """Return seconds times the price; None if one is unknown."""
    return None if seconds is None or price_per_hour is None else seconds / 3600 * price_per_hour


def seconds_spent(events: Sequence[Event]) -> float:
    """Return the seconds of all attempts of a run. Steps that a resumed run repeats count again; pauses don't count."""
    seconds = 0.0
    last_s: float | None = None  # between attempts
    for event in events:
        if event.time_s is None or isinstance(event, RunWarning):  # one of the next attempt comes before its start
            continue
        state = event.state if isinstance(event, State) else None
        if last_s is None or state in ("queued", "starting"):  # of an attempt that was killed the last event is its end
            last_s = event.time_s if state == "starting" or isinstance(event, Start) else None
        else:
            seconds += event.time_s - last_s
            last_s = None if state in ENDED_STATES else event.time_s
    return seconds
