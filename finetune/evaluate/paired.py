"""Base against tuned on the same rows: the difference with its interval, and how many rows would make it significant."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

_DRAWS = 2_000
#: Of a normal distribution, 95 % are within so many standard deviations.
_NORMAL = 1.96
#: A difference that is smaller than its interval by this factor would take its square times as many rows.
_MOST_WIDTHS = 1000


@dataclass(frozen=True)
class Difference:
    """Tuned minus base, with a 95 % interval. `more_rows`: about how many more rows would make it significant.

    None if it is significant, if the difference is 0, and if it takes too many to say.
    """

    value: float
    low: float
    high: float
    more_rows: int | None

    @property
    def is_significant(self) -> bool:
        """Whether zero is outside the interval."""
        return not self.low <= 0 <= self.high


def difference(
    base: Sequence[float], tuned: Sequence[float], weights: Sequence[float] | None = None, *, span: float = 0.0
) -> Difference | None:
    """Weighted mean of tuned - base, with the expanded percentile interval of a paired bootstrap; None for fewer than two rows
    and without weights.

    Bootstrap: Efron 1979. It is too narrow for few rows and is widened by sqrt(n / (n - 1)) and Student's t: Hesterberg 2015.
    `weights`: of each row, e.g. its tokens. `span`: the largest possible difference of a row, if there is one. The interval
    then counts two more rows, one better and one worse by that much (Bonett and Price 2012): few rows that differ say little of
    how many do.
    """
    if len(base) < 2 or not (weights is None or any(weights)):
        return None
    differences = np.asarray(tuned, dtype=float) - np.asarray(base, dtype=float)
    row_weights = np.ones(len(differences)) if weights is None else np.asarray(weights, dtype=float)
    mean_difference, row_count = float(np.average(differences, weights=row_weights)), len(differences)
    if span:
        differences = np.append(differences, (span, -span))
        row_weights = np.append(row_weights, (np.mean(row_weights),) * 2)
    shrunk_mean, rng, means = float(np.average(differences, weights=row_weights)), np.random.default_rng(0), np.empty(_DRAWS)
    for draw in range(_DRAWS):
        chosen = rng.integers(len(differences), size=len(differences))
        means[draw] = np.average(differences[chosen], weights=row_weights[chosen])
    degrees = len(differences) - 1
    # Student's over the normal quantile (its first terms in 1/df), and n - 1 instead of n
    expansion = (1 + (_NORMAL**2 + 1) / (4 * degrees)) * math.sqrt(len(differences) / degrees)
    lower, upper = (shrunk_mean + expansion * (float(quantile) - shrunk_mean) for quantile in np.percentile(means, (2.5, 97.5)))
    if span:
        lower, upper = max(-span, lower), min(span, upper)
    more_rows = None
    half_width = _NORMAL * expansion * float(np.std(means))
    if lower <= 0 <= upper and half_width < _MOST_WIDTHS * abs(shrunk_mean):  # the interval shrinks with the root of the rows
        more_rows = max(1, math.ceil(row_count * (half_width / shrunk_mean) ** 2) - row_count)
    return Difference(mean_difference, lower, upper, more_rows)


def format_difference(difference: Difference | None, scale: float = 1.0, unit: str = "") -> str:
    """A difference and its interval, and about how many more rows would be enough."""
    if difference is None:
        return "not measured"
    lower, value, upper = (f"{scale * bound:+.3g}" for bound in (difference.low, difference.value, difference.high))
    if difference.is_significant:
        return f"{value}{unit} (95 % interval {lower} to {upper})"
    more = difference.more_rows
    doubt = f"too few rows to be sure, about {more:,} more would do" if more else "no change seen"
    return f"{value}{unit}, {doubt} (95 % interval {lower} to {upper})"


def rank_rows(base: Sequence[float], tuned: Sequence[float], order: str) -> list[int]:
    """Indices of rows: first the tuned model's `worst` or `best` score, or the largest difference (`differ`)."""
    keys: dict[str, Callable[[int], tuple[float, float]]] = {
        "worst": lambda row: (tuned[row], tuned[row] - base[row]),
        "best": lambda row: (-tuned[row], base[row] - tuned[row]),
        "differ": lambda row: (-abs(tuned[row] - base[row]), tuned[row] - base[row]),
    }
    return sorted(range(len(tuned)), key=keys[order])
