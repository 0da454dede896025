"""A metric over steps in bounded memory: bins of equal width that keep the lowest and highest value, so spikes stay visible.

Bins are aligned to multiples of their width, a power of two. When there are too many, neighbours are merged and the width
doubles. So a bin depends only on the values in it, never on when they came: appending leaves all earlier bins as they are, and
reading a run in one go or step by step gives the same series. A value that is not a number leaves a gap.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..language import mark, tr

#: Bins kept; each gives at most its lowest and highest value and a gap, so that with both ends there are at most 2,000 points.
MOST_BINS = 660


@dataclass
class Bin:
    """Values of the steps from `index * width`: extremes with their steps, sum and count for the mean, missing values."""

    low: float
    low_step: int
    high: float
    high_step: int
    total: float = 0.0
    count: int = 0
    missing: int = 0

    def take(self, step: int, value: float) -> None:
        if value < self.low:
            self.low, self.low_step = value, step
        if value > self.high:
            self.high, self.high_step = value, step
        self.total += value
        self.count += 1

    def merged(self, later: Bin) -> Bin:
        minimum = min(self, later, key=lambda part: (part.low, part.low_step))
        maximum = max(self, later, key=lambda part: (part.high, -part.high_step))
        return Bin(
            minimum.low, minimum.low_step, maximum.high, maximum.high_step, self.total + later.total, self.count + later.count,
            self.missing + later.missing,
        )  # fmt: skip


Point = tuple[float, float | None]


class Series:
    """One metric. `add` in any order of steps; a step may come again, as after a resume."""

    def __init__(self, most_bins: int = MOST_BINS) -> None:
        self.width = 1
        self.bins: dict[int, Bin] = {}
        self.last: float | None = None
        self.last_step: int | None = None
        self.first_step: int | None = None
        self.first: float | None = None
        #: Step and text of the newest value, where that is not a number.
        self.missing: tuple[int, str] | None = None
        self._most = most_bins

    def add(self, step: int, value: Any) -> None:
        """Take a value; None and text (`nan`, `inf`) are missing values, which leave a gap."""
        index = step // self.width
        part = self.bins.get(index)
        if part is None:
            part = self.bins[index] = Bin(math.inf, step, -math.inf, step)
        if isinstance(value, (int, float)) and math.isfinite(value):
            part.take(step, float(value))
            self.last, self.last_step, self.missing = float(value), step, None
            if self.first_step is None or step < self.first_step:
                self.first, self.first_step = float(value), step
        else:
            part.missing += 1
            self.missing = (step, mark("not measured") if value is None else str(value))
        while len(self.bins) > self._most:
            self._double()

    def newest_text(self, show: Callable[[float], str]) -> str:
        """The newest value with its step; where it is not a number, that, and the last one that was."""
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

    @property
    def high(self) -> float | None:
        return max((part.high for part in self.bins.values() if part.count), default=None)

    def points(self) -> list[Point]:
        """At most 2,000 points in order of steps; a point without a value is a gap. First and last values are there."""
        points: list[Point] = []
        for index in sorted(self.bins):
            part = self.bins[index]
            if part.count:
                lowest, highest = (float(part.low_step), part.low), (float(part.high_step), part.high)
                points += [lowest] if lowest[0] == highest[0] else sorted((lowest, highest))
            if part.missing:
                points.append((index * self.width + self.width - 0.5, None))
        return self._with_ends(points)

    def means(self) -> list[Point]:
        """The mean of each bin, at the bin's middle; a bin without values is a gap."""
        middle = (self.width - 1) / 2
        return [
            (index * self.width + middle, part.total / part.count if part.count else None)
            for index, part in sorted(self.bins.items())
        ]

    def _with_ends(self, points: list[Point]) -> list[Point]:
        if self.width > 1 and self.first_step is not None and self.last_step is not None:
            steps = {step for step, _ in points}
            ends = [(self.first_step, self.first), (self.last_step, self.last)]
            points += [(float(step), value) for step, value in ends if step not in steps]
            points.sort(key=lambda point: point[0])
        return points

    def _double(self) -> None:
        merged: dict[int, Bin] = {}
        for index in sorted(self.bins):
            old = merged.get(index // 2)
            merged[index // 2] = old.merged(self.bins[index]) if old else self.bins[index]
        self.bins, self.width = merged, self.width * 2

    def as_json(self) -> dict[str, Any]:
        """Everything, for a file that saves reading a long run again."""
        bins = {}
        for index, part in self.bins.items():
            minimum, maximum = (part.low, part.high) if part.count else (None, None)
            bins[index] = [minimum, part.low_step, maximum, part.high_step, part.total, part.count, part.missing]
        return {
            "width": self.width, "bins": bins, "ends": [self.first_step, self.first, self.last_step, self.last],
            "missing": self.missing,
        }  # fmt: skip

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Series:
        series = cls()
        series.width = values["width"]
        for index, fields in values["bins"].items():
            minimum, minimum_step, maximum, *others = fields
            series.bins[int(index)] = Bin(
                math.inf if minimum is None else minimum, minimum_step, -math.inf if maximum is None else maximum, *others
            )
        series.first_step, series.first, series.last_step, series.last = values["ends"]
        series.missing = tuple(values["missing"]) if values.get("missing") else None
        return series


def smoothed(points: list[Point], factor: float) -> list[Point]:
    """Exponential moving average without the pull of its beginning; gaps stay. `factor` 0 is raw, below 1."""
    average, weight, averages = 0.0, 0.0, list[Point]()
    for step, value in points:
        if value is not None:
            average = factor * average + (1 - factor) * value
            weight = factor * weight + (1 - factor)
        averages.append((step, average / weight if value is not None and weight else None))
    return averages
