"""What a run costs: before it a range from the forecast of its time, after it the hours and the energy that it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from finetune.events import ENDED_STATES, Event, RunWarning, Start, State, Step
from finetune.planner.run_time import RunTime

_HOUR_S = 3600.0


@dataclass(frozen=True)
class RunCost:
    """Cost of a run in the money of `price_per_hour`; `low` and `high`: None where no such run was measured."""

    likely: float
    low: float | None
    high: float | None
    price_per_hour: float

    @property
    def summary(self) -> str:
        """`0.42 to 0.50 at 1.2 an hour`."""
        at = f"at {self.price_per_hour:g} an hour"
        if self.low is None or self.high is None:
            return f"about {self.likely:,.2f} {at}; its range is not measured here"
        return f"{self.low:,.2f} to {self.high:,.2f} {at}"


def run_cost(price_per_hour: float | None, time: RunTime | None, modelled_s: float | None) -> RunCost | None:
    """By earlier runs on this machine, else by the speed model's seconds; None without a price or a time."""
    if price_per_hour is None or (time is None and modelled_s is None):
        return None
    rate = price_per_hour / _HOUR_S
    if time is not None:
        return RunCost(time.likely_s * rate, time.low_s * rate, time.high_s * rate, price_per_hour)
    assert modelled_s is not None
    return RunCost(modelled_s * rate, None, None, price_per_hour)


@dataclass(frozen=True)
class Expense:
    """What a run has taken so far: seconds of all its attempts, and the GPU's energy in watt hours.

    `energy_wh`: power at the end of each step times the step's seconds, so without loading and evaluations; None where no power
    is measured. `cost`: None without a price.
    """

    seconds: float
    energy_wh: float | None
    cost: float | None

    @property
    def summary(self) -> str:
        """`cost 0.44; energy of the steps 12.3 Wh`; empty where neither is known."""
        cost = "" if self.cost is None else f"cost {self.cost:,.2f}"
        return "; ".join(
            filter(None, (cost, "" if self.energy_wh is None else f"energy of the steps {self.energy_wh:,.1f} Wh"))
        )


def expense_of(events: Sequence[Event], price_per_hour: float | None) -> Expense:
    """Of a run's events in order. Steps that a resumed run repeats count again: they were paid for; the time between two
    attempts does not."""
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
    measured = [
        event.power_w * event.step_s / _HOUR_S for event in events if isinstance(event, Step) and event.power_w and event.step_s
    ]
    cost = None if price_per_hour is None else seconds / _HOUR_S * price_per_hour
    return Expense(seconds, sum(measured) if measured else None, cost)
