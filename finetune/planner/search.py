"""Search for the fastest strategy whose forecast fits, with few forecasts, and for where compiled layers pay off."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from finetune.memory.forecast import Forecast
from finetune.planner.plan import AS_SET, Choices
from finetune.planner.shape import ModelShape
from finetune.planner.speed import SAVED_BYTES, Job, Timing, saved_bytes, time_step
from finetune.planner.strategy import Strategy
from finetune.settings import AUTO, resolved
from finetune.settings.base_formats import INT8
from finetune.settings.compatibility import BUFFERS, compiling_conflict
from finetune.settings.optimizers import EIGHT_BIT, OPTIMIZERS
from finetune.units import GIB, format_bytes

#: Activation bytes saved per input and output element of a layer's linear layers, before any forecast: 2.3 in a dry run of
#: Llama-3.1-8B, 3.1 with dropout.
USUAL_SAVED_BYTES = 2.4
#: Loss tile, workspace, CUDA context and allocator overhead, before any forecast.
USUAL_REST_BYTES = 1.2 * GIB

#: Seconds to compile a layer: 2 to 33 on a busy machine, once 112 (benchmarks/reference/compiled_matrix.csv).
COMPILE_S = 25.0
#: Model types whose compiled layers were run on a stand-in: one graph, and the forecast's bytes. phi3's forecast is 2 to 4 %
#: too high for rows of uneven length (benchmarks/reference/compiled_matrix.csv).
COMPILED_TYPES = (
    "exaone4", "gemma", "gemma3_text", "granite", "llama", "ministral3", "mistral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3",
    "seed_oss", "smollm3",
)  # fmt: skip
#: Lowest compute capability for which torch's compiler has Triton kernels (torch/_inductor/scheduler.py).
LEAST_CAPABILITY = (7, 0)


@dataclass(frozen=True)
class EvaluatedStrategy:
    """A strategy with its forecast, for adapters of `rank` and rows of `width` tokens."""

    strategy: Strategy
    width: int
    rank: int
    forecast: Forecast


# Estimates, scaled from other strategies' forecasts, decide which strategy to forecast next. A verdict always needs a forecast.
def estimate_high_bytes(strategy: Strategy, evaluated: Collection[EvaluatedStrategy], job: Job) -> int:
    """Scale the upper end from the nearest evaluated strategy; guess without one."""
    if not evaluated:
        shape, tokens = job.shape, job.micro_batch_tokens(strategy, job.width)
        usual = USUAL_SAVED_BYTES * saved_bytes(strategy.base, job.lean) / SAVED_BYTES
        activations = _activation_bytes(strategy, usual * shape.layer_width * tokens, tokens, shape)
        adapters = (8 + OPTIMIZERS[strategy.optim].state_bytes) * job.rank * shape.adapter_per_rank
        return round(_weight_bytes(strategy, shape) + adapters + activations + USUAL_REST_BYTES)
    nearest = min(evaluated, key=lambda candidate: _distance(candidate, strategy, job.width))
    forecast = nearest.forecast
    context = (job.card.context_bytes or 0) + job.card.context_uncertainty_bytes
    share = (forecast.peak_high_bytes - context) / max(1, *forecast.peaks.values())
    alike = (strategy.base, strategy.offloaded) == (nearest.strategy.base, nearest.strategy.offloaded)
    load = forecast.peaks["load"] if alike else 0
    return round(max(load, _allocated_bytes(strategy, nearest, job)) * share + context)


def least_bytes(strategy: Strategy, job: Job) -> int:
    """Return a lower bound for any plan with this strategy."""
    return _layers_on_card(strategy, job.shape) + (job.card.context_bytes or 0)


def _layers_on_card(strategy: Strategy, shape: ModelShape) -> int:
    return shape.weight_bytes(strategy.base) - max(0, strategy.offloaded - BUFFERS) * shape.layer_bytes(strategy.base)


def _weight_bytes(strategy: Strategy, shape: ModelShape) -> int:
    # a table in host memory is on the GPU only while loading
    table = round(shape.table * strategy.base.other_bytes) if strategy.host_table else 0
    return _layers_on_card(strategy, shape) - table


def _allocated_bytes(strategy: Strategy, nearest: EvaluatedStrategy, job: Job) -> float:
    parts = {name: float(count) for name, count in nearest.forecast.parts.items()}
    shape, reference = job.shape, nearest.strategy
    growth = strategy.micro * job.width / (reference.micro * nearest.width)
    parts["weights"] += _weight_bytes(strategy, shape) - _weight_bytes(reference, shape)
    for name in ("adapters", "gradients", "optimizer"):
        parts[name] = parts[name] * job.rank / nearest.rank
    more_bytes = OPTIMIZERS[strategy.optim].state_bytes - OPTIMIZERS[reference.optim].state_bytes
    parts["optimizer"] = max(0.0, parts["optimizer"] + more_bytes * job.rank * shape.adapter_per_rank)
    parts["loss"] *= max(1.0, growth)
    activation_bytes = (parts.pop("activations") + parts.pop("recomputed")) * growth
    tokens = job.micro_batch_tokens(strategy, job.width)
    ratio = saved_bytes(strategy.base, job.lean) / saved_bytes(reference.base, job.lean)
    recomputed = reference.recomputed_layers(shape.layers)
    whole = shape.layers - recomputed + (1 if recomputed else 0)
    fixed = _activation_bytes(reference, 0.0, tokens, shape)
    layer = max((activation_bytes - fixed) / whole, 2 * shape.hidden * tokens) * ratio  # saved by one layer
    parts["activations"] = _activation_bytes(strategy, layer, tokens, shape)
    return sum(parts.values())


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


@dataclass(frozen=True)
class Search:
    """A job, its budget and the forecasts so far, shared between attempts."""

    job: Job
    budget_bytes: int
    forecaster: Callable[[Strategy], Forecast]
    #: Why a strategy's layers are not compiled, empty where they can be; forecasts are without compiled layers.
    why_lean: Callable[[Strategy], str]
    #: By strategy, width and rank: shared between attempts.
    evaluated: dict[tuple[Strategy, int, int], EvaluatedStrategy]
    _lean_because: dict[Strategy, str] = field(default_factory=dict)
    _more_compiled: dict[bool | str, float] = field(default_factory=dict)
    _timings: dict[Strategy, Timing] = field(default_factory=dict)

    def find(self, strategies: Iterable[Strategy]) -> EvaluatedStrategy | None:
        """Return the fastest strategy (time x price) whose forecast fits."""
        return self._first(self.within_budget(strategies), self._rank, self.fits)

    def _first(
        self, choices: list[Strategy], rank: Callable[[Strategy], Any], allows: Callable[[Strategy], bool]
    ) -> EvaluatedStrategy | None:
        for _ in range(MOST_FORECASTS):
            if not (allowed := [strategy for strategy in choices if allows(strategy)]):
                return None
            strategy = min(allowed, key=rank)
            if not self.evaluated and self.job.shape.mixer and (half := replace(strategy, every_n=2)) in choices:
                strategy = half if strategy.every_n > 2 else strategy  # 1 in 3 of a hybrid's layers runs at full depth
            if first_forecast := self.forecast(strategy):
                return first_forecast
        # estimates keep changing with each forecast: settle for the first strategy evaluated so far
        evaluated = filter(None, map(self.lookup, filter(allows, choices)))
        return min(evaluated, key=lambda candidate: rank(candidate.strategy), default=None)

    def smallest(self, choices: list[Strategy]) -> EvaluatedStrategy:
        least = self._smallest(choices)
        # estimates decide within one weight format; forecast the other formats unless their weights alone are larger
        for base in dict.fromkeys(strategy.base for strategy in choices if strategy.base != least.strategy.base):
            others = [strategy for strategy in choices if strategy.base == base]
            if min(least_bytes(strategy, self.job) for strategy in others) < least.forecast.peak_high_bytes:
                least = min(least, self._smallest(others), key=lambda candidate: candidate.forecast.peak_high_bytes)
        return least

    def _smallest(self, choices: list[Strategy]) -> EvaluatedStrategy:
        least = self._first(choices, lambda strategy: (self.high_bytes(strategy), self._rank(strategy)), lambda _: True)
        assert least is not None
        return least

    def within_budget(self, strategies: Iterable[Strategy]) -> list[Strategy]:
        return [strategy for strategy in strategies if least_bytes(strategy, self.job) <= self.budget_bytes]

    def fitting_after_all(self, strategies: list[Strategy]) -> EvaluatedStrategy | None:
        """Return the smallest strategy if its forecast fits though estimates slightly exceed the budget."""
        if not any(self.high_bytes(strategy) <= ESTIMATE_ERROR * self.budget_bytes for strategy in strategies):
            return None
        smallest = self.smallest(strategies)
        return smallest if self.fits(smallest.strategy) else None

    def forecast(self, strategy: Strategy) -> EvaluatedStrategy | None:
        """Forecast the strategy once; return an earlier forecast, or None for a new one."""
        cached = self.lookup(strategy)
        if cached is None:
            self.evaluated[self.key(strategy)] = EvaluatedStrategy(*self.key(strategy), self.forecaster(strategy))
        return cached

    def lookup(self, strategy: Strategy) -> EvaluatedStrategy | None:
        return self.evaluated.get(self.key(strategy))

    def key(self, strategy: Strategy) -> tuple[Strategy, int, int]:
        return strategy, self.job.width, self.job.rank

    def high_bytes(self, strategy: Strategy) -> int:
        if candidate := self.lookup(strategy):
            return candidate.forecast.peak_high_bytes
        return estimate_high_bytes(strategy, self.evaluated.values(), self.job)

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
            return f"compiled layers need {format_bytes(round(more))} more than the budget"
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

    def fits(self, strategy: Strategy) -> bool:
        """Return whether the strategy fits by its forecast, or by an estimate before it has one."""
        return self.high_bytes(strategy) <= self.budget_bytes

    def _rank(self, strategy: Strategy) -> tuple[float, int, str, str, int, int]:
        score = self.timing(strategy).step_s * strategy.price
        # among equals prefer more offloaded layers: copies that nobody waits for leave headroom
        return (score, -strategy.base.bits, strategy.optim, str(strategy.checkpointing), strategy.micro, -strategy.offloaded)


def why_lean(job: Job, choices: Choices, config: dict[str, Any], strategy: Strategy) -> str:
    """Return why a strategy's layers are not compiled; empty if compiling pays off."""
    recipe, card = choices.recipe, job.card
    if recipe.torch_compile != AUTO:
        return AS_SET
    if card.is_cpu:
        return "on a CPU compiled layers run mostly the same kernels"
    if strategy.base is INT8:
        return compiling_conflict(resolved(recipe, load_in_8bit=True))
    if strategy.offload_target:
        return "offloaded layers are untested"
    if strategy.checkpointing == "offload" and strategy.every_n > 1:
        return "compiled layers offload the inputs of all layers or none"
    if recipe.lora_dropout and strategy.checkpointing:
        return "recomputed layers with dropout need more than their forecast"
    if card.capability is not None and card.capability < LEAST_CAPABILITY:
        return f"Triton has no kernels for compute capability {card.capability[0]}.{card.capability[1]}"
    if recipe.lean_layers is True or recipe.mlp_tile_tokens not in (AUTO, 0):
        return "the recipe sets lean layers"
    if recipe.launch.num_processes > 1:
        return "several processes are untested"
    if (kind := (config.get("text_config") or config).get("model_type")) not in COMPILED_TYPES:
        return f"layers of type {kind} are untested"
    if why := compiling_conflict(recipe):
        return why
    if OPTIMIZERS[strategy.optim].price > OPTIMIZERS[EIGHT_BIT].price and not choices.is_set("optim"):
        return f"{strategy.optim} is chosen where memory is too short for compiling"
    # the number of steps depends on the micro-batch
    pays, reason = compiling_pays(job, strategy, choices.total_steps(strategy.micro))
    return "" if pays else reason


def compiling_pays(job: Job, strategy: Strategy, steps: int | None) -> tuple[bool, str]:
    """Return whether compiled layers save more time than compiling takes, and the reason."""
    lean, compiled = (time_step(replace(job, compiled=on), strategy).step_s for on in (False, True))
    if compiled >= lean:
        return False, "by the speed model it saves no time"
    needed = math.ceil(COMPILE_S / (lean - compiled))
    saved = f"by the speed model it saves {1 - compiled / lean:.0%} of time; compiling takes about {COMPILE_S:.0f} s, which"
    if steps is not None and steps < needed:
        return False, f"{saved} pays off after {needed:,} steps, and the run has {steps:,}"
    return True, f"{saved} pays off after {needed:,} steps"
