"""Make the plan: the fastest settings that fit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from finetune.card.card import PROCESS_BYTES, Card
from finetune.errors import RecipeError
from finetune.memory.device_peak import make_forecast
from finetune.memory.forecast import Forecast, RowShape, why_not_compiled
from finetune.model.configuration import read_config, stored_notes, stored_quantisation, trainable_formats
from finetune.model.hybrid import FLA, MAMBA, kernel_problem
from finetune.planner import defaults, resources
from finetune.planner.explain import alternatives, describe, explain_strategy
from finetune.planner.history import cost_of, read_history
from finetune.planner.plan import LEAST_LENGTH, Choices, DataStatistics, Plan, Suggestion, Verdict, as_overrides, verdict_of
from finetune.planner.search import EvaluatedStrategy, Search, compiling_pays, why_lean
from finetune.planner.shape import MAMBA2, shape_of
from finetune.planner.speed import Batches, Job, knows_rates, layer_copies_of
from finetune.planner.strategy import OFFLOAD_TARGETS, OffloadTarget, Strategy, neighbours, strategies
from finetune.settings import AUTO, Recipe, Settings, resolved
from finetune.settings.base_formats import NF4, QUANTISED, is_open
from finetune.settings.optimizers import EIGHT_BIT, OPTIMIZERS
from finetune.units import Progress

#: Bounds of measured / modelled time where the GPU's rates are known: beyond them the cause is another, such as a shared GPU.
LEAST_FACTOR, MOST_FACTOR = 0.3, 5.0
#: Most forecasts of compiled layers until one fits; each takes seconds.
MOST_COMPILED = 3
#: The note on a plan that is tight by a replay of the allocator.
AT_LIMIT = "by a replay of the allocator, torch fits the budget only by freeing cached blocks, which stalls the GPU each time"


def make_plan(
    recipe: Recipe, card: Card, data: DataStatistics | None, *, progress: Progress = lambda _: None, compare: bool = False
) -> Plan:
    """Resolve every `auto` of the recipe for this GPU and data. Raises RecipeError."""
    # The same inputs, including earlier measurements on the GPU, give the same settings. `compare` also forecasts strategies
    # that differ in one setting.
    planner = _Planner(recipe, card, data, progress)
    attempt = planner.best()
    if compare and attempt.verdict != Verdict.NO_FIT:
        options = attempt.search.within_budget(planner.open_strategies(attempt))
        for strategy in neighbours(attempt.evaluated.strategy, options):
            attempt.search.forecast(strategy)
    return planner.plan(attempt)


def plan_if_fits(recipe: Recipe, card: Card, data: DataStatistics | None) -> Plan | None:
    """Return the plan if it fits, without forecasts of alternatives. Raises RecipeError."""
    planner = _Planner(recipe, card, data)
    attempt = planner.best()
    return planner.plan(attempt) if attempt.verdict.fits else None


@dataclass(frozen=True)
class _Attempt:
    """One max_length and rank, and the chosen strategy."""

    choices: Choices
    search: Search
    chosen: EvaluatedStrategy | None = None
    offload_target: OffloadTarget = False
    #: The choices with compiled layers, if the chosen strategy has them; the search forecasts without.
    compiled: Choices | None = None

    @property
    def evaluated(self) -> EvaluatedStrategy:
        """The chosen strategy of a finished attempt."""
        assert self.chosen is not None
        return self.chosen

    @property
    def verdict(self) -> Verdict:
        return verdict_of(self.evaluated.forecast, self.search.budget_bytes, self.evaluated.strategy.offload_target)


@dataclass(eq=False)
class _Planner:
    recipe: Recipe
    card: Card
    data: DataStatistics | None
    report_progress: Progress = lambda _: None

    def __post_init__(self) -> None:
        self.budgeted_choices, self.budget_bytes = resources.choose_budget(Choices(self.recipe, self.data), self.card)
        self.report_progress("reading the model's configuration")
        self.config = read_config(self.recipe)
        self.shape = shape_of(self.config, self.recipe)
        if self.recipe.torch_compile is True and self.shape.experts:
            raise RecipeError("torch_compile does not work with a mixture of experts; set torch_compile to auto or false")
        self.history = read_history(self.card.name, self.card.rates_measured_at)
        # by avoid_packing: forecasts are shared between max_lengths and ranks, but not between packed and single rows
        self.shared_forecasts: dict[bool, dict[tuple[Strategy, int, int], EvaluatedStrategy]] = {}
        self.stored = stored_quantisation(self.config, self.recipe.model_name_or_path)
        kernels_package = MAMBA if MAMBA2[-1] in self.shape.mixer else FLA
        self.fused_mixers = not self.card.is_cpu and kernel_problem(kernels_package, self.card.capability) is None
        free = resources.free_host_bytes(self.recipe, self.card)
        self.host_free_bytes = None if free is None else free - PROCESS_BYTES

    def best(self) -> _Attempt:
        """Return the fastest strategy that fits, else the smallest."""
        target: OffloadTarget = False if self.recipe.layer_offloading == AUTO else self.recipe.layer_offloading
        attempt = self.solve(target, avoid_packing=False)
        # a packed sequence fills max_length, so single rows may fit where it does not
        may_unpack = self.recipe.packing == AUTO and attempt.choices.value("packing")
        if not attempt.verdict.fits and may_unpack:
            single_rows = self.solve(target, avoid_packing=True)
            attempt = single_rows if single_rows.verdict.fits else attempt
        may_offload = self.recipe.layer_offloading == AUTO and not self.card.is_cpu
        if attempt.verdict.fits or attempt.evaluated.forecast.at_limit or not may_offload:
            return attempt
        # a file is for machines whose host memory can't hold the layers even in NF4
        least_bytes = self.shape.layers * self.shape.layer_bytes(NF4)
        needs_file = self.host_free_bytes is not None and self.host_free_bytes < least_bytes
        targets = OFFLOAD_TARGETS if needs_file else OFFLOAD_TARGETS[:1]
        for target, avoid_packing in itertools.product(targets, (False, True) if may_unpack else (False,)):
            if fitting := self._first_fitting(self._attempts(avoid_packing, target)):
                return fitting
        return attempt

    def solve(self, target: OffloadTarget, *, avoid_packing: bool) -> _Attempt:
        """Return the first attempt that fits, else the preferred attempt with its smallest strategy."""
        attempts = list(self._attempts(avoid_packing, target))
        preferred = attempts[0]
        if target and not self.open_strategies(preferred):
            raise resources.offloading_error(self.recipe, self.shape, self.host_free_bytes)
        if fitting := self._first_fitting(attempts):
            return fitting
        return replace(preferred, chosen=preferred.search.smallest(self.open_strategies(preferred)))

    def _first_fitting(self, attempts: Iterable[_Attempt]) -> _Attempt | None:
        # the first attempt that fits, also with rows of uneven length
        for attempt in attempts:
            search, options = attempt.search, self.open_strategies(attempt)
            if options and self.recipe.launch.is_sharded:  # estimates assume whole models: forecast the smallest first
                search.smallest(options)
            replayed, compiled_misfits = list[EvaluatedStrategy](), 0
            while (candidate := search.find(options) or search.fitting_after_all(options)) is not None:
                if candidate not in replayed:
                    candidate = self._replay_uneven_rows(attempt.choices, search, candidate)
                    replayed.append(candidate)
                if not search.fits(candidate.strategy):
                    continue
                fitting = replace(attempt, chosen=candidate)
                if search.lean_because(candidate.strategy):
                    return fitting
                if compiled := self._with_compiled_layers(fitting, options):
                    return compiled
                compiled_misfits += 1
                if compiled_misfits == MOST_COMPILED:
                    search.rule_out_compiling(options, f"{MOST_COMPILED} plans with compiled layers did not fit")
        return None

    def _replay_uneven_rows(self, choices: Choices, search: Search, candidate: EvaluatedStrategy) -> EvaluatedStrategy:
        if self.card.is_cpu or not (self.data and self.data.lengths):
            return candidate
        self.report_progress("replaying the allocator over rows of uneven length")
        settings = self._settings_of(choices, candidate.strategy)
        forecast = self._forecast(settings, candidate.width, lengths=self.data.lengths)
        replayed = replace(candidate, forecast=forecast)
        search.evaluated[search.key(candidate.strategy)] = replayed
        return replayed

    def _with_compiled_layers(self, attempt: _Attempt, options: list[Strategy]) -> _Attempt | None:
        choices, search, chosen = attempt.choices, attempt.search, attempt.evaluated
        values = {"torch_compile": True, "lean_layers": False, "mlp_tile_tokens": 0}
        compiled = replace(choices, values={**choices.values, **choices.only_auto(values)})
        self.report_progress("forecasting compiled layers")
        settings = self._settings_of(compiled, chosen.strategy)
        try:
            forecast = self._forecast(settings, search.job.width)
            reason = why_not_compiled(forecast)
        except RecipeError as error:
            reason = error.problems[0]
        if reason:
            search.rule_out_compiling(options, reason)
            return None
        # compiled layers are not replayed over rows of uneven length: take at least the margin of lean layers
        margin_bytes = chosen.forecast.peak_high_bytes - chosen.forecast.allocated_bytes
        high_bytes = max(forecast.peak_high_bytes, forecast.allocated_bytes + margin_bytes)
        forecast = replace(forecast, peak_high_bytes=high_bytes)
        search.note_compiled(chosen, forecast)
        if forecast.peak_high_bytes > self.budget_bytes:
            return None
        compiled = compiled.with_reason("lean_layers", "layers are compiled")
        compiled = compiled.with_reason("mlp_tile_tokens", "only lean layers have them")
        return replace(attempt, chosen=replace(chosen, forecast=forecast), compiled=compiled)

    def plan(self, attempt: _Attempt) -> Plan:
        search, chosen, choices = attempt.search, attempt.evaluated, attempt.compiled or attempt.choices
        steps = choices.total_steps(chosen.strategy.micro)
        time_factor = self.history.speed_factor  # of modelled times; None if neither rates nor an earlier run tell
        if knows_rates(self.card):
            time_factor = min(max(time_factor or 1.0, LEAST_FACTOR), MOST_FACTOR)
        if not attempt.compiled:
            search.rule_out_compiling([chosen.strategy], "the plan does not fit")  # an earlier reason stays
        why_compiled = search.lean_because(chosen.strategy) or compiling_pays(search.job, chosen.strategy, steps)[1]
        choices = explain_strategy(choices.with_reason("torch_compile", why_compiled), search, chosen)
        choices = defaults.choose_cadence(choices, steps)
        settings, timing = choices.settings(), search.timing(chosen.strategy)
        step_s, tokens_per_s = timing.corrected(time_factor)
        notes = (*chosen.forecast.notes, *self._notes(attempt))
        forecast = replace(chosen.forecast, step_s=step_s, tokens_per_s=tokens_per_s, notes=notes)
        train_s = step_s * steps if step_s and steps else None
        return Plan(
            settings=settings, reasons=choices.reasons, card=self.card, verdict=attempt.verdict, total_steps=steps,
            forecast=forecast, data=self.data, alternatives=alternatives(search, chosen, time_factor, choices),
            budget_bytes=self.budget_bytes, headroom_bytes=self.budget_bytes - forecast.peak_high_bytes,
            modelled_step_s=timing.step_s,
            checks=resources.check_resources(settings, forecast, self.card),
            layer_copies=layer_copies_of(timing, forecast, self.card),
            model_type=self.shape.family, parameters=self.shape.parameters,
            cost=cost_of(train_s, settings.price_per_hour),
            suggestions=() if attempt.verdict.fits else self._suggestions(attempt, settings, forecast),
        )  # fmt: skip

    def _notes(self, attempt: _Attempt) -> tuple[str, ...]:
        strategy, job = attempt.evaluated.strategy, attempt.search.job
        notes: list[str] = []
        if strategy.offload_target == "nvme":
            slow = "a hard disk or a network drive takes many times longer (FINETUNE_CACHE sets the folder)"
            notes.append(f"assumes a drive that reads {job.drive_bytes_s / 1e9:.1f} GB/s; {slow}")
        if self.history.rows:
            notes.append(self.history.summary(self.card.name, rates_known=knows_rates(self.card)))
        if attempt.evaluated.forecast.at_limit:
            notes.append(AT_LIMIT)
        if not attempt.verdict.fits:
            notes.append(resources.pinned_inputs_note(strategy, job, self.recipe, self.host_free_bytes))
        if attempt.choices.value("dtype") == "float16" and (risk := defaults.float16_risk(self.config)[1]):
            fix = "leave dtype out" if self.card.supports_bf16 else "set dtype=float32"
            notes.append(f"float16 is a risk: {risk}; if the loss becomes NaN, {fix}")
        return (*filter(None, notes), *stored_notes(self.stored))

    def _attempts(self, avoid_packing: bool, target: OffloadTarget) -> Iterator[_Attempt]:
        # every open max_length with every open rank, preferred first
        basics = defaults.choose_basics(self.budgeted_choices, self.card, self.config, self.shape, avoid_packing)
        forecasts = self.shared_forecasts.setdefault(avoid_packing, {})
        advised = basics.value("lora_r")
        lower = [] if basics.is_set("lora_r") else [rank for rank in reversed(defaults.RANKS) if rank < advised]
        for choices, rank in itertools.product(defaults.with_shorter_lengths(basics), [advised, *lower]):
            if rank != advised:
                choices = choices.choose("lora_r", rank, f"the advised rank {advised} does not fit")
                choices = choices.choose("lora_alpha", *defaults.advise_alpha(self.recipe, rank))
            job = Job(
                shape=self.shape, card=self.card, rank=rank, float32=choices.value("dtype") == "float32",
                batches=Batches(choices.value("max_length"), choices.value("packing"), self.data),
                batch=choices.value("effective_batch_size"), world=self.recipe.launch.num_processes,
                compiled=self.recipe.torch_compile is True,
                lean=choices.value("lean_layers"), attention=choices.value("attn_implementation"),
                fused_mixers=self.fused_mixers, method=choices.recipe.training_method,
            )  # fmt: skip
            lean = functools.partial(why_lean, job, choices, self.config)
            search = Search(job, self.budget_bytes, functools.partial(self._forecast_strategy, choices, job), lean, forecasts)
            yield _Attempt(choices, search, offload_target=target)

    def open_strategies(self, attempt: _Attempt) -> list[Strategy]:
        stored_formats = trainable_formats(self.stored)
        options = strategies(attempt.choices, self.card, self.shape, attempt.offload_target, stored_formats)
        if self.host_free_bytes is None:
            return options
        holdable = [option for option in options if resources.pinned_bytes(option, attempt.search.job) <= self.host_free_bytes]
        # plan what the recipe sets, even if host memory is too small: the plan says so
        return holdable if attempt.offload_target else holdable or options

    def _forecast_strategy(self, choices: Choices, job: Job, strategy: Strategy) -> Forecast:
        self.report_progress(f"forecasting {describe(strategy, job)}, rows of {job.width:,} tokens")
        return self._forecast(self._settings_of(choices, strategy), job.width)

    def _settings_of(self, choices: Choices, strategy: Strategy) -> Settings:
        values = strategy.settings(choices.value("effective_batch_size"), self.recipe.launch.num_processes)
        every = max(1, (choices.total_steps(strategy.micro) or 1000) // 10)
        more = {"per_device_eval_batch_size": strategy.micro, "eval_steps": every, "save_steps": every, "sample_answers": 0}
        return choices.settings(**choices.only_auto({**values, **more}))

    def _forecast(self, settings: Settings, width: int, **more: Any) -> Forecast:
        rows = self.data.row_shape(settings, width) if self.data and width > 1 else RowShape(width)
        forecast = make_forecast(self.config, settings, self.card, rows=rows, budget_bytes=self.budget_bytes, **more)
        # raise the upper end by the largest excess over the forecast in earlier runs here
        worst_error = max((*self.history.errors("process" if self.card.is_cpu else "allocated"), 0.0))
        high_bytes = forecast.peak_high_bytes + round(worst_error * forecast.allocated_bytes)
        if self.card.is_cpu:  # malloc's overhead is in the interval and in the measured process: don't add it twice
            high_bytes = max(forecast.peak_high_bytes, round(forecast.peak_bytes * (1 + worst_error)))
        return replace(forecast, peak_high_bytes=high_bytes, at_limit=forecast.at_limit and not worst_error)

    def _suggestions(self, attempt: _Attempt, settings: Settings, forecast: Forecast) -> tuple[Suggestion, ...]:
        # single changes that save memory, the largest saving first
        suggestions = []
        for changes, cost in _changes(self.recipe, settings, self.data):
            every_layer = {"offloaded_layers": forecast.layers} if "layer_offloading" in changes else {}
            try:
                changed = resolved(settings, **changes, **every_layer)
            except ValueError:  # excluded by another setting of the recipe, such as an optimizer that can't be sharded
                continue
            self.report_progress("forecasting a smaller setting")
            high_bytes = self._forecast(changed, min(changed.max_length, attempt.search.job.width)).peak_high_bytes
            saved_bytes = forecast.peak_high_bytes - high_bytes
            if saved_bytes > 0:
                suggestions.append(Suggestion(as_overrides(changes), saved_bytes, high_bytes, cost))
        return tuple(sorted(suggestions, key=lambda suggestion: -suggestion.saves_bytes))


def _changes(recipe: Recipe, settings: Settings, data: DataStatistics | None) -> Iterator[tuple[dict[str, Any], str]]:
    base = settings.base_format
    if base not in QUANTISED and not is_open(recipe, NF4):
        yield {NF4.setting: True}, "NF4 weights: dequantisation takes a few percent of time"
    elif base in QUANTISED and base.bits > NF4.bits:
        yield {base.setting: False, NF4.setting: True}, f"NF4 weights instead of {base.label}"
    if recipe.per_device_train_batch_size != AUTO and settings.per_device_train_batch_size > 1:
        steps = settings.gradient_accumulation_steps * settings.per_device_train_batch_size
        single_rows = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": steps}
        yield single_rows, "same effective batch, smaller micro-batches: slower on short rows"
    is_set = recipe.activation_checkpointing != AUTO or recipe.activation_checkpointing_every_n_layers != AUTO
    if is_set and (settings.activation_checkpointing is False or settings.activation_checkpointing_every_n_layers > 1):
        every_layer = {"activation_checkpointing": True, "activation_checkpointing_every_n_layers": 1}
        yield every_layer, "forward pass runs twice: up to 45 % more time"
    if recipe.optim != AUTO and OPTIMIZERS[settings.optim].state_bytes > OPTIMIZERS[EIGHT_BIT].state_bytes:
        yield {"optim": EIGHT_BIT}, "8-bit optimizer states"
    drop = {"excess_length": "drop"} if settings.excess_length == "raise" else {}
    least = LEAST_LENGTH + (sum(data.picture_tokens) if data else 0)
    for length in (settings.max_length // 2, settings.max_length // 4):
        if length >= least:
            yield {"max_length": length, **drop}, _length_cost(length, data)
    if recipe.layer_offloading is False and not settings.vision:
        recomputing = {} if settings.activation_checkpointing else {"activation_checkpointing": True}
        cost = "layer weights in host memory, copied to the GPU during computation"
        yield {"layer_offloading": "cpu", **recomputing}, cost
    if settings.lora_r > 8:
        yield {"lora_r": max(8, settings.lora_r // 4)}, "a smaller adapter learns less"


def _length_cost(length: int, data: DataStatistics | None) -> str:
    if data is None or not data.lengths:
        return "longer rows are dropped"
    longer = [row_tokens for row_tokens in data.lengths if row_tokens > length]
    share = sum(longer) / data.total_tokens if data.total_tokens else 0.0
    return f"{len(longer):,} of {data.rows:,} rows ({share:.1%} of the tokens) are longer"
