"""Find the fastest strategy whose forecast fits, with few forecasts: scaled estimates say which one to forecast next."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from finetune.forecast.forecast import Forecast
from finetune.plan.estimate import Anchor, estimate_high_bytes, least_bytes
from finetune.plan.speed import Job, Timing, time_step
from finetune.plan.strategy import Strategy

FITS, TIGHT, NO_FIT = "fits", "tight", "does not fit"
#: Forecasts in one search; each costs up to a second.
MOST_FORECASTS = 10
#: Estimates are good to about this.
NEAR = 1.05
Forecaster = Callable[[Strategy, int], Forecast]


def verdict_of(forecast: Forecast, budget_bytes: int) -> str:
    """From the interval: fits when even its upper end does, tight when only its lower end does."""
    if forecast.peak_high_bytes <= budget_bytes:
        return FITS
    return TIGHT if forecast.peak_low_bytes <= budget_bytes else NO_FIT


@dataclass
class Search:
    """One recipe on one card: forecasts made so far, and the way to make more."""

    job: Job
    budget_bytes: int
    forecaster: Forecaster
    anchors: list[Anchor] = field(default_factory=list)
    _timings: dict[tuple[int, int, Strategy], Timing] = field(default_factory=dict)

    def find(self, strategies: Iterable[Strategy], width: int) -> Anchor | None:
        """The fastest strategy (by time x price) that is forecast to fit with rows of `width` tokens; None when none is."""
        able = self.able(strategies)
        for _ in range(MOST_FORECASTS):
            fitting = [strategy for strategy in able if self.high_bytes(strategy, width) <= self.budget_bytes]
            if not fitting:
                return None
            best = min(fitting, key=self._rank)
            made = self.made(best, width)
            if made is not None:
                return made
            self.forecast(best, width)
        known = [anchor for anchor in self._here(width) if anchor.strategy in able and self._fits(anchor)]
        return min(known, key=lambda anchor: self._rank(anchor.strategy), default=None)

    def smallest(self, strategies: Iterable[Strategy], width: int) -> Anchor:
        """The strategy that takes least, with its forecast."""
        choices = list(strategies)
        for _ in range(MOST_FORECASTS):
            least = min(choices, key=lambda strategy: (self.high_bytes(strategy, width), self._rank(strategy)))
            made = self.made(least, width)
            if made is not None:
                return made
            self.forecast(least, width)
        return min(self._here(width), key=lambda anchor: anchor.forecast.peak_high_bytes)

    def able(self, strategies: Iterable[Strategy]) -> list[Strategy]:
        """Those whose weights alone don't take more than there is."""
        return [strategy for strategy in strategies if least_bytes(strategy, self.job) <= self.budget_bytes]

    def could_fit(self, strategies: Iterable[Strategy], width: int) -> bool:
        """Whether some strategy is estimated to be so near the budget that only a forecast can tell."""
        return any(self.high_bytes(strategy, width) <= NEAR * self.budget_bytes for strategy in strategies)

    def forecast(self, strategy: Strategy, width: int) -> Anchor:
        """Forecast one strategy, or return the forecast made before."""
        made = self.made(strategy, width)
        if made is None:
            made = Anchor(strategy, width, self.job.rank, self.forecaster(strategy, width))
            self.anchors.append(made)
        return made

    def made(self, strategy: Strategy, width: int) -> Anchor | None:
        """The forecast that was made of this strategy at this width."""
        wanted = (strategy, width, self.job.rank)
        return next((anchor for anchor in self.anchors if (anchor.strategy, anchor.width, anchor.rank) == wanted), None)

    def high_bytes(self, strategy: Strategy, width: int) -> int:
        """Upper end of the peak: forecast where that was made, else scaled from the nearest forecast."""
        made = self.made(strategy, width)
        if made is not None:
            return made.forecast.peak_high_bytes
        return estimate_high_bytes(strategy, width, self.anchors, self.job)

    def timing(self, strategy: Strategy) -> Timing:
        """The speed model's seconds for this strategy."""
        key = (self.job.batches.max_length, self.job.rank, strategy)
        if key not in self._timings:
            self._timings[key] = time_step(self.job, strategy)
        return self._timings[key]

    def _here(self, width: int) -> list[Anchor]:
        return [anchor for anchor in self.anchors if (anchor.width, anchor.rank) == (width, self.job.rank)]

    def _fits(self, anchor: Anchor) -> bool:
        return anchor.forecast.peak_high_bytes <= self.budget_bytes

    def _rank(self, strategy: Strategy) -> tuple[float, int, str, str, int]:
        score = self.timing(strategy).step_s * strategy.price
        return (score, -strategy.bits, strategy.optim, str(strategy.checkpointing), strategy.micro)
