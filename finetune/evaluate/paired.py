"""Base against tuned on the same rows: the difference with its interval, and the rows that would settle it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

_DRAWS = 2_000


@dataclass(frozen=True)
class Difference:
    """Tuned minus base, with a 95 % interval. `more_rows`: how many more would tell it from zero, None where it is told.

    None as well without any difference, which no number of rows is known to tell.
    """

    value: float
    low: float
    high: float
    more_rows: int | None

    @property
    def is_told(self) -> bool:
        """Whether zero is outside the interval."""
        return not self.low <= 0 <= self.high


def difference(
    base: Sequence[float], tuned: Sequence[float], weights: Sequence[float] | None = None, *, span: float = 0.0
) -> Difference:
    """Weighted mean of tuned - base over two rows or more, with the expanded percentile interval of a paired bootstrap.

    Bootstrap: Efron 1979. Expanded, because its spread is that of a normal with n in place of n - 1: Hesterberg 2015.
    `weights`: of each row, e.g. its tokens. `span`: the largest difference of a row, where there is one; rows that all differ
    by the same say nothing of rarer ones, so that the rule of three (Hanley and Lippman-Hand 1983) widens their interval.
    """
    gaps = np.asarray(tuned, dtype=float) - np.asarray(base, dtype=float)
    weigh = np.ones(len(gaps)) if weights is None else np.asarray(weights, dtype=float)
    value, rows = float(np.average(gaps, weights=weigh)), len(gaps)
    chance, means = np.random.default_rng(0), np.empty(_DRAWS)
    for draw in range(_DRAWS):
        chosen = chance.integers(rows, size=rows)
        means[draw] = np.average(gaps[chosen], weights=weigh[chosen])
    wider = _wider(rows)
    low, high = (value + wider * (float(edge) - value) for edge in np.percentile(means, (2.5, 97.5)))
    if span:
        low, high = max(-span, low), min(span, high)
    if span and np.ptp(gaps) == 0:
        unseen = min(1.0, 3 / rows)
        low, high = max(-span, low - 2 * span * unseen), min(span, high + 2 * span * unseen)
    more = None
    if low <= 0 <= high and value:  # the interval shrinks with the root of the rows
        reach = value - low if value > 0 else high - value
        more = max(1, math.ceil(rows * (reach / value) ** 2) - rows)
    return Difference(value, low, high, more)


def in_words(made: Difference | None, scale: float = 1.0, unit: str = "", names: str = "tuned - base") -> str:
    """A difference and its interval; first whether the rows tell it from zero, and how many more would."""
    if made is None:
        return "not measured"
    low, value, high = (f"{scale * each:+.3g}" for each in (made.low, made.value, made.high))
    text = f"{names} {value}{unit} (95 % interval {low} to {high})"
    if made.is_told:
        return text
    more = f"; about {made.more_rows:,} more rows would" if made.more_rows else ""
    return f"can't tell yet{more}: {text}"


def ordered(base: Sequence[float], tuned: Sequence[float], by: str) -> list[int]:
    """Rows: first the tuned model's `worst` or `best` score, or the largest difference (`differ`)."""
    keys: dict[str, Callable[[int], tuple[float, float]]] = {
        "worst": lambda row: (tuned[row], tuned[row] - base[row]),
        "best": lambda row: (-tuned[row], base[row] - tuned[row]),
        "differ": lambda row: (-abs(tuned[row] - base[row]), tuned[row] - base[row]),
    }
    return sorted(range(len(tuned)), key=keys[by])


def _wider(rows: int) -> float:
    """Student's over the normal quantile (its first terms in 1/df), and n - 1 in place of n."""
    normal, free = 1.96, rows - 1
    return (1 + (normal**2 + 1) / (4 * free)) * math.sqrt(rows / free)
