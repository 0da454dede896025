"""Search for the fastest strategy whose forecast fits, with few forecasts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from finetune.memory.forecast import Forecast
from finetune.planner.shape import ModelShape
from finetune.planner.speed import SAVED_BYTES, Job, Timing, saved_bytes, time_step
from finetune.planner.strategy import Strategy
from finetune.settings.compatibility import BUFFERS
from finetune.settings.optimizers import OPTIMIZERS
from finetune.units import GIB, format_bytes

#: Activation bytes saved per input and output element of a layer's linear layers, before any forecast: 2.3 in a dry run of
#: Llama-3.1-8B, 3.1 with dropout.
USUAL_SAVED_BYTES = 2.4
#: Loss tile, workspace, CUDA context and allocator overhead, before any forecast.
USUAL_REST_BYTES = 1.2 * GIB


@dataclass(frozen=True)
class EvaluatedStrategy:
    """A strategy with its forecast, for adapters of `rank` and rows of `width` tokens."""

    strategy: Strategy
    width: int
    rank: int
    forecast: Forecast


# Estimates, scaled from other strategies' forecasts, decide which strategy to forecast next. A verdict always needs a forecast.
def estimate_high_bytes(strategy: Strategy, width: int, evaluated: list[EvaluatedStrategy], job: Job) -> int:
    """Scale the upper end from the nearest evaluated strategy."""
    if not evaluated:
        return _guess_bytes(strategy, width, job)
    nearest = min(evaluated, key=lambda candidate: _distance(candidate, strategy, width))
    forecast = nearest.forecast
    context = (job.card.context_bytes or 0) + job.card.context_uncertainty_bytes
    share = (forecast.peak_high_bytes - context) / max(1, *forecast.peaks.values())
    alike = (strategy.base, strategy.offloaded) == (nearest.strategy.base, nearest.strategy.offloaded)
    load = forecast.peaks["load"] if alike else 0
    return round(max(load, sum(_parts(strategy, width, nearest, job).values())) * share + context)


def _guess_bytes(strategy: Strategy, width: int, job: Job) -> int:
    shape, tokens = job.shape, job.micro_batch_tokens(strategy, width)
    usual = USUAL_SAVED_BYTES * saved_bytes(strategy.base, job.lean) / SAVED_BYTES
    activations = _activation_bytes(strategy, usual * shape.layer_width * tokens, tokens, shape)
    adapters = (8 + OPTIMIZERS[strategy.optim].state_bytes) * job.rank * shape.adapter_per_rank
    return round(_weight_bytes(strategy, shape) + adapters + activations + USUAL_REST_BYTES)


def least_bytes(strategy: Strategy, job: Job) -> int:
    """Return a lower bound for any plan with this strategy."""
    return _layers_on_card(strategy, job.shape) + (job.card.context_bytes or 0)


def _layers_on_card(strategy: Strategy, shape: ModelShape) -> int:
    return shape.weight_bytes(strategy.base) - max(0, strategy.offloaded - BUFFERS) * shape.layer_bytes(strategy.base)


def _weight_bytes(strategy: Strategy, shape: ModelShape) -> int:
    # a table in host memory is on the GPU only while loading
    table = round(shape.table * strategy.base.other_bytes) if strategy.host_table else 0
    return _layers_on_card(strategy, shape) - table


def _parts(strategy: Strategy, width: int, nearest: EvaluatedStrategy, job: Job) -> dict[str, float]:
    parts = {name: float(count) for name, count in nearest.forecast.parts.items()}
    shape, reference, growth = job.shape, nearest.strategy, strategy.micro * width / (nearest.strategy.micro * nearest.width)
    parts["weights"] += _weight_bytes(strategy, shape) - _weight_bytes(reference, shape)
    for name in ("adapters", "gradients", "optimizer"):
        parts[name] = parts[name] * job.rank / nearest.rank
    more_bytes = OPTIMIZERS[strategy.optim].state_bytes - OPTIMIZERS[reference.optim].state_bytes
    parts["optimizer"] = max(0.0, parts["optimizer"] + more_bytes * job.rank * shape.adapter_per_rank)
    parts["loss"] *= max(1.0, growth)
    activation_bytes = (parts.pop("activations") + parts.pop("recomputed")) * growth
    tokens = job.micro_batch_tokens(strategy, width)
    ratio = saved_bytes(strategy.base, job.lean) / saved_bytes(reference.base, job.lean)
    recomputed = reference.recomputed_layers(shape.layers)
    whole = shape.layers - recomputed + (1 if recomputed else 0)
    fixed = _activation_bytes(reference, 0.0, tokens, shape)
    layer = max((activation_bytes - fixed) / whole, 2 * shape.hidden * tokens) * ratio  # saved by one layer
    parts["activations"] = _activation_bytes(strategy, layer, tokens, shape)
    return parts


def _activation_bytes(strategy: Strategy, layer: float, tokens: float, shape: ModelShape) -> float:
    recomputed = strategy.recomputed_layers(shape.layers)
    # recomputed layers keep only their input
    kept_input = 0 if strategy.checkpointing == "offload" else 2 * shape.hidden * tokens
    if strategy.checkpointing == "selective":
        kept_input += 2 * shape.attention_width * tokens
    # `layer`: bytes saved by one layer
    return (shape.layers - recomputed) * layer + recomputed * kept_input + (layer if recomputed else 0)


def _distance(candidate: EvaluatedStrategy, strategy: Strategy, width: int) -> tuple:
    reference = candidate.strategy
    return (
        reference.base != strategy.base,
        (reference.offloaded == 0) != (strategy.offloaded == 0),
        (reference.checkpointing is False) != (strategy.checkpointing is False),
        reference.checkpointing != strategy.checkpointing or reference.every_n != strategy.every_n,
        abs(reference.micro * candidate.width - strategy.micro * width),
        reference.optim != strategy.optim,
        reference.host_table != strategy.host_table,
        abs(reference.offloaded - strategy.offloaded),
        reference.micro,
    )


#: Most forecasts in one search; each costs up to a second.
MOST_FORECASTS = 10
#: Largest error factor of an estimate, roughly.
ESTIMATE_ERROR = 1.05
Forecaster = Callable[[Strategy], Forecast]


@dataclass(frozen=True)
class Search:
    """A job, its budget and the forecasts so far, shared between attempts."""

    job: Job
    budget_bytes: int
    forecaster: Forecaster
    #: Why a strategy's layers are not compiled, empty where they can be; forecasts are without compiled layers.
    why_lean: Callable[[Strategy], str]
    evaluated: list[EvaluatedStrategy] = field(default_factory=list)
    _lean_because: dict[Strategy, str] = field(default_factory=dict)
    _more_compiled: dict[bool | str, float] = field(default_factory=dict)
    _timings: dict[Strategy, Timing] = field(default_factory=dict)

    @property
    def width(self) -> int:
        return self.job.batches.longest

    def find(self, strategies: Iterable[Strategy]) -> EvaluatedStrategy | None:
        """Return the fastest strategy (time x price) whose forecast fits."""
        loadable = self.within_budget(strategies)
        for _ in range(MOST_FORECASTS):
            fitting = [strategy for strategy in loadable if self.high_bytes(strategy) <= self.budget_bytes]
            if not fitting:
                return None
            if fastest_forecast := self.forecast(min(fitting, key=self._rank)):
                return fastest_forecast
        # estimates keep changing with each forecast: settle for the best strategy evaluated so far
        evaluated = [candidate for candidate in self._of_this_job() if candidate.strategy in loadable and self.fits(candidate)]
        return min(evaluated, key=lambda candidate: self._rank(candidate.strategy), default=None)

    def smallest(self, strategies: Iterable[Strategy]) -> EvaluatedStrategy:
        choices = list(strategies)
        least = self._smallest(choices)
        # estimates decide within one weight format; forecast the other formats unless their weights alone are larger
        for base in dict.fromkeys(strategy.base for strategy in choices if strategy.base != least.strategy.base):
            others = [strategy for strategy in choices if strategy.base == base]
            if min(least_bytes(strategy, self.job) for strategy in others) < least.forecast.peak_high_bytes:
                least = min(least, self._smallest(others), key=lambda candidate: candidate.forecast.peak_high_bytes)
        return least

    def _smallest(self, choices: list[Strategy]) -> EvaluatedStrategy:
        for _ in range(MOST_FORECASTS):
            least = min(choices, key=lambda strategy: (self.high_bytes(strategy), self._rank(strategy)))
            if least_forecast := self.forecast(least):
                return least_forecast
        evaluated = [candidate for candidate in self._of_this_job() if candidate.strategy in choices]
        return min(evaluated, key=lambda candidate: candidate.forecast.peak_high_bytes)

    def within_budget(self, strategies: Iterable[Strategy]) -> list[Strategy]:
        return [strategy for strategy in strategies if least_bytes(strategy, self.job) <= self.budget_bytes]

    def fitting_after_all(self, strategies: Iterable[Strategy]) -> EvaluatedStrategy | None:
        """Return the smallest strategy if its forecast fits though estimates slightly exceed the budget."""
        if not any(self.high_bytes(strategy) <= ESTIMATE_ERROR * self.budget_bytes for strategy in strategies):
            return None
        smallest = self.smallest(strategies)
        return smallest if self.fits(smallest) else None

    def forecast(self, strategy: Strategy) -> EvaluatedStrategy | None:
        """Forecast the strategy once; return an earlier forecast, or None for a new one."""
        cached = self.lookup(strategy)
        if cached is None:
            self.evaluated.append(EvaluatedStrategy(strategy, self.width, self.job.rank, self.forecaster(strategy)))
        return cached

    def lookup(self, strategy: Strategy) -> EvaluatedStrategy | None:
        return next((candidate for candidate in self._of_this_job() if candidate.strategy == strategy), None)

    def high_bytes(self, strategy: Strategy) -> int:
        if candidate := self.lookup(strategy):
            return candidate.forecast.peak_high_bytes
        return estimate_high_bytes(strategy, self.width, self.evaluated, self.job)

    def timing(self, strategy: Strategy) -> Timing:
        if strategy not in self._timings:
            job = self.job if self.lean_because(strategy) else replace(self.job, compiled=True, lean=False)
            self._timings[strategy] = time_step(job, strategy)
        return self._timings[strategy]

    def lean_because(self, strategy: Strategy) -> str:
        """Return why the strategy's layers are not compiled."""
        if strategy not in self._lean_because:
            self._lean_because[strategy] = self.why_lean(strategy)
        lean = self.high_bytes(strategy) if strategy.checkpointing in self._more_compiled else 0
        more = lean + self._more_compiled.get(strategy.checkpointing, 0) * strategy.micro - self.budget_bytes
        if not self._lean_because[strategy] and more > 0 and lean <= self.budget_bytes:
            return f"compiled layers need {format_bytes(round(more))} more than there is"
        return self._lean_because[strategy]

    def rule_out_compiling(self, strategies: Iterable[Strategy], reason: str) -> None:
        for strategy in strategies:
            self._lean_because[strategy] = self.lean_because(strategy) or reason
        self._timings.clear()

    def note_compiled(self, lean: EvaluatedStrategy, compiled: Forecast) -> None:
        """Store the extra bytes of compiled layers per row, by checkpointing."""
        more = compiled.peak_high_bytes - lean.forecast.peak_high_bytes
        self._more_compiled[lean.strategy.checkpointing] = more / lean.strategy.micro
        self._timings.clear()

    def _of_this_job(self) -> list[EvaluatedStrategy]:
        return [candidate for candidate in self.evaluated if (candidate.width, candidate.rank) == (self.width, self.job.rank)]

    def fits(self, candidate: EvaluatedStrategy) -> bool:
        return candidate.forecast.peak_high_bytes <= self.budget_bytes

    def _rank(self, strategy: Strategy) -> tuple[float, int, str, str, int, int]:
        score = self.timing(strategy).step_s * strategy.price
        # among equals prefer more offloaded layers: copies that nobody waits for leave headroom
        return (score, -strategy.base.bits, strategy.optim, str(strategy.checkpointing), strategy.micro, -strategy.offloaded)
