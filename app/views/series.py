"""A metric over steps in bounded memory: bins keep the lowest and highest value, so spikes stay visible."""

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
    """Values of the steps from `index * width`."""

    low: float = math.inf
    low_step: int = 0
    high: float = -math.inf
    total: float = 0.0
    count: int = 0
    #: Count of values that are not numbers.
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
    """One metric. Steps may come in any order and repeatedly, as after a resume."""

    width: int = 1
    bins: dict[int, Bin] = field(default_factory=dict)
    first: float | None = None
    first_step: int | None = None
    last: float | None = None
    last_step: int | None = None
    #: Step and text of the newest value, if not a number.
    missing: tuple[int, str] | None = None

    def add(self, step: int, value: Any) -> None:
        """Add a value; None, `nan` and `inf` leave a gap."""
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
        """Return the newest value with its step; for a missing value also the last number."""
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
        """Return mean or highest value per bin, at the bin's middle; empty bins are gaps."""
        middle, bins = (self.width - 1) / 2, sorted(self.bins.items())
        return [(index * self.width + middle, part.high if highest and part.count else part.mean) for index, part in bins]

    def _double(self) -> None:
        # bins are aligned to multiples of a power of two, so a bin depends only on its values and not on when they came:
        # appending keeps earlier bins, and reading a run in one go or step by step gives the same series
        merged: dict[int, Bin] = {}
        for index, part in sorted(self.bins.items()):
            merged[index // 2] = merged[index // 2].merged(part) if index // 2 in merged else part
        self.bins, self.width = merged, self.width * 2


def smoothed(points: list[Point], factor: float = 0.8) -> list[Point]:
    """Return an exponential moving average; gaps stay. `factor`: 0 is raw, below 1."""
    average, weight, averages = 0.0, 0.0, list[Point]()
    for step, value in points:
        if value is not None:
            average = factor * average + (1 - factor) * value
            weight = factor * weight + (1 - factor)
        # divided by the weight: no pull towards 0 at the beginning
        averages.append((step, average / weight if value is not None and weight else None))
    return averages
