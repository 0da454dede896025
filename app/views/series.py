"""A metric over steps in bounded memory: bins of equal width that keep the lowest and highest value, so spikes stay visible.

Bins are aligned to multiples of their width, a power of two. When there are too many, neighbours are merged and the width
doubles. So a bin depends only on the values in it, never on when they came: appending leaves all earlier bins as they are, and
reading a run in one go or step by step gives the same series. A value that is not a number leaves a gap.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..language import mark, tr

#: Bins kept.
MOST_BINS = 1000


@dataclass
class Bin:
    """Values of the steps from `index * width`; `missing` counts values that are no number."""

    low: float = math.inf
    low_step: int = 0
    high: float = -math.inf
    total: float = 0.0
    count: int = 0
    missing: int = 0

    def take(self, step: int, value: float) -> None:
        if value < self.low:
            self.low, self.low_step = value, step
        self.high = max(self.high, value)
        self.total += value
        self.count += 1

    def merged(self, later: Bin) -> Bin:
        lowest = min(self, later, key=lambda part: part.low)
        return Bin(
            lowest.low, lowest.low_step, max(self.high, later.high), self.total + later.total, self.count + later.count,
            self.missing + later.missing,
        )  # fmt: skip

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


Point = tuple[float, float | None]


@dataclass
class Series:
    """One metric. `add` in any order of steps; a step may come again, as after a resume.

    `missing`: step and text of the newest value, where that is not a number.
    """

    width: int = 1
    bins: dict[int, Bin] = field(default_factory=dict)
    first: float | None = None
    first_step: int | None = None
    last: float | None = None
    last_step: int | None = None
    missing: tuple[int, str] | None = None

    def add(self, step: int, value: Any) -> None:
        """Take a value; None and text (`nan`, `inf`) are missing values, which leave a gap."""
        part = self.bins.setdefault(step // self.width, Bin())
        if isinstance(value, (int, float)) and math.isfinite(value):
            part.take(step, float(value))
            self.last, self.last_step, self.missing = float(value), step, None
            if self.first_step is None or step < self.first_step:
                self.first, self.first_step = float(value), step
        else:
            part.missing += 1
            self.missing = (step, mark("not measured") if value is None else str(value))
        while len(self.bins) > MOST_BINS:
            self._double()

    def newest_text(self, show: Callable[[float], str]) -> str:
        """The newest value with its step; where it is not a number, the text and the last number."""
        number = ""
        if self.last is not None:
            number = tr("{value} at step {step}", value=show(self.last), step=f"{self.last_step:,}")
        if self.missing is None:
            return number or tr("not measured")
        step, value = f"{self.missing[0]:,}", tr(self.missing[1])
        if not number:
            return tr("{value} at step {step}", value=value, step=step)
        return tr("{value} at step {step} (last number: {number})", value=value, step=step, number=number)

    @property
    def low(self) -> float | None:
        return min((part.low for part in self.bins.values() if part.count), default=None)

    def points(self, *, highest: bool = False) -> list[Point]:
        """The mean or the highest value of each bin, at the bin's middle; a bin without values is a gap."""
        middle, bins = (self.width - 1) / 2, sorted(self.bins.items())
        return [(index * self.width + middle, part.high if highest and part.count else part.mean) for index, part in bins]

    def _double(self) -> None:
        merged: dict[int, Bin] = {}
        for index, part in sorted(self.bins.items()):
            merged[index // 2] = merged[index // 2].merged(part) if index // 2 in merged else part
        self.bins, self.width = merged, self.width * 2


def smoothed(points: list[Point], factor: float) -> list[Point]:
    """Exponential moving average without the pull of its beginning; gaps stay. `factor` 0 is raw, below 1."""
    average, weight, averages = 0.0, 0.0, list[Point]()
    for step, value in points:
        if value is not None:
            average = factor * average + (1 - factor) * value
            weight = factor * weight + (1 - factor)
        averages.append((step, average / weight if value is not None and weight else None))
    return averages
