"""Compare base and tuned model on the same rows: difference, interval, and rows to significance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_DRAWS = 2_000  # of the bootstrap
#: 95 % of a normal distribution are within this many standard deviations.
_NORMAL_QUANTILE = 1.96
#: Above this half width of the interval / difference, no number of rows is named: the number grows with its square.
_MAX_RELATIVE_WIDTH = 1000


@dataclass(frozen=True)
class Difference:
    """Tuned minus base, with a 95 % interval."""

    value: float
    low: float
    high: float
    #: About how many more rows would make it significant; None if it is, if the difference is 0, or for too many to say.
    more_rows: int | None

    @property
    def is_significant(self) -> bool:
        return not self.low <= 0 <= self.high


def difference(
    base: Sequence[float], tuned: Sequence[float], weights: Sequence[float] | None = None, *, span: float = 0.0
) -> Difference | None:
    """Return the weighted mean of tuned - base; None for fewer than two rows or zero weights.

    `span` is the largest possible difference of a row; unless 0, two rows of this difference widen the interval.
    """
    if len(base) < 2 or not (weights is None or any(weights)):
        return None
    differences = np.asarray(tuned, dtype=float) - np.asarray(base, dtype=float)
    row_weights = np.ones(len(differences)) if weights is None else np.asarray(weights, dtype=float)
    mean_difference, row_count = float(np.average(differences, weights=row_weights)), len(differences)
    # Two more rows, one better and one worse by `span` (Bonett and Price 2012): few rows that differ say little about how many
    # rows differ in general.
    if span:
        differences = np.append(differences, (span, -span))
        row_weights = np.append(row_weights, (np.mean(row_weights),) * 2)
    shrunk_mean = float(np.average(differences, weights=row_weights))
    # paired bootstrap: Efron 1979
    rng, means = np.random.default_rng(0), np.empty(_DRAWS)
    for draw in range(_DRAWS):
        drawn_rows = rng.integers(len(differences), size=len(differences))
        means[draw] = np.average(differences[drawn_rows], weights=row_weights[drawn_rows])
    degrees_of_freedom = len(differences) - 1
    # The percentile interval is too narrow for few rows: Hesterberg 2015 expands it.
    # Student's over the normal quantile (its first terms in 1/df), and n - 1 instead of n
    expansion = (1 + (_NORMAL_QUANTILE**2 + 1) / (4 * degrees_of_freedom)) * math.sqrt(len(differences) / degrees_of_freedom)
    lower, upper = (shrunk_mean + expansion * (float(quantile) - shrunk_mean) for quantile in np.percentile(means, (2.5, 97.5)))
    if span:
        lower, upper = max(-span, lower), min(span, upper)
    more_rows = None
    half_width = _NORMAL_QUANTILE * expansion * float(np.std(means))
    if lower <= 0 <= upper and half_width < _MAX_RELATIVE_WIDTH * abs(shrunk_mean):
        # the interval shrinks with the square root of the number of rows
        more_rows = max(1, math.ceil(row_count * (half_width / shrunk_mean) ** 2) - row_count)
    return Difference(mean_difference, lower, upper, more_rows)


def format_difference(difference: Difference | None, scale: float = 1.0, unit: str = "") -> str:
    """Format a difference with its interval, and how many more rows would be enough."""
    if difference is None:
        return "not measured"
    lower, value, upper = (f"{scale * number:+.3g}" for number in (difference.low, difference.value, difference.high))
    if difference.is_significant:
        return f"{value}{unit} (95 % interval {lower} to {upper})"
    more_rows = difference.more_rows
    doubt = f"too few rows to be sure, about {more_rows:,} more would do" if more_rows else "no change seen"
    return f"{value}{unit}, {doubt} (95 % interval {lower} to {upper})"


def rank_rows(base: Sequence[float], tuned: Sequence[float], order: str) -> list[int]:
    """Return row indices by the tuned model's `worst` or `best` score, or by the difference (`differ`)."""
    keys = {  # of a row
        "worst": lambda row: (tuned[row], tuned[row] - base[row]),
        "best": lambda row: (-tuned[row], base[row] - tuned[row]),
        "differ": lambda row: (-abs(tuned[row] - base[row]), tuned[row] - base[row]),
    }
    return sorted(range(len(tuned)), key=keys[order])
