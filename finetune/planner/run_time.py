"""How long a run will take and what it costs: ranges from the whole runs that were measured on this machine before."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.events import ENDED_STATES, Event, RunWarning, Start, State, Step
from finetune.units import format_seconds

if TYPE_CHECKING:
    from finetune.planner.plan import DataStatistics
    from finetune.settings import Settings

#: Student's t for 95 % between both ends, by degrees of freedom; more have 2.
_STUDENT = {1: 12.7, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23}
#: What is assumed before runs differ: a deviation as if one degree of freedom had shown it, which after one run gives the
#: range of half to double; where CPU seconds are measured, which other programs change little, of 1 / 1.5 to 1.5. Scaled
#: inverse chi-squared prior (Gelman et al., Bayesian Data Analysis, 3.2).
_ASSUMED_FREEDOM, _AFTER_ONE, AFTER_ONE_BY_CPU = 1, 2.0, 1.5
#: A forward pass of an evaluation takes about this share of a training step's time for as many tokens.
EVALUATION_SHARE = 1 / 3
_HOUR_S = 3600.0


@dataclass(frozen=True)
class MeasuredRun:
    """A whole run on this machine: its workload in seconds of the speed model, and what loading and the rest of it took.

    `cpu_s`: CPU seconds of all its threads, None of a run on a GPU and where it is not measured.
    """

    model: str
    workload_s: float
    train_s: float
    load_s: float
    cpu_s: float | None = None

    @property
    def wait(self) -> float:
        """Seconds for each CPU second: what other programs change, when its CPU seconds stay the same. 1 of a run on a GPU."""
        return (self.load_s + self.train_s) / self.cpu_s if self.cpu_s else 1.0


@dataclass(frozen=True)
class RunTime:
    """Seconds that a run takes from its start to its end: 95 % of runs are expected between `low_s` and `high_s`.

    `runs`: earlier runs on this machine that say so; `same_model`: whether they are of this model. `likely_s` is what those
    took; `low_s` is of an idle machine, `high_s` of one that is `slowdown` times slower, by all programs of the last minutes; 1
    on a GPU. `load_s`: seconds of `likely_s` before the first step.
    """

    low_s: float
    likely_s: float
    high_s: float
    runs: int
    same_model: bool
    slowdown: float = 1.0
    load_s: float = 0.0

    @property
    def summary(self) -> str:
        """`1 min to 4 min, by 5 earlier runs of this model here; the longest if the CPU stays as busy as it was of late`."""
        which = f"{self.runs} earlier run{'' if self.runs == 1 else 's'} {'of this model ' if self.same_model else ''}here"
        is_idle = f"{self.slowdown:.1f}" == "1.0"
        load = "" if is_idle else "; the longest if the CPU stays as busy as it was of late"
        return f"{format_seconds(self.low_s)} to {format_seconds(self.high_s)}, by {which}{load}"


def workload_s(step_s: float, total_steps: int | None, settings: Settings, data: DataStatistics | None) -> float | None:
    """Seconds of a run by the speed model, steps and evaluations; the unit is arbitrary where the GPU's rates are unknown."""
    if not total_steps:
        return None
    evaluations = math.ceil(total_steps / settings.eval_steps) if settings.eval_steps and data and data.eval_rows else 0
    tokens = data.total_tokens / data.rows * settings.effective_batch_size if data and data.rows else 0.0
    share = EVALUATION_SHARE * data.eval_total_tokens / tokens if data and tokens else 0.0
    return step_s * (total_steps + evaluations * share)


def run_time(
    workload: float | None, model: str, measured: Sequence[MeasuredRun], slowdowns: Sequence[float] = ()
) -> RunTime | None:
    """The range for a run of this workload; None where no whole run has been measured here.

    What they took is likely. `slowdowns`: by programs now and in the last minutes, as `slowdowns_by_load` gives them. The least
    wait of those runs is that of an idle machine, where the range begins; it ends at the largest slowdown. Without their CPU
    seconds nobody knows how idle the machine was: the range is then of what they took.
    """
    same_model = [run for run in measured if run.model == model]
    runs = same_model or measured
    if not workload or not runs:
        return None
    idle = min(1.0, *(run.wait for run in runs))
    logs = [math.log(run.train_s * idle / run.wait / run.workload_s) for run in runs]
    by_cpu = all(run.cpu_s for run in runs)
    spread = spread_of(logs, AFTER_ONE_BY_CPU if by_cpu else _AFTER_ONE)
    middle, load_s = workload * math.exp(statistics.fmean(logs)), [run.load_s * idle / run.wait for run in runs]
    most = max(slowdowns, default=1.0) if by_cpu else 1.0
    low_s, high_s = min(load_s) + middle / spread, most * (max(load_s) + middle * spread)
    likely_load_s = statistics.median(run.load_s for run in runs)
    typical_s = workload * math.exp(statistics.fmean(math.log(run.train_s / run.workload_s) for run in runs))
    likely_s = min(max(likely_load_s + typical_s, low_s), high_s)
    return RunTime(low_s, likely_s, high_s, len(runs), bool(same_model), most, min(likely_load_s, likely_s))


def spread_of(logs: Sequence[float], after_one: float) -> float:
    """The factor around the mean of `logs` within which 95 % of further values are; `after_one`: when there is one value."""
    assumed = math.log(after_one) / (_STUDENT[_ASSUMED_FREEDOM] * math.sqrt(2))
    freedom = _ASSUMED_FREEDOM + len(logs) - 1
    squares = _ASSUMED_FREEDOM * assumed**2 + (len(logs) - 1) * (statistics.variance(logs) if len(logs) > 1 else 0.0)
    return math.exp(_STUDENT.get(freedom, 2.0) * math.sqrt(squares / freedom * (1 + 1 / len(logs))))


def slowdowns_by_load(loads: Sequence[float], cpus: int) -> tuple[float, ...]:
    """How many times `loads`, threads of others that want a CPU, lengthen a run with a thread on each CPU: equal shares."""
    return tuple(1 + load / cpus for load in loads)


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
