"""How long a run will take: a range from the whole runs that were measured on this machine before."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.units import format_seconds

if TYPE_CHECKING:
    from finetune.planner.plan import DataStatistics
    from finetune.settings import Settings

#: Student's t for 95 % between both ends, by degrees of freedom; more have 2.
_STUDENT = {1: 12.7, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23}
#: What is assumed before runs differ: a deviation as if one degree of freedom had shown it, which after one run gives the
#: range of half to double. Scaled inverse chi-squared prior (Gelman et al., Bayesian Data Analysis, 3.2).
_ASSUMED_FREEDOM, AFTER_ONE = 1, 2.0
_ASSUMED_DEVIATION = math.log(AFTER_ONE) / (_STUDENT[_ASSUMED_FREEDOM] * math.sqrt(2))
#: A forward pass of an evaluation takes about this share of a training step's time for as many tokens.
EVALUATION_SHARE = 1 / 3


@dataclass(frozen=True)
class MeasuredRun:
    """A whole run on this machine: its workload in seconds of the speed model, and what it took, with and without loading."""

    model: str
    workload_s: float
    train_s: float
    load_s: float


@dataclass(frozen=True)
class RunTime:
    """Seconds that a run takes from its start to its end: 95 % of runs are expected between `low_s` and `high_s`.

    `runs`: earlier runs on this machine that say so; `same_model`: whether they are of this model.
    """

    low_s: float
    likely_s: float
    high_s: float
    runs: int
    same_model: bool

    @property
    def summary(self) -> str:
        """`1 min to 2 min, by 5 earlier runs of this model here`."""
        which = f"{self.runs} earlier run{'' if self.runs == 1 else 's'} {'of this model ' if self.same_model else ''}here"
        return f"{format_seconds(self.low_s)} to {format_seconds(self.high_s)}, by {which}"


def workload_s(step_s: float, total_steps: int | None, settings: Settings, data: DataStatistics | None) -> float | None:
    """Seconds of a run by the speed model, steps and evaluations; the unit is arbitrary where the GPU's rates are unknown."""
    if not total_steps:
        return None
    evaluations = math.ceil(total_steps / settings.eval_steps) if settings.eval_steps and data and data.eval_rows else 0
    tokens = data.total_tokens / data.rows * settings.effective_batch_size if data and data.rows else 0.0
    share = EVALUATION_SHARE * data.eval_total_tokens / tokens if data and tokens else 0.0
    return step_s * (total_steps + evaluations * share)


def run_time(workload: float | None, model: str, measured: Sequence[MeasuredRun]) -> RunTime | None:
    """The range for a run of this workload; None where no whole run has been measured here."""
    same_model = [run for run in measured if run.model == model]
    runs = same_model or measured
    if not workload or not runs:
        return None
    logs = [math.log(run.train_s / run.workload_s) for run in runs]
    freedom = _ASSUMED_FREEDOM + len(logs) - 1
    squares = _ASSUMED_FREEDOM * _ASSUMED_DEVIATION**2 + (len(logs) - 1) * (statistics.variance(logs) if len(logs) > 1 else 0.0)
    spread = _STUDENT.get(freedom, 2.0) * math.sqrt(squares / freedom * (1 + 1 / len(logs)))
    middle, load_s = workload * math.exp(statistics.fmean(logs)), [run.load_s for run in runs]
    return RunTime(
        min(load_s) + middle * math.exp(-spread), statistics.median(load_s) + middle, max(load_s) + middle * math.exp(spread),
        len(runs), bool(same_model),
    )  # fmt: skip
